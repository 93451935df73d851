"""What layers are called where a :class:`ParametrizedModule` is around them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ignite_monitor.scaling.module import ParametrizedModule


def layer_name(modules: Mapping[str, nn.Module], name: str) -> str:
    """The name of the layer that a module is: its own, or that of the ParametrizedModule around it."""
    owner = name.rpartition(".")[0]
    return owner if name and isinstance(modules.get(owner), ParametrizedModule) else name

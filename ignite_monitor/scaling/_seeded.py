"""A reference whose weights are drawn anew from their seeds, each time that they are needed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from torch import nn

from ignite_monitor.model.structure import modules_by_name
from ignite_monitor.reference.reference import Reference
from ignite_monitor.scaling.parametrization import Parametrization


class SeededWeights:
    """Lets a reference's weights go, but while they are needed."""

    def __init__(self, reference: Reference, parametrization: Parametrization) -> None:
        self._layers = dict(parametrization.layers)
        names = {module: name for name, module in modules_by_name(reference.root).items()}
        self._weights: list[tuple[str, str, nn.Parameter]] = []
        for layer in self._layers.values():
            copied = dict(reference.modules[names[layer.module]].named_parameters())
            self._weights += [(layer.name, key, copied[key]) for key in layer.weights]
            for key in layer.biases:
                if "bias" in key.rpartition(".")[2] and copied[key].requires_grad:
                    copied[key].data.zero_()
        self._let_go()

    @property
    def seeds(self) -> dict[str, dict[str, int]]:
        """The seeds by layer and parameter."""
        return {name: dict(layer.seeds) for name, layer in self._layers.items()}

    def load(self, seeds: Mapping[str, Mapping[str, int]]) -> None:
        """Take the seeds of a saved run over.

        Raises:
            ValueError: if they are of other layers.
        """
        if {name: set(each) for name, each in seeds.items()} != {name: set(each) for name, each in self.seeds.items()}:
            raise ValueError("Argument state_dict should have the seeds of the parametrization's layers")
        self._layers = {
            name: dataclasses.replace(layer, seeds=dict(seeds[name])) for name, layer in self._layers.items()
        }

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """While it lasts, the weights are there."""
        try:
            for name, key, weight in self._weights:
                weight.data = self._layers[name].initial_weight(key)
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for _, _, weight in self._weights:
            weight.data = weight.data.new_empty(0)

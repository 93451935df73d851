"""What is kept of a reference's forward pass until the model reaches the same calls."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model._torch import version as version_of
from ignite_monitor.reference.call import Call


class KeptPass:
    """The calls of one forward pass: of the reference's what is kept, of the model's those under way.

    Args:
        offload: whether what is kept waits in the host's memory, page-locked, rather than on the device.
        unstable: names of modules of whose calls a copy has to be kept, since it is changed in place later on.

    Attributes:
        begun: the model's calls that have not returned yet.
        results: name -> what its calls have come to.
    """

    def __init__(self, offload: bool, unstable: set[str]) -> None:
        self._offload = offload
        self._unstable = unstable
        self._kept: dict[str, deque[list[tuple[Tensor, torch.device] | None]]] = {}
        self._versions: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._on_host: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]]] = {}
        self._unpaired: dict[str, None] = {}
        self.begun: dict[str, Call] = {}
        self.results: dict[str, list[Any]] = {}

    def keep(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        """Keep tensors of a call of the reference."""
        held = [None if each is None else (self._hold(name, each), each.device) for each in tensors]
        self._kept.setdefault(name, deque()).append(held)

    def changed(self) -> set[str]:
        """The names of whose tensors some have been changed in place since they were kept."""
        return {
            name
            for name, reference, version in self._versions
            if (tensor := reference()) is not None and version_of(tensor) != version
        }

    def take(self, name: str) -> list[Tensor | None] | None:
        """What was kept of the next call of a name; None where the reference has made no such call."""
        queue = self._kept.get(name)
        if not queue or name in self.begun:
            self._unpaired[name] = None
            return None
        return [None if each is None else each[0].to(each[1], non_blocking=True) for each in queue.popleft()]

    def unpaired(self) -> list[str]:
        """The names that are not called in the model as they are in the reference."""
        left = {name: None for name, queue in self._kept.items() if queue}
        return list(self._unpaired | left | dict.fromkeys(self.begun))

    def _hold(self, name: str, tensor: Tensor) -> Tensor:
        if self._offload:
            return self._offloaded(tensor)
        held = tensor.detach()
        if name in self._unstable:
            return held.clone()
        self._versions.append((name, weakref.ref(held), version_of(held)))
        return held

    def _offloaded(self, tensor: Tensor) -> Tensor:
        # The input of several modules is kept once.
        source, version, copy = self._on_host.get(id(tensor), (None, None, None))
        if source is not None and copy is not None and source() is tensor and version == version_of(tensor):
            same = copy()
            if same is not None:
                return same
        pinned = tensor.device.type == "cuda"
        held = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
        held.copy_(tensor.detach(), non_blocking=True)
        self._on_host[id(tensor)] = weakref.ref(tensor), version_of(tensor), weakref.ref(held)
        return held

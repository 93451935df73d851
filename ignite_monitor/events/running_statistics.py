"""Buffers that a forward pass updates, such as the running statistics of normalization layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import buffers_in, foreach_copy, version
from ignite_monitor.model.devices import move
from ignite_monitor.model.modes import has_local_data


class _Buffer(NamedTuple):
    registry: dict[str, Any]  # of the module
    name: str
    tensor: Tensor
    tracks: bool  # whether the module tracks running statistics: autograd does not know of all their changes


class RunningStatistics:
    """Keeps the buffers of a model from the start of a window, and restores them when its step is skipped.

    Buffers of modules that track running statistics are always copied, others where autograd knows of a change.
    """

    def __init__(self) -> None:
        self._modules: list[tuple[dict[str, Any], bool]] = []
        self._buffers: list[_Buffer] = []
        self._copies: list[Tensor] = []
        self._versions: list[int] = []

    def watch(self, model: nn.Module) -> None:
        """Take over the modules of a model."""
        modules = [(buffers_in(module), hasattr(module, "track_running_stats")) for module in model.modules()]
        self._modules = [(registry, tracks) for registry, tracks in modules if registry]
        self._buffers, self._copies, self._versions = [], [], []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers that may have changed since the last copy, in one operation."""
        known, self._buffers = (
            self._buffers,
            [
                _Buffer(registry, name, tensor, tracks)
                for registry, tracks in self._modules
                for name, tensor in registry.items()
                if isinstance(tensor, Tensor) and not tensor.is_inference() and has_local_data(tensor)
            ],
        )
        if [id(buffer.tensor) for buffer in known] != [id(buffer.tensor) for buffer in self._buffers]:
            self._copies = [buffer.tensor.detach().clone() for buffer in self._buffers]
        elif changed := self._changed():
            foreach_copy([copy for _, copy in changed], [tensor for tensor, _ in changed])
        self._versions = [version(buffer.tensor) for buffer in self._buffers]

    @torch.no_grad()
    def restore(self, flag: bool | Tensor) -> None:
        """Restore the buffers where a flag is True, without reading it if it is on a device."""
        changed = self._changed()
        if isinstance(flag, Tensor) and not flag.is_cpu:
            groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
            for pair in changed:
                groups.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
            for (device, _), pairs in groups.items():
                now, then = (torch.cat([tensor.reshape(-1) for tensor in side]) for side in zip(*pairs, strict=True))
                parts = torch.where(move(flag, device), then, now).split([tensor.numel() for tensor, _ in pairs])
                foreach_copy(
                    [tensor for tensor, _ in pairs],
                    [part.view_as(tensor) for part, (tensor, _) in zip(parts, pairs, strict=True)],
                )
        elif flag and changed:
            foreach_copy([tensor for tensor, _ in changed], [copy for _, copy in changed])

    def _changed(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers that may have changed since they were copied, with their copies."""
        pairs = []
        for buffer, copy, number in zip(self._buffers, self._copies, self._versions, strict=False):
            now = buffer.registry.get(buffer.name)  # the forward pass may have put another tensor in its place
            if now is not buffer.tensor and (not isinstance(now, Tensor) or now.shape != copy.shape):
                continue
            if buffer.tracks or now is not buffer.tensor or version(now) != number:
                pairs.append((now, copy))
        return pairs

"""Buffers that a forward pass updates, such as the running statistics of normalization layers."""

from __future__ import annotations

from collections.abc import Sequence
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
        self._window, self._train_step = _Copies(), _Copies()

    def watch(self, model: nn.Module) -> None:
        """Take over the modules of a model."""
        modules = [(buffers_in(module), hasattr(module, "track_running_stats")) for module in model.modules()]
        self._modules = [(registry, tracks) for registry, tracks in modules if registry]
        self._window, self._train_step = _Copies(), _Copies()

    def keep(self, may_continue: bool = False) -> None:
        """Copy the buffers, at the start of a window or of a train step that may continue it."""
        buffers = [
            _Buffer(registry, name, tensor, tracks)
            for registry, tracks in self._modules
            for name, tensor in registry.items()
            if isinstance(tensor, Tensor) and not tensor.is_inference() and has_local_data(tensor)
        ]
        (self._train_step if may_continue else self._window).take(buffers)

    def continue_window(self, accumulates: Tensor) -> None:
        """Start a new window with the train step, unless a 0-dim bool tensor is True: it accumulates gradients."""
        window, train_step = self._window, self._train_step
        if [copy.shape for copy in window.copies] != [copy.shape for copy in train_step.copies]:
            self._window = train_step
            return
        _copy_where(~accumulates, window.copies, train_step.copies)
        both = zip(window.versions, train_step.versions, strict=True)
        window.versions = [number if number == other else -1 for number, other in both]

    def restore(self, flag: Tensor) -> None:
        """Restore the buffers where a flag is True, without reading it if it is on a device."""
        changed = self._window.changed()
        _copy_where(flag, [tensor for tensor, _ in changed], [copy for _, copy in changed])


class _Copies:
    """Copies of buffers at one time."""

    def __init__(self) -> None:
        self.buffers: list[_Buffer] = []
        self.copies: list[Tensor] = []
        self.versions: list[int] = []

    @torch.no_grad()
    def take(self, buffers: list[_Buffer]) -> None:
        """Copy the buffers that may have changed since the last copy, in one operation."""
        known, self.buffers = self.buffers, buffers
        if [id(buffer.tensor) for buffer in known] != [id(buffer.tensor) for buffer in buffers]:
            self.copies = [buffer.tensor.detach().clone() for buffer in buffers]
        elif changed := self.changed():
            foreach_copy([copy for _, copy in changed], [tensor for tensor, _ in changed])
        self.versions = [version(buffer.tensor) for buffer in buffers]

    def changed(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers that may have changed since they were copied, with their copies."""
        pairs = []
        for buffer, copy, number in zip(self.buffers, self.copies, self.versions, strict=False):
            now = buffer.registry.get(buffer.name)  # the forward pass may have put another tensor in its place
            if now is not buffer.tensor and (not isinstance(now, Tensor) or now.shape != copy.shape):
                continue
            if buffer.tracks or now is not buffer.tensor or version(now) != number:
                pairs.append((now, copy))
        return pairs


@torch.no_grad()
def _copy_where(flag: Tensor, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others where a flag is True, without reading it if it is on a device."""
    if flag.is_cpu:
        if targets and torch.is_nonzero(flag):
            foreach_copy(targets, sources)
        return
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        groups.setdefault((target.device, target.dtype), []).append((target, source))
    for (device, _), pairs in groups.items():
        now, new = (torch.cat([tensor.reshape(-1) for tensor in side]) for side in zip(*pairs, strict=True))
        parts = torch.where(move(flag, device), new, now).split([target.numel() for target, _ in pairs])
        values = [part.view_as(target) for part, (target, _) in zip(parts, pairs, strict=True)]
        foreach_copy([target for target, _ in pairs], values)

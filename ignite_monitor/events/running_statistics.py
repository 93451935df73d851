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
    """A buffer when it was copied."""

    registry: dict[str, Any]  # of the module
    name: str
    tracks: bool  # whether the module tracks running statistics: autograd does not know of all their changes
    tensor: Tensor
    copy: Tensor
    version: int

    def changed(self) -> Tensor | None:
        """The tensor to restore, if it may have changed."""
        now = self.registry.get(self.name)
        if now is self.tensor:
            return now if self.tracks or version(now) != self.version else None
        if not isinstance(now, Tensor) or now.shape != self.copy.shape:
            return None
        # The forward pass has put another tensor in its place, which may be the user's, as of a batch.
        self.registry[self.name] = now = now.clone()
        return now


class RunningStatistics:
    """Keeps the buffers of a model from the start of a window, and restores them when its step is skipped.

    Buffers of modules that track running statistics are always copied, others where autograd knows of a change.
    """

    def __init__(self) -> None:
        self._modules: list[tuple[dict[str, Any], bool]] = []
        self._window: list[_Buffer] = []
        self._train_step: list[_Buffer] = []  # from the start of a train step that may continue the window

    def watch(self, model: nn.Module) -> None:
        """Take over the modules of a model."""
        modules = [(buffers_in(module), hasattr(module, "track_running_stats")) for module in model.modules()]
        self._modules = [(registry, tracks) for registry, tracks in modules if registry]
        self._window, self._train_step = [], []

    def keep(self, may_continue: bool = False) -> None:
        """Copy the buffers, at the start of a window or of a train step that may continue it."""
        if may_continue:
            self._train_step = self._copied(self._train_step)
        else:
            self._window = self._copied(self._window)

    @torch.no_grad()
    def _copied(self, former: list[_Buffer]) -> list[_Buffer]:
        """Copy the buffers that may have changed since earlier copies, in one operation."""
        known, result, changed = {id(buffer.tensor): buffer for buffer in former}, [], []
        for registry, tracks in self._modules:
            for name, tensor in registry.items():
                if not isinstance(tensor, Tensor) or tensor.is_inference() or not has_local_data(tensor):
                    continue
                number, before = version(tensor), known.get(id(tensor))
                copy = tensor.detach().clone() if before is None else before.copy
                if before is not None and (tracks or before.version != number):
                    changed.append((copy, tensor))
                result.append(_Buffer(registry, name, tracks, tensor, copy, number))
        if changed:
            foreach_copy(*map(list, zip(*changed, strict=True)))
        return result

    def continue_window(self, accumulates: Tensor) -> None:
        """Start a new window with the train step, unless a 0-dim bool tensor is True: it accumulates gradients."""
        window, train_step = self._window, self._train_step
        if [buffer.copy.shape for buffer in window] != [buffer.copy.shape for buffer in train_step]:
            self._window, self._train_step = train_step, []
            return
        _copy_where(~accumulates, [buffer.copy for buffer in window], [buffer.copy for buffer in train_step])
        both = zip(window, train_step, strict=True)
        self._window = [one if one.version == other.version else one._replace(version=-1) for one, other in both]

    @torch.no_grad()
    def restore(self, flag: Tensor) -> None:
        """Restore the buffers where a flag is True, without reading it if it is on a device."""
        if flag.is_cpu and not torch.is_nonzero(flag):
            return
        changed = [(now, buffer.copy) for buffer in self._window if (now := buffer.changed()) is not None]
        _copy_where(flag, [now for now, _ in changed], [copy for _, copy in changed])


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

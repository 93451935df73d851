"""All that goes back, together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ignite_monitor.monitor.base import Monitor
from ignite_monitor.rollback.parts import MonitorPart, is_scheduler, nonfinite_in, part_of, tensors_in


class Training:
    """What makes up a training.

    Args:
        to_save: name -> what has a state.
        rewind: whether schedules go back too, and what they set.

    Attributes:
        monitors: those among it.
        modules: the modules among it.
        optimizers: the optimizers among it.
        exempt: the paths of what was not finite when it was first seen.
    """

    def __init__(self, to_save: Mapping[str, Any], rewind: bool) -> None:
        self.rewind = rewind
        things = [*to_save.values()]
        self.monitors = [each for each in things if isinstance(each, Monitor)]
        self.modules = [each for each in things if isinstance(each, nn.Module)]
        self.optimizers = [each for each in things if hasattr(each, "register_step_post_hook")]
        self.parts = {
            name: part_of(thing)
            for name, thing in to_save.items()
            if not isinstance(thing, Monitor) and (rewind or not is_scheduler(thing))
        }
        self.exempt: set[str] = set()

    def state(self) -> dict[str, Any]:
        """The state as it is, nothing copied."""
        return {name: part.state() for name, part in self.parts.items()}

    def state_of(self, monitors: Iterable[Monitor]) -> dict[str, Any]:
        """That of monitors, by name."""
        return {name: part.state() for name, part in self._parts_of(monitors).items()}

    def put_back(self, state: Mapping[str, Any], monitors: Iterable[Monitor], of_monitors: Mapping[str, Any]) -> None:
        """Have an earlier state again, and no gradients."""
        for name, part in self.parts.items():
            part.put_back(state[name], self.rewind)
        for name, part in self._parts_of(monitors).items():
            if name in of_monitors:
                part.put_back(of_monitors[name], self.rewind)
        for parameter in self._parameters():
            parameter.grad = None

    def new_nonfinite(self, before: Mapping[str, Any] | None) -> list[str]:
        """The paths of what is not finite now, and was once; reads the device.

        Masks of attention are not, and may be made later.

        Args:
            before: the state of the newest snapshot, if there is any.
        """
        nonfinite = nonfinite_in(self.state(), self.exempt)
        if nonfinite:
            known = {path for path, _ in tensors_in(before)}
            self.exempt |= {path for path in nonfinite - known if ".buffers." in path or not known}
        return sorted(nonfinite - self.exempt)

    def _parameters(self) -> Iterable[Tensor]:
        for module in self.modules:
            yield from module.parameters()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _parts_of(self, monitors: Iterable[Monitor]) -> dict[str, MonitorPart]:
        named = {each.prefix or each.families[0]: each for each in monitors}
        # Who has parameter groups sets learning rates, as schedules do.
        kept = {n: m for n, m in named.items() if self.rewind or not hasattr(m, "param_groups")}
        return {name: MonitorPart(monitor) for name, monitor in kept.items()}

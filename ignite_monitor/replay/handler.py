"""ReplayCheckHandler: a second pass of the train step, compared with the first one bit by bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ignite_monitor.events.gradient_tracker import after_each_backward
from ignite_monitor.keys import REPLAY
from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.dtensor import reshard
from ignite_monitor.model.isolation import in_second_pass
from ignite_monitor.model.names import listed
from ignite_monitor.monitor.arguments import check_generators, check_optimizer
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.replay.second_pass import Flags, SecondPass, SecondPassEnded

_MIN_SAME = 3  # second passes with the same gradients, before another one is taken for a fault


class ReplayCheckHandler(Monitor, schema=REPLAY):
    """Run the train step once more, and compare the gradients of both passes bit by bit.

    In monitored iterations the train step runs again before its first optimizer step: same batch, weights and RNG
    state. The second pass ends with its last backward, before any step of an optimizer or scaler. A train step that
    keeps state from one call to the next is not repeated.

    The handler switches itself off for the rest of the run, and reports the reason, after the first train step that
    keeps state or can't be repeated, and after a difference that fewer than three equal passes of this run precede.
    Attach it on all ranks.

    {keys}

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped), with all modules that it trains.
        optimizer: its optimizer.
        generators: random generators that the train step uses, and that it and its modules do not reach.
        group: the ranks that replay together, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument has the wrong type.

    Examples:
        .. code-block:: python

            replay = ReplayCheckHandler(model, optimizer)
            replay.attach(trainer, Events.ITERATION_STARTED(every=1000))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        generators: Iterable[Any] = (),
        group: Group = None,
        prefix: str = "replay",
    ) -> None:
        super().__init__(model, prefix, group=group)
        check_optimizer(optimizer)
        self._generators = check_generators(generators)
        self.reset_run_state()

    def reset_run_state(self) -> None:
        self.is_finished, self._same_count = False, 0  # second passes that gave the same gradients
        self._objects: list[weakref.ref[Any]] | None = None  # modules and optimizers of this process

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        is_first = self._objects is None
        if self._objects is None:
            objects, kinds = gc.get_objects(), (nn.Module, Optimizer)
            self._objects = [weakref.ref(item) for item in objects if issubclass(type(item), kinds)]
        # In the first train step DistributedDataParallel sets up its buckets.
        return [] if is_first and self.ranks.size > 1 else [self._watched(self._source)]

    @contextmanager
    def _watched(self, source: Any) -> Iterator[None]:
        """Replay the train step before its first optimizer step, or at its end if it makes none."""
        reshard(self.model)
        owned = ["dataloader", "metrics", *(name for monitor in source.monitors for name in monitor.attributes)]
        alive = [item for reference in self._objects or () if (item := reference()) is not None]
        objects = sorted(alive, key=lambda item: isinstance(item, nn.Module))  # whose names come first
        second = SecondPass(self.model, source.train_step, objects, owned, self._generators)

        def replay(*step: Any) -> None:
            if in_second_pass():
                raise SecondPassEnded
            if not second.is_replayed:
                second.is_replayed = True
                reason = self._replay(second, source, bool(step))
                if reason:
                    self.is_finished = True
                    self.report("switched_off", f"off for the rest of the run: {reason}", once=False)

        with (
            after_each_backward(self.model.parameters(), second.backward_ended),
            register_optimizer_step_pre_hook(torch.compiler.disable(replay)),
        ):
            yield
            replay()

    def _replay(self, second: SecondPass, source: Any, makes_step: bool) -> str:
        """Publish the result; return the reason to switch off, if there is one."""
        if not self.ranks.all_present:
            return "ranks may have run out of data under join()"
        is_skipped = not (makes_step or second.passes)
        obstacle = "" if is_skipped else second.obstacle()
        if source.listened and second.passes > 1:
            obstacle = "handlers of MonitorEvents may change gradients between the backward passes"
        if self.ranks.size > 1:
            refused, is_skipped = self._on_any_rank([bool(obstacle)], [is_skipped])
            obstacle = obstacle or "another rank can't repeat its train step" * refused
        if obstacle or is_skipped:
            return "" if is_skipped else obstacle
        differing, kept = Flags(), Flags()
        source.running = False  # no other monitor measures this pass
        try:
            with second.errors_noted():  # a train step may not be written to run twice
                differing, kept = second.run()
        finally:
            source.running = True
        # After an overflow, which makes no step, a GradScaler has changed its scale.
        overflows = [] if makes_step else [~item.isfinite().all() for item in second.gradients.values()]
        flags = differing.values(), [bool(second.error)], kept.values(), overflows
        differs, fails, keeps, is_skipped = self._on_any_rank(*flags)
        if fails:
            return f"the second pass raised {second.error or 'an error on another rank'}"
        if is_skipped or keeps:
            return "" if is_skipped else f"the train step keeps state, which a second pass changes: {_named(kept)}"
        self.publish(reproducible=torch.full((), float(not differs), device=device_of(self.model)))
        if not differs:
            self._same_count += 1
            return ""
        text = f"a second pass gave other gradients: {_named(differing)}. {self._same_count} earlier ones of this run "
        if self._same_count < _MIN_SAME:
            return f"{text}gave the same, too few to tell a fault from a nondeterministic operation"
        text += "gave the same: test the machine for a hardware fault"
        self.report("gradients_differ", text, severity="problem", once=False)
        return ""

    def _on_any_rank(self, *flags: Iterable[bool | Tensor]) -> list[bool]:
        """Return for every list whether a flag in it is set on any rank; this is the only synchronization."""
        device, rows = device_of(self.model), []
        for row in map(list, flags):
            certain = torch.full((), any(flag is True for flag in row), device=device)
            rows.append(torch.stack([certain, *(move(flag, device) for flag in row if isinstance(flag, Tensor))]).any())
        return (self.ranks.max(torch.stack(rows).float()) > 0).tolist()


def _named(flags: Flags) -> str:
    return listed([name for name, flag in flags.items() if flag], 8) or "on another rank"

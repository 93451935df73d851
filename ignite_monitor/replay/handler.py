"""ReplayCheckHandler: a second pass of the train step, compared with the first one bit by bit."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
from ignite.engine import Engine
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ignite_monitor.events.hooks import after_each_backward, weakly
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import REPLAY
from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.isolation import generators_of, generators_used_by
from ignite_monitor.model.modes import in_backward
from ignite_monitor.model.names import listed
from ignite_monitor.model.samples import reshard
from ignite_monitor.model.second_pass import FirstPass, SecondPassEnded, others_in_process
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import all_take_part, max_over_ranks, world_size
from ignite_monitor.monitor.transfer import DeferredFlag


class ReplayCheckHandler(Monitor, schema=REPLAY):
    """Run the train step once more, and compare the gradients of both passes bit by bit.

    In monitored iterations, and at a spike of ``GradMonitor`` in any iteration, the train step runs again before the
    first optimizer step: same batch, weights and RNG state. The second pass ends with its last backward, before any
    step of an optimizer, scheduler or scaler; then everything is restored. A warning names the tensors that differ.
    Other side effects of the train step before that backward happen twice.

    A difference is not reported if the second pass may have started from another state, nor at a spike between
    monitored iterations before a second pass has been the same. Attach the handler on all ranks.

    {keys}

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped), with all modules that it trains.
        optimizer: its optimizer.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument is of another type.

    Examples:
        .. code-block:: python

            replay = ReplayCheckHandler(model, optimizer)
            replay.attach(trainer, Events.ITERATION_STARTED(every=1000))
    """

    _state_dict_all_req_keys = ("same_count",)

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, prefix: str = "replay") -> None:
        super().__init__(model, prefix)
        check_optimizer(optimizer)
        self._same_count = 0  # second passes that gave the same gradients
        self._is_due = False  # whether the iteration passed the filters
        self._differs = DeferredFlag()
        self._result: tuple[Any, ...] = ()  # of the last second pass, until the host knows of it
        self.reset_run_state()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Number of second passes that gave the same gradients."""
        self._resolve()
        return OrderedDict(same_count=self._same_count)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._same_count = int(state_dict["same_count"])

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients),
            (MonitorEvents.SPIKE_DETECTED, self._on_gradients),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._replay),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._replay),
        ]

    def reset_run_state(self) -> None:
        self._resolve()
        self._first: FirstPass | None = None  # until it is replayed
        self._is_second_pass = False
        self._random: tuple[Any, Any] | None = None  # devices and generators with an RNG state
        self._others: Any = None  # modules and optimizers that the second pass may change

    def _start(self, engine: Engine) -> None:
        super()._start(engine)
        self._is_due = self._monitored
        monitors = [] if self._source is None else self._source.monitors
        self._monitored |= any(hasattr(monitor, "flag") for monitor in monitors)  # which may detect a spike

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        engine, source = self._attached_to(), self._source
        if engine is None or source is None or source.train_step is None:
            return []
        is_first = self._random is None
        if is_first or self._is_due:  # a train step may create generators later
            devices = {item.device for item in (*self.model.parameters(), *self.model.buffers())}
            self._random = devices, [*generators_of(self.model).values(), *generators_used_by(source.train_step.func)]
        if is_first and world_size() > 1:  # DistributedDataParallel may not have set up its buckets
            return []
        reshard(self.model)
        self._first = FirstPass(self.model, engine.state, self._random, self._is_due)
        return [register_optimizer_step_pre_hook(torch.compiler.disable(weakly(self._on_any_step)))]

    def _on_any_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_second_pass:
            raise SecondPassEnded
        if self._source is not None and not self._source.trackers[id(self.model)].shares(optimizer):
            self._skip("an optimizer of other parameters steps first; give a model that holds all of them")

    def _skip(self, reason: str) -> None:
        if self._first is not None and (self._is_due or self._first.gradients):
            self._warn_once(f"not reported: {reason}")
        self._first = None

    def _on_gradients(self, engine: Engine, ready: Any = None) -> None:
        is_spike = ready is None
        if self._first is not None:
            self._first.count += not is_spike
            if is_spike or self._is_due or self._first.gradients:
                self._first.copy_gradients()

    @torch.no_grad()
    def _replay(self, engine: Engine, step: Any = None) -> None:
        device = device_of(self.model)
        # An autocast can't be entered again before it is left.
        if in_backward() or any(map(torch.is_autocast_enabled, {"cpu", device.type})) or not all_take_part(self.model):
            self._skip("a step is made inside of backward or autocast, or ranks may have run out of data under join()")
        elif self._first is not None and not self._first.count:
            self._skip("the train step has no backward before its first optimizer step")
        first, self._first = self._first, None
        source = self._source
        if first is None or not first.gradients or source is None or source.train_step is None:
            return
        self._resolve()
        has_handlers = source.listened or any(callable(getattr(item, "on_spike", None)) for item in source.monitors)
        reasons = {
            "no second pass was the same before": not (self._is_due or self._same_count),
            "handlers may change gradients between backward passes": has_handlers and first.count > 1,
        }
        unknown = first.has_changed()
        self._others = others_in_process(self.model) if self._others is None else self._others
        self._is_second_pass, failure = True, "the second pass computes other gradients"
        try:
            with suppress(SecondPassEnded), ExitStack() as stack:
                stack.callback(setattr, source, "running", source.running)
                source.running = False  # no other monitor measures this pass
                stack.enter_context(first.restored(self._others))
                stack.callback(reshard, self.model)
                parameters = source.trackers[id(self.model)].parameters
                stack.enter_context(after_each_backward(parameters, first.backward_ended))
                if step is None:  # else the hook of the train step exists, and hooks are being called
                    stack.enter_context(register_optimizer_step_pre_hook(weakly(self._on_any_step)))
                source.train_step()
        except Exception as error:  # noqa: BLE001 - of the user's train step, which was not written to run twice
            failure = f"the train step can't run twice: {type(error).__name__}: {error}"
        finally:
            self._is_second_pass = False
        reasons[failure] = not first.rows
        causes = [reason for reason, is_true in reasons.items() if is_true]
        table = torch.stack([move(row, device) for row in first.rows.values()] or [torch.ones(2, device=device)])
        # Without a step a GradScaler may have changed its scale.
        unknown = unknown | bool(causes) | (step is None) & ~table.isfinite().all()
        flags = max_over_ranks(torch.stack((table[:, 0].any(), unknown)).float()) > 0
        self.publish(reproducible=torch.where(flags.all(), math.nan, (~flags[0]).float()))
        self._differs.set(flags[0])
        self._result = engine.state.iteration, [*first.rows], table, causes, flags
        if table.is_cpu:
            self._resolve()

    def _resolve(self) -> None:
        """Count the last second pass, or warn of its difference."""
        result, self._result = self._result, ()
        if not result:
            return
        iteration, names, table, causes, flags = result
        if not self._differs.take(wait=True):
            self._same_count += 1
            return
        rows = zip(names, table.tolist(), strict=False)
        differing = [f"{name} (by up to {largest:.3g})" for name, (differs, largest) in rows if differs]
        text = listed(differing, 8) or "none of this rank"
        if flags.tolist()[1]:
            cause = (
                "; ".join(causes) or "the batch, weights, earlier gradients or the scale of a GradScaler have changed"
            )
            self._warn_once("a difference in gradients (%s) is not reported: %s", text, cause)
            return
        self.logger.warning(
            "%s: iteration %d: a second pass with the same batch, weights and RNG state gave other gradients: %s. "
            "%d earlier passes were the same. If most passes are, a hardware fault is likely, else an operation that "
            "is not deterministic, or a state that the train step keeps.",
            *(self._title, iteration, text, self._same_count),
        )

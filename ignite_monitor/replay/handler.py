"""ReplayCheckHandler: a second pass of the train step, compared with the first one bit by bit."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import chain
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ignite_monitor.events.hooks import after_each_backward, weakly
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import REPLAY
from ignite_monitor.model._torch import backward_number
from ignite_monitor.model.devices import device_of, move, wide_dtype
from ignite_monitor.model.isolation import generators_of, generators_used_by
from ignite_monitor.model.modes import in_backward
from ignite_monitor.model.names import listed, named_parameters
from ignite_monitor.model.samples import local, reshard
from ignite_monitor.model.second_pass import StartState, difference, trained_elsewhere
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import all_take_part, max_over_ranks, world_size
from ignite_monitor.monitor.transfer import DeferredFlag


class SecondPassEnded(BaseException):
    """Ends a second pass; no ``except Exception`` of a train step catches it."""


class ReplayCheckHandler(Monitor, schema=REPLAY):
    """Run the train step once more, and compare the gradients of both passes bit by bit.

    In monitored iterations, and at a spike of ``GradMonitor`` in any iteration, the train step runs again before the
    first optimizer step: same batch, weights and RNG state. The second pass ends with its last backward, before any
    step of an optimizer, scheduler or scaler; then everything is restored. A warning names the tensors that differ.
    Other side effects of the train step before that backward happen twice.

    A difference is not reported if the second pass may have started from another state, nor at a spike between
    monitored iterations before any pass was reproducible. Attach the handler on all ranks.

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

    _state_dict_all_req_keys = ("counts",)

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, prefix: str = "replay") -> None:
        super().__init__(model, prefix)
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self._counts = torch.zeros(2, dtype=torch.float64, device="cpu")  # of second passes: the same, different
        self._is_due = False  # whether the iteration passed the filters
        self._differs = DeferredFlag()
        self._result: tuple[Any, ...] = ()  # for a warning
        self.reset_run_state()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Numbers of second passes that gave the same gradients, and other ones."""
        return OrderedDict(counts=self._counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._counts = torch.as_tensor(state_dict["counts"], dtype=torch.float64, device="cpu").reshape(2).clone()

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.SPIKE_DETECTED, self._on_spike),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._replay),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._replay),
        ]

    def reset_run_state(self) -> None:
        self._report(wait=True)
        self._before: StartState | None = None  # the train step, until it is replayed
        self._gradients: dict[str, Tensor | None] = {}  # of the last backward before the first optimizer step
        self._kept, self._count = -1, 0  # number of that backward; backward passes before the step
        self._left: int | None = None  # of them in a second pass that is running
        self._rows: dict[str, Tensor] = {}  # comparison of every gradient
        self._random: tuple[Any, Any] | None = None  # devices and generators with an RNG state
        self._elsewhere: list[Any] = []

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
            devices = {item.device for item in chain(self.model.parameters(), self.model.buffers())}
            generators = *generators_of(self.model).values(), *generators_used_by(source.train_step.func)
            self._random = devices, generators
        if is_first and world_size() > 1:  # DistributedDataParallel may not have set up its buckets
            return []
        reshard(self.model)
        self._gradients, self._kept, self._count = {}, -1, 0
        self._before = StartState(self.model, vars(engine.state), self._random, self._is_due)
        return [register_optimizer_step_pre_hook(torch.compiler.disable(weakly(self._on_any_step)))]

    def _on_any_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._left is not None:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if callable(closure):
                closure()
            raise SecondPassEnded
        if self._source is not None and not self._source.trackers[id(self.model)].shares(optimizer):
            self._skip("an optimizer of other parameters steps first; give a model that holds all of them")

    def _skip(self, reason: str) -> None:
        if self._before is not None and (self._is_due or self._gradients):
            self._warn_once(f"not reported: {reason}")
        self._before = None

    def _on_gradients_ready(self, engine: Engine, _: Any) -> None:
        self._count += self._before is not None
        if self._is_due or self._gradients:
            self._on_spike(engine)

    def _on_spike(self, engine: Engine) -> None:
        # Once per backward: handlers of a spike may change the gradients.
        if self._before is not None and self._kept != backward_number() and in_backward():
            self._kept = backward_number()
            self._gradients = {name: None if item is None else item.clone() for name, item in self._named_gradients()}

    def _named_gradients(self) -> list[tuple[str, Tensor | None]]:
        gradients = [(name, item.grad) for name, item, _ in named_parameters(self.model)]
        return [(name, None if item is None else local(item.detach()).to_dense()) for name, item in gradients]

    @torch.no_grad()
    def _replay(self, engine: Engine, step: Any = None) -> None:
        device = device_of(self.model)
        conditions = {
            "ranks may have run out of data under join()": not all_take_part(self.model),
            "an optimizer steps inside of backward": in_backward(),
            "the optimizer steps inside of autocast": any(map(torch.is_autocast_enabled, {"cpu", device.type})),
            "the train step has no backward before its first optimizer step": not self._count,
        }
        for reason in [reason for reason, is_true in conditions.items() if is_true]:
            self._skip(reason)
        before, gradients, self._before, self._gradients = self._before, self._gradients, None, {}
        if before is None or not gradients:
            return
        self._rows, self._left, failure = {}, self._count, "the second pass has fewer backward passes"
        try:
            self._run_second_pass(engine, step, before, gradients)
        except Exception as error:  # noqa: BLE001 - of the user's train step, which was not written to run twice
            failure = f"the train step can't run twice: {type(error).__name__}: {error}"
        finally:
            self._left = None
        rows = [*self._rows.values()] or [torch.tensor([1.0, 0.0, 0.0], device="cpu")]
        wide = wide_dtype(device)
        table = torch.stack([move(row.to(wide_dtype(row.device)), device) for row in rows])
        counts = move(self._counts.to(wide), device)
        reasons = {
            **before.changes,
            failure: not self._rows,
            "gradients of earlier iterations are not known": (not before.is_whole) & table[:, 2].isnan().any(),
            "no second pass was the same before this spike": (not before.is_whole) & (counts[0] == 0),
            "a GradScaler may have changed its scale": (step is None) & ~table.isfinite().all(),
        }
        flags = torch.stack([move(torch.as_tensor(flag), device) for flag in reasons.values()])
        both = torch.stack((table[:, 0].any(), flags.any())).to(wide)
        differs, unknown = (max_over_ranks(both) > 0).unbind()
        self._counts = counts + torch.stack((~differs, differs & ~unknown))
        self.publish(reproducible=torch.where(differs & unknown, math.nan, (~differs).to(wide)))
        self._differs.set(differs)
        self._result = engine.state.iteration, [*self._rows], table, [*reasons], flags, self._counts
        self._report(wait=False)

    def _run_second_pass(
        self, engine: Engine, step: Any, before: StartState, gradients: dict[str, Tensor | None]
    ) -> None:
        source = self._source
        if source is None or source.train_step is None:
            return
        self._elsewhere = self._elsewhere or trained_elsewhere(self.model)
        ended = functools.partial(weakly(self._on_backward_end), gradients)
        with ExitStack() as stack:
            stack.callback(setattr, source, "running", source.running)
            source.running = False  # no other monitor measures this pass
            stack.enter_context(before.restored(vars(engine.state), self.optimizer, self._elsewhere))
            stack.callback(reshard, self.model)
            stack.enter_context(after_each_backward(source.trackers[id(self.model)].parameters, ended))
            if step is None:  # else the hook of the train step exists, and hooks are being called
                stack.enter_context(register_optimizer_step_pre_hook(weakly(self._on_any_step)))
            with suppress(SecondPassEnded):
                source.train_step()

    def _on_backward_end(self, gradients: dict[str, Tensor | None]) -> None:
        replicas = (module for module in self.model.modules() if isinstance(module, DistributedDataParallel))
        if self._left and all(module.require_backward_grad_sync for module in replicas):
            self._left -= 1
            if not self._left:
                self._rows = {name: difference(gradients.get(name), item) for name, item in self._named_gradients()}
                raise SecondPassEnded

    def _report(self, wait: bool) -> None:
        """Warn of a difference, as soon as the host knows of it."""
        if not self._differs.take(wait) or not self._result:
            return
        iteration, names, table, reasons, flags, counts = self._result
        self._result = ()
        causes = [reason for reason, flag in zip(reasons, flags.tolist(), strict=True) if flag]
        if causes:
            self._warn_once("a difference is not reported: %s", "; ".join(causes))
            return
        rows = zip(names, table.tolist(), strict=True)
        words = [f"{name} (by up to {largest:.3g})" for name, (differs, largest, _) in rows if differs]
        text = "%s: iteration %d: a second pass with the same batch, weights and RNG state gave other gradients: %s. "
        text += "%d earlier passes were the same. If many were, a hardware fault is likely; if few were, an operation "
        text += "that is not deterministic, or a state that the train step keeps."
        self.logger.warning(text, self._title, iteration, listed(words, 8) or "on another rank", int(counts[0]))

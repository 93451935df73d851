"""RollbackHandler: restore a snapshot when training diverges, and skip the batches since."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.checks import check_choice, check_count, check_function, check_real, check_type
from ignite_monitor.events.monitor_events import MonitorEvents, Phase
from ignite_monitor.events.run_summary import RunSummary
from ignite_monitor.keys import ROLLBACK
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.tensors import count_items, loss_in
from ignite_monitor.monitor.base import Handlers, Monitor, NoModel
from ignite_monitor.monitor.ranks import Group, Ranks
from ignite_monitor.rollback import limits
from ignite_monitor.rollback.policy import RECOVERING, WATCHING, Action, Event, RecoveryPolicy
from ignite_monitor.rollback.snapshots import Snapshot, Snapshots, TrainingState, clone, finite, lowered_rates, public
from ignite_monitor.rollback.triggers import LossThreshold, Signals, Triggers


class RollbackHandler(Monitor, schema=ROLLBACK):
    """Restore an in-memory snapshot when training diverges, and skip the batches since (PaLM, section 5.1).

    Every ``every`` iterations the state of ``to_save`` is copied. On instability the newest snapshot from before the
    first sign is restored exactly, learning rates included, and the engine continues with its data iterator. The next
    loss tests the restored weights. If it is healthy, training was the fault: iterations that exceed the thresholds of
    that time are discarded one by one, until eight in a row are healthy, and nothing is accepted. If four tests fail,
    older snapshots included, the data have changed: training continues with them, and returns to the snapshot if its
    data return. Non-finite state is never accepted: the run ends. Triggers are thresholds that monitors reset, the
    loss, non-finite state and :meth:`request`. A loss that changes sign or has never fallen triggers nothing.

    {keys}

    Iteration counter, RNG state and spike counts are not restored; gradients are dropped. ROLLED_BACK is fired before
    handlers of ITERATION_COMPLETED. (A. Chowdhery et al., "PaLM", arXiv:2204.02311.)

    Args:
        to_save: name -> model, optimizer, scheduler, GradScaler, EMA: anything with ``state_dict`` and
            ``load_state_dict``. Engines and monitors in it are not restored.
        every: distance of snapshots in iterations.
        keep: number of older snapshots; the three newest ones are kept as well.
        patience: number of losses above the threshold, of ``1.5 * patience``, that trigger a rollback; half of it in a
            row if losses or gradients are not finite.
        max_rollbacks: number of rollbacks within 1,000 iterations; after it iterations are discarded, until 100 in a
            row are healthy.
        lr_factor: factor of the rates of optimizer steps, in (0, 1], from the second rollback within 1,000 iterations
            on, until 100 iterations are healthy.
        where: ``"device"``, or ``"host"`` for pinned host memory.
        loss: function of the engine that returns the loss, or None; by default ``engine.state.output``, or its item
            ``"loss"``, if that is one floating-point number.
        on_exhausted: ``"continue"``, or ``"terminate"`` to end the run after ``max_rollbacks`` or changed data.
        group: the ranks that roll back together, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: first part of the keys.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument is out of its range, or ``to_save`` has no model.

    Examples:
        .. code-block:: python

            RollbackHandler({"model": model, "optimizer": optimizer}).attach(trainer)
    """

    _OBJECTS = ("policy", "snapshots", "triggers")
    _FIELDS = ("count", "discarded_count", "lr_scale", "smallest_batch")
    _state_dict_all_req_keys = (*_OBJECTS, *_FIELDS, "loss_threshold")

    def __init__(
        self,
        to_save: Mapping[str, Any],
        *,
        every: int = 12,
        keep: int = 2,
        patience: int = 10,
        max_rollbacks: int = 3,
        lr_factor: float = 0.5,
        where: str = "device",
        loss: Callable[[Engine], float | Tensor | None] | None = None,
        on_exhausted: str = "continue",
        group: Group = None,
        prefix: str = "rollback",
    ) -> None:
        super().__init__(NoModel(), prefix)
        check_type("to_save", to_save, Mapping, "dict")
        check_choice("where", where, "device", "host")
        check_choice("on_exhausted", on_exhausted, "continue", "terminate")
        check_function("loss", loss, "the engine")
        every, keep = check_count("every", every, least=1), check_count("keep", keep, least=1)
        patience = check_count("patience", patience, least=1)
        self.loss = loss
        self.lr_factor = 1.0 if lr_factor == 1.0 else check_real("lr_factor", lr_factor, above=0.0, below=1.0)
        self.on_exhausted = on_exhausted
        self.every, self.max_rollbacks = every, check_count("max_rollbacks", max_rollbacks, least=1)
        self._policy = RecoveryPolicy(patience, max_rollbacks)
        self._snapshots = Snapshots(every, keep, on_host=where == "host")
        self._training = TrainingState({k: v for k, v in to_save.items() if not isinstance(v, Engine)})
        if not self._training.modules:
            raise ValueError("Argument to_save should hold a model, a torch.nn.Module, but it has none")
        self.ranks = Ranks(group, *self._training.modules)
        self._loss_threshold = LossThreshold()
        self._triggers = Triggers(patience, self._loss_threshold)
        self._request = ""
        self._count = self._discarded_count = 0
        self._lr_scale = 1.0
        self._stepped = True  # whether an optimizer made a step in this iteration
        self._smallest_batch = 0  # items; 0 before the first batch
        self._layout: list[Any] = []
        self._restoring: Any = None  # handle of the second restore of an iteration

    def request(self, reason: str) -> None:
        """Roll back when this iteration is completed.

        Args:
            reason: text of the warning.
        """
        self._request = str(reason) or "requested"

    def accept(self) -> None:
        """Announce a regime change: reset all thresholds, those of the snapshots included."""
        self._policy.reset()
        self._snapshots.aside = None
        self._reset_thresholds()
        for snapshot in self._snapshots.all:
            snapshot["thresholds"] = self._thresholds()

    def forget(self) -> None:
        """Drop all snapshots; call it after loading other weights. The end of a run does it by itself."""
        self._snapshots.clear()
        self._policy.reset()
        self._triggers.reset()
        self._lr_scale = 1.0
        if self._restoring is not None:
            self._restoring.remove()

    def reset_run_state(self) -> None:
        self.forget()
        self._triggers.start_run()
        self._policy.rollbacks.clear()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Counts, baselines and snapshots: tensors, numbers, strings, lists and dicts."""
        saved = {name: public(getattr(self, f"_{name}")) for name in self._OBJECTS}
        saved["loss_threshold"] = self._loss_threshold.state_dict()
        return OrderedDict(clone(saved), **{name: getattr(self, f"_{name}") for name in self._FIELDS})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        own = self._training.things.keys()
        if any(snapshot["state"].keys() != own for snapshot in state_dict["snapshots"]["all"]):
            raise ValueError(f"Argument state_dict should hold snapshots of {[*own]}, but it does not")
        self._loss_threshold.load_state_dict(state_dict["loss_threshold"])
        for name in self._OBJECTS:
            vars(getattr(self, f"_{name}")).update(clone(dict(state_dict[name])))
        vars(self).update({f"_{name}": state_dict[name] for name in self._FIELDS})
        self._layout = self._training.layout()

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [(Events.ITERATION_STARTED, self._on_iteration_started)]

    def _on_iteration_started(self, engine: Engine) -> None:
        """Take a snapshot before any other handler has changed anything in this iteration."""
        before, stepped = engine.state.iteration - 1, self._stepped
        self._stepped = not self._training.optimizers
        if (layout := self._training.layout()) != self._layout:
            self.forget()  # no snapshot fits the model any more
            self._layout = layout
        if not self._policy.watching:
            return
        self._check_batch_size(engine)
        kept = self._snapshots.all
        if not kept or (stepped and self._policy.healthy and before - kept[-1]["iteration"] >= self.every):
            self._snapshots.take(before, self._training.state(), self._thresholds())

    def _check_batch_size(self, engine: Engine) -> None:
        """Reset thresholds at a batch with less than half as many items as any before: its values are noisier."""
        is_last = engine.state.epoch_length and engine.state.iteration % engine.state.epoch_length == 0
        # The last batch of an epoch is small in any run, and ranks have to reset their thresholds together.
        if items := count_items(engine.state.batch) if self.ranks.size == 1 and not is_last else None:
            if 2 * items < self._smallest_batch:
                text = "%s: iteration %d: batches of %d items; all thresholds are reset"
                self.logger.info(text, self._title, engine.state.iteration, items)
                self.accept()
            self._smallest_batch = min(items, self._smallest_batch or items)

    def start_iteration(self, engine: Engine) -> None:
        self.run_summary = self.run_summary or RunSummary(self.run_totals())

    def run_totals(self) -> dict[str, float | Tensor]:
        return {"rolled back": self._count, "discarded": self._discarded_count}

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        optimizers = self._training.optimizers if self._is_running else []
        lowered = [lowered_rates(optimizers, self._lr_scale)] if self._lr_scale != 1.0 else []
        return [*(optimizer.register_step_post_hook(self._on_step) for optimizer in optimizers), *lowered]

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped = True
        if self.run_summary is not None:
            self.run_summary.step(optimizer)

    def handlers(self) -> Handlers:
        return [(Phase.SIGNALS_PUBLISHED, self._on_signals_published)]

    def _on_signals_published(self, engine: Engine) -> None:
        if self._is_running:
            self._decide(engine)

    def _decide(self, engine: Engine) -> None:
        policy, triggers, iteration = self._policy, self._triggers, engine.state.iteration
        if not self.ranks.all_present:
            self.report("join", "under join(), where not all ranks take part, no instability is detected")
            return
        if not self._snapshots.all:  # attached during this iteration
            return
        loss = loss_in(engine.state.output if self.loss is None else self.loss(engine))
        device = device_of(self._training.modules[0])
        signals = triggers.collect(loss, self._monitors(), self.ranks, device, iteration, self._request)
        self._request = ""
        if not triggers.unhealthy and iteration >= limits.WARMUP:
            text = "only request() triggers a rollback: give loss=, or attach a GradMonitor or SpikeMonitor"
            self.report("no_trigger", text)
        if all(triggers.signs):
            text = "the loss has been negative and positive: it measures no progress, and triggers nothing"
            self.report("loss_changes_sign", text, severity="note")
        event, reason = self._classify(signals, iteration)
        was_phase = policy.phase
        action = policy.next(event, iteration, signals)
        values = dict[str, float]()
        if action not in (Action.NONE, Action.ACCEPT):
            starts = was_phase == WATCHING
            self._discarded_count += not starts
            values["restored_iteration"] = self._restore(action, engine, signals, starts, reason)["iteration"]
        elif action == Action.ACCEPT:
            self._accept_data(engine)
        if action in (Action.NONE, Action.RESUME) and policy.watching and was_phase != policy.phase:
            if was_phase == RECOVERING:
                self._snapshots.end()
            else:
                triggers.accept(policy.test_levels, iteration)
                self._snapshots.clear()
            triggers.far.clear()
            self.logger.info("%s: iteration %d: recovered; %d discarded", self._title, iteration, policy.discarded)
        if self._lr_scale != 1.0 and policy.watching and policy.calm >= limits.LONG_PROBATION:
            self._lr_scale = 1.0
            text = "learning rates are those of their schedule again"
            self.report("rates_returned", text, severity="note", once=False)
        self.publish(count=self._count, discarded_count=self._discarded_count, **values)
        if action == Action.ROLL_BACK and self._source is not None:
            self._source.fire(MonitorEvents.ROLLED_BACK)

    def _classify(self, signals: Signals, iteration: int) -> tuple[Event, str]:
        if signals.is_nonfinite and (reason := self._ruin(iteration)):
            return Event.RUINED, reason
        if signals.reasons:
            return Event.TRIGGERED, ", ".join(signals.reasons)
        if signals.is_nonfinite:
            return Event.NONFINITE, f"{self._policy.nonfinite + 1} losses or gradients in a row were not finite"
        return (Event.ABOVE_THRESHOLD if signals.is_unhealthy else Event.HEALTHY), "the instability continues"

    def _ruin(self, iteration: int) -> str:
        """Return the reason if tensors of any rank's state are not finite that were finite in a snapshot."""
        earlier, now = map(finite, (self._snapshots.before(iteration)["state"], self._training.state()))
        ruined = [path for path, is_finite in now.items() if not is_finite and earlier.get(path)]
        on_any = self.ranks.max(torch.tensor([float(bool(ruined))], device=device_of(self._training.modules[0])))
        return f"{ruined[0] if ruined else 'the state of another rank'} is not finite" if on_any.item() else ""

    def _restore(self, action: Action, engine: Engine, signals: Signals, starts: bool, reason: str) -> Snapshot:
        policy, snapshots, iteration = self._policy, self._snapshots, engine.state.iteration
        if action == Action.PROBE or (action == Action.ROLL_BACK and policy.may_continue):
            snapshots.set_aside(iteration, self._training.state(), self._thresholds())
        if starts:
            snapshots.start(iteration, policy.first_sign, signals.margin)
        continues = action == Action.RESUME or (action == Action.ADAPT and policy.keeps_current)
        snapshot = snapshots.aside if continues and snapshots.aside else snapshots.choose(iteration, policy.candidate)
        text = f"{reason}; rolled back to iteration {snapshot['iteration']}"
        if action == Action.ROLL_BACK:
            self._count += 1
            has_measure = self._triggers.usable or not any(self._triggers.signs) or signals.is_requested
            self._lr_scale *= self.lr_factor if len(policy.rollbacks) > 1 and has_measure else 1.0
            text += f", {iteration - snapshot['iteration']} batches skipped"
            text += f", learning rates multiplied by {self._lr_scale:g}" if self._lr_scale != 1.0 else ""
            self.report("rolled_back", f"{text}; restored {', '.join(self._training.things)}", once=False)
        elif starts and action == Action.DISCARD:
            text += f" after {self.max_rollbacks} rollbacks within {limits.WINDOW} iterations: lower the learning rate"
            self.report("rollbacks_exhausted", text, severity="problem", once=False)
        elif action == Action.END:
            self.report("run_ended", f"{text}; the run ends", severity="problem", once=False)
        self._restore_thresholds(snapshot["thresholds"])
        if action == Action.ADAPT:
            self._triggers.usual, self._lr_scale = dict(self._triggers.limits), 1.0
            self._reset_thresholds()
        self._training.restore(snapshot["state"])
        if self._restoring is not None:
            self._restoring.remove()
        # After the user's handlers of this iteration: a schedule has made a step there.
        again = functools.partial(self._restore_again, snapshot["state"])
        self._restoring = engine.add_event_handler(Events.ITERATION_COMPLETED, again)
        if action == Action.END or (starts and action == Action.DISCARD and self.on_exhausted == "terminate"):
            engine.terminate()
        return snapshot

    def _restore_again(self, state: Any) -> None:
        self._restoring.remove()
        if self._training.layout() == self._layout:
            self._training.restore(state)

    def _accept_data(self, engine: Engine) -> None:
        before, tested = self._triggers.usual.get("loss", math.nan), fmean(self._policy.test_levels)
        text = (
            f"restored weights exceed the threshold on new batches too ({tested:.3g}, threshold {before:.3g}): the "
            "data have changed; training continues with them, thresholds are reset"
        )
        if self.on_exhausted == "terminate":
            self._training.restore(self._snapshots.choose(engine.state.iteration, 0)["state"])
            text += "; the run ends"
            engine.terminate()
        self.report("data_changed", text, once=False)

    def _reset_thresholds(self) -> None:
        self._loss_threshold.reset()
        for monitor in self._monitors():
            monitor.reset_threshold()

    def _monitors(self) -> list[Monitor]:
        attached = self._source.monitors if self._source is not None else []
        return [monitor for monitor in attached if type(monitor).counts is not Monitor.counts]

    def _thresholds(self) -> dict[str, Any]:
        return {"monitors": {m.prefix: m.state_dict() for m in self._monitors()}, "loss": self._loss_threshold.state}

    def _restore_thresholds(self, thresholds: Mapping[str, Any]) -> None:
        """Restore thresholds from before the instability, but not the monitors' counts."""
        self._loss_threshold.load_state_dict(thresholds["loss"])
        for monitor in self._monitors():
            if monitor.prefix in thresholds["monitors"]:
                counts = {k: v for k, v in monitor.state_dict().items() if k == "counts" or k.endswith("_count")}
                monitor.load_state_dict(OrderedDict(clone(thresholds["monitors"][monitor.prefix]), **counts))

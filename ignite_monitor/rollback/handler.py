"""RollbackHandler: restore a snapshot when training diverges, and skip the batches since."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_choice, check_count, check_function, check_real, check_type
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.events.run_summary import RunSummary
from ignite_monitor.keys import ROLLBACK
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.tensors import count_items
from ignite_monitor.monitor.base import Handlers, Monitor, NoModel
from ignite_monitor.monitor.ranks import all_take_part, sum_over_ranks, world_size
from ignite_monitor.rollback.parts import TrainingState, clone, numbers_in
from ignite_monitor.rollback.policy import LONG, Action, Event, RecoveryPolicy
from ignite_monitor.rollback.snapshots import Snapshot, Snapshots
from ignite_monitor.rollback.triggers import FAR, Findings, Triggers

_UNSEEN = 20  # iterations without any trigger, or snapshots overdue for want of a step, before a warning


class RollbackHandler(Monitor, schema=ROLLBACK):
    """Restore an in-memory snapshot when training diverges, and skip the batches since (PaLM, section 5.1).

    Every ``every`` iterations the state of ``to_save`` is copied. On instability the newest snapshot from before the
    first sign is restored exactly, learning rates included, and the engine continues with its data iterator. Iterations
    that exceed the thresholds of that time are then discarded one by one, until eight in a row are healthy. 48
    iterations after the first sign a regime change is assumed and accepted; its losses are no instability again.
    Non-finite state is never accepted: the run ends. Triggers are thresholds that monitors reset, the loss, running
    statistics, non-finite state and :meth:`request`.

    {keys}

    Iteration counter, RNG state and spike counts are not restored; gradients are dropped. ROLLED_BACK is fired before
    handlers of ITERATION_COMPLETED. (A. Chowdhery et al., "PaLM", arXiv:2204.02311.)

    Args:
        to_save: name -> model, optimizer, scheduler, GradScaler, EMA: anything with ``state_dict`` and
            ``load_state_dict``. The trainer and monitors need not be in it.
        every: distance of snapshots in iterations.
        keep: number of older snapshots; the three newest ones are kept as well.
        patience: number of losses above the threshold, of ``1.5 * patience``, that trigger a rollback; or of losses in
            a row that are not finite.
        max_rollbacks: number of rollbacks within 1,000 iterations, after which a regime change is assumed.
        lr_factor: factor of learning rates from the second rollback within 1,000 iterations on, in (0, 1].
        where: ``"device"``, or ``"host"`` for pinned host memory.
        loss: function of the engine that returns the loss, or None; by default ``engine.state.output``, if that is one
            number.
        on_exhausted: ``"continue"``, or ``"terminate"`` to end the run instead of accepting a regime change.
        prefix: first part of the keys.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument is out of its range, or ``to_save`` has no model.

    Examples:
        .. code-block:: python

            rollback = RollbackHandler({"model": model, "optimizer": optimizer})
            rollback.attach(trainer)
    """

    _OBJECTS = ("policy", "snapshots", "triggers")
    _FIELDS = ("count", "discarded_count", "lr_scale", "stepped", "smallest_batch")
    _state_dict_all_req_keys = _OBJECTS + _FIELDS

    def __init__(
        self,
        to_save: Mapping[str, Any],
        *,
        every: int = 10,
        keep: int = 2,
        patience: int = 10,
        max_rollbacks: int = 3,
        lr_factor: float = 0.5,
        where: str = "device",
        loss: Callable[[Engine], float | Tensor | None] | None = None,
        on_exhausted: str = "continue",
        prefix: str = "rollback",
    ) -> None:
        super().__init__(NoModel(), prefix)
        _check_to_save(to_save)
        check_choice("where", where, "device", "host")
        check_choice("on_exhausted", on_exhausted, "continue", "terminate")
        check_function("loss", loss, "the engine")
        patience = check_count("patience", patience, least=1)
        self.to_save = dict(to_save)
        self.loss = loss
        self.lr_factor = 1.0 if lr_factor == 1.0 else check_real("lr_factor", lr_factor, above=0.0, below=1.0)
        self.on_exhausted = on_exhausted
        self._policy = RecoveryPolicy(patience, check_count("max_rollbacks", max_rollbacks, least=1))
        self._snapshots = Snapshots(
            check_count("every", every, least=1), check_count("keep", keep, least=1), on_host=where == "host"
        )
        self._training = TrainingState(self.to_save)
        self._triggers = Triggers(patience, self._training.modules)
        self._count = self._discarded_count = 0
        self._lr_scale = 1.0
        self._stepped = True  # whether an optimizer made a step in this iteration
        self._smallest_batch = 0  # items; 0 before the first batch
        self._parameters: list[int] = []  # identities
        self._has_loaded = False

    def request(self, reason: str) -> None:
        """Roll back when this iteration is completed.

        Args:
            reason: text of the warning.

        Raises:
            TypeError: if ``reason`` is no string.
        """
        check_type("reason", reason, str, "str")
        self._triggers.request = reason

    def accept(self) -> None:
        """Announce a regime change: reset all thresholds, those of the snapshots included."""
        self._policy.reset()
        self._triggers.reset_threshold()
        for monitor in self._monitors():
            monitor.reset_threshold()
        for snapshot in self._snapshots.all:
            snapshot.thresholds = clone(self._thresholds())

    def forget(self) -> None:
        """Drop all snapshots; call it after loading other weights. A new ``run()`` does it by itself."""
        self._snapshots.clear()
        self._policy.reset()
        self._triggers.reset_threshold()

    def detach(self) -> None:
        """Undo ``attach`` and ``log_to``, and drop the snapshots."""
        super().detach()
        self.forget()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Counts, baselines and the snapshots that a recovery may need: tensors, numbers, strings, lists and dicts."""
        return OrderedDict(
            {name: getattr(self, f"_{name}") for name in self._FIELDS},
            **{name: getattr(self, f"_{name}").state_dict() for name in self._OBJECTS},
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        own = self._training.things.keys()
        for saved in state_dict["snapshots"]["all"]:
            if saved["state"].keys() != own:
                raise ValueError(f"Argument state_dict should be of {[*own]}, but it holds {[*saved['state']]}")
        for name in self._OBJECTS:
            getattr(self, f"_{name}").load_state_dict(state_dict[name])
        vars(self).update({f"_{name}": state_dict[name] for name in self._FIELDS})
        self._parameters, self._has_loaded = self._training.parameters(), True

    # Before the train step

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [(Events.STARTED, self._on_started), (Events.ITERATION_STARTED, self._on_iteration_started)]

    def _on_started(self, engine: Engine) -> None:
        if not self._has_loaded:
            self.forget()
        self._has_loaded = False

    def _on_iteration_started(self, engine: Engine) -> None:
        """Take a snapshot before any other handler has changed anything in this iteration."""
        before, stepped = engine.state.iteration - 1, self._stepped
        self._stepped = not self._training.optimizers
        if (parameters := self._training.parameters()) != self._parameters:
            self.forget()  # no snapshot fits the model any more
            self._parameters = parameters
        if self._policy.recovering:
            return
        self._check_batch_size(engine)
        if self._snapshots.all:
            overdue = before - self._snapshots.taken - self._snapshots.every
            if overdue < 0 or not self._policy.healthy:
                return
            if not stepped:
                if overdue >= _UNSEEN * self._snapshots.every:
                    self._warn_once("no snapshot for %d iterations: no optimizer of to_save made a step", overdue)
                return
        self._snapshots.take(before, self._training.state(), self._thresholds(), self._lr_scale)

    def _check_batch_size(self, engine: Engine) -> None:
        """Accept a batch with less than half as many items as any before, whose gradients and loss are noisier.

        The last batch of an epoch is small in any run, and changes nothing.
        """
        is_last = engine.state.epoch_length and engine.state.iteration % engine.state.epoch_length == 0
        # Ranks may have batches of different lengths, and have to reset their thresholds together.
        items = count_items(engine.state.batch) if world_size() == 1 and not is_last else None
        if items:
            smallest = self._smallest_batch or items
            if 2 * items < smallest:
                text = "%s: iteration %d: batch of %d items, %d before; all thresholds are reset"
                self.logger.info(text, self._title, engine.state.iteration, items, smallest)
                self.accept()
            self._smallest_batch = min(items, smallest)

    def start_iteration(self, engine: Engine) -> None:
        self.run_summary = self.run_summary or RunSummary(self.run_totals())

    def run_totals(self) -> dict[str, float | Tensor]:
        return {"rolled back": self._count, "discarded": self._discarded_count}

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        optimizers = self._training.optimizers if self._is_running else []
        return [optimizer.register_step_post_hook(self._on_step) for optimizer in optimizers]

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped = True
        if self.run_summary is not None:
            self.run_summary.step(optimizer)

    # After the train step

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def _on_train_step_completed(self, engine: Engine) -> Callable[[], Any] | None:
        # After all monitors have published, those included that use other monitors' values.
        return (lambda: lambda: functools.partial(self._decide, engine)) if self._is_running else None

    def _decide(self, engine: Engine) -> None:
        policy, triggers, snapshots = self._policy, self._triggers, self._snapshots
        if not all(map(all_take_part, self._training.modules)):
            self._warn_once("under join(), where not all ranks take part, no instability is detected")
            return
        if not snapshots.all:  # attached during this iteration
            return
        findings = triggers.collect(self._loss_of(engine), self._monitors())
        if not triggers.has_any and engine.state.iteration >= _UNSEEN:
            self._warn_once(
                "only request() can trigger a rollback: give loss=, or attach a GradMonitor or SpikeMonitor"
            )
        event, reason = self._classify(findings, engine.state.iteration)
        was_recovering, values = policy.recovering, dict[str, float]()
        action = policy.next(event, engine.state.iteration, max(findings.age, 1))
        if action != Action.NONE:
            self._discarded_count += was_recovering
            snapshot = self._restore(action, engine.state.iteration)
            self._report(engine, action, snapshot, reason)
            values["restored_iteration"] = snapshot.iteration
        elif was_recovering and not policy.recovering:
            if policy.discarded >= LONG and snapshots.restored == snapshots.all[-1].iteration:
                triggers.accept_peaks(FAR)  # the same weights are healthy again: the data were the cause
            snapshots.drop_newer(snapshots.restored)
            text = "%s: iteration %d: recovered; %d iterations discarded"
            self.logger.info(text, self._title, engine.state.iteration, policy.discarded)
        if event == Event.HEALTHY and not policy.recovering:
            triggers.forget_peaks()
        self.publish(count=self._count, discarded_count=self._discarded_count, **values)
        if action == Action.ROLL_BACK and self._source is not None:
            self._source.fire(MonitorEvents.ROLLED_BACK)

    def _classify(self, findings: Findings, iteration: int) -> tuple[Event, str]:
        if findings.check_state and (reason := self._ruin(iteration)):
            return Event.RUINED, reason
        if findings.reasons:
            return Event.UNSTABLE, ", ".join(findings.reasons)
        if findings.is_nonfinite:
            return Event.NONFINITE, f"{self._policy.patience} losses or gradients in a row were not finite"
        return (Event.UNHEALTHY if findings.is_unhealthy else Event.HEALTHY), "the instability continues"

    def _loss_of(self, engine: Engine) -> float | Tensor | None:
        value = engine.state.output if self.loss is None else self.loss(engine)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return value.detach()
        if isinstance(value, Real) and not isinstance(value, bool):
            return float(value)
        if self.loss is not None and value is not None:
            raise TypeError(f"Argument loss should return one number or None, but it returned {value!r}")
        return None

    def _restore(self, action: Action, iteration: int) -> Snapshot:
        if action in (Action.ROLL_BACK, Action.DISCARD):
            snapshot = self._snapshots.choose(iteration, self._policy.first_sign, self._policy.discarded)
        else:
            snapshot = self._snapshots.all[-1]
        if action == Action.ROLL_BACK:
            self._count += 1
            self._lr_scale *= self.lr_factor if len(self._policy.rollbacks) > 1 else 1.0
            self._triggers.forget_peaks()
        if action == Action.ACCEPT:
            self._lr_scale = snapshot.lr_scale
            self._triggers.accept_peaks()
            self.accept()
        else:
            self._restore_thresholds(self._snapshots.all[-1].thresholds)
        self._training.restore(snapshot.state, self._lr_scale / snapshot.lr_scale)
        return snapshot

    def _report(self, engine: Engine, action: Action, snapshot: Snapshot, reason: str) -> None:
        iteration, restored = engine.state.iteration, snapshot.iteration
        text = f"{self._title}: iteration {iteration}: {reason}; rolled back to iteration {restored}"
        if action == Action.ROLL_BACK:
            rates = f", learning rates multiplied by {self._lr_scale:g}" if self._lr_scale != 1.0 else ""
            self.logger.warning("%s, %d batches skipped%s", text, iteration - restored, rates)
            if not self._training.optimizers:
                self._warn_once("to_save holds no optimizer, so moments and learning rates are not restored")
        elif action == Action.ACCEPT:
            self.logger.warning("%s a last time; assuming a regime change, all thresholds are reset", text)
        elif action == Action.END:
            self.logger.error("%s; the run ends", text)
        if action == Action.END or (action == Action.ACCEPT and self.on_exhausted == "terminate"):
            engine.terminate()

    def _monitors(self) -> list[Monitor]:
        """Monitors with a threshold, on the engine and in ``to_save``."""
        attached = self._source.monitors if self._source is not None else []
        monitors = dict.fromkeys([*attached, *self._training.monitors])
        return [monitor for monitor in monitors if monitor.counts() is not None]

    def _thresholds(self) -> dict[str, Any]:
        monitors = {monitor.prefix: monitor.state_dict() for monitor in self._monitors()}
        return {"monitors": monitors, "triggers": self._triggers.state_dict()}

    def _restore_thresholds(self, thresholds: Mapping[str, Any]) -> None:
        """Restore thresholds from before the instability, but not the monitors' counts."""
        self._triggers.load_state_dict(thresholds["triggers"], baselines_only=True)
        for monitor in self._monitors():
            if monitor.prefix in thresholds["monitors"]:
                counts = {k: v for k, v in monitor.state_dict().items() if k == "counts" or k.endswith("_count")}
                monitor.load_state_dict(OrderedDict(clone(thresholds["monitors"][monitor.prefix]), **counts))

    def _ruin(self, iteration: int) -> str:
        """Return the reason if the state of any rank is not finite."""
        paths = self._training.nonfinite()
        if paths:
            earlier = numbers_in(self._snapshots.before(iteration).state)
            paths = [path for path in paths if path in earlier and bool(earlier[path].isfinite().all())]
            if not paths:  # they are new, or have never been finite
                self._training.exempt_nonfinite()
        if world_size() > 1:
            number = torch.tensor([float(bool(paths))], device=device_of(self._training.modules[0]))
            is_ruined = bool(sum_over_ranks(number))  # a collective on all ranks
            paths = paths or ["the state of another rank"] * is_ruined
        return f"{paths[0]} is not finite" if paths else ""


def _check_to_save(to_save: Mapping[str, Any]) -> None:
    check_type("to_save", to_save, Mapping, "dict")
    for name, thing in to_save.items():
        check_type("to_save", name, str, "dict with strings as keys")
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(f"Argument to_save should hold objects with a state_dict, but {name!r} is {type(thing)}")
        if isinstance(thing, Engine):
            raise ValueError(f"Argument to_save should not hold an engine, which is not restored: remove {name!r}")
    if not any(isinstance(thing, nn.Module) for thing in to_save.values()):
        raise ValueError("Argument to_save should hold a model, a torch.nn.Module, but it has none")

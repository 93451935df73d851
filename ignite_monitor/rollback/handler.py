"""RollbackHandler: restore a snapshot when training diverges, and skip the batches since."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
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
from ignite_monitor.monitor.ranks import all_take_part, max_over_ranks, world_size
from ignite_monitor.rollback.policy import LONG, Action, Event, RecoveryPolicy
from ignite_monitor.rollback.snapshots import Snapshot, Snapshots, TrainingState, clone, finite
from ignite_monitor.rollback.triggers import Findings, Triggers

_UNSEEN = 20  # iterations without any trigger before a warning


class RollbackHandler(Monitor, schema=ROLLBACK):
    """Restore an in-memory snapshot when training diverges, and skip the batches since (PaLM, section 5.1).

    Every ``every`` iterations the state of ``to_save`` is copied. On instability the newest snapshot from before the
    first sign is restored exactly, learning rates included, and the engine continues with its data iterator. Iterations
    that exceed the thresholds of that time are then discarded one by one, until eight in a row are healthy. 48
    iterations after the first sign a regime change is assumed and accepted; its losses are no instability again.
    Non-finite state is never accepted: the run ends. Triggers are thresholds that monitors reset, the loss, non-finite
    state and :meth:`request`.

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
        max_rollbacks: number of rollbacks within 1,000 iterations, after which a regime change is assumed.
        lr_factor: factor of learning rates from the second rollback within 1,000 iterations on, in (0, 1].
        where: ``"device"``, or ``"host"`` for pinned host memory.
        loss: function of the engine that returns the loss, or None; by default ``engine.state.output``, or its item
            ``"loss"``, if that is one floating-point number.
        on_exhausted: ``"continue"``, or ``"terminate"`` to end the run instead of accepting a regime change.
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
        self._policy = RecoveryPolicy(patience, check_count("max_rollbacks", max_rollbacks, least=1))
        self._snapshots = Snapshots(every, keep, on_host=where == "host")
        self._training = TrainingState({k: v for k, v in to_save.items() if not isinstance(v, Engine)})
        if not self._training.modules:
            raise ValueError("Argument to_save should hold a model, a torch.nn.Module, but it has none")
        self._triggers = Triggers(patience)
        self._count = self._discarded_count = 0
        self._lr_scale = 1.0
        self._stepped = True  # whether an optimizer made a step in this iteration
        self._smallest_batch = 0  # items; 0 before the first batch
        self._layout: list[Any] = []

    def request(self, reason: str) -> None:
        """Roll back when this iteration is completed.

        Args:
            reason: text of the warning.
        """
        self._triggers.request = str(reason)

    def accept(self) -> None:
        """Announce a regime change: reset all thresholds, those of the snapshots included."""
        self._policy.reset()
        self._triggers.loss.reset()
        for monitor in self._monitors():
            monitor.reset_threshold()
        for snapshot in self._snapshots.all:
            snapshot["thresholds"] = self._thresholds()

    def forget(self) -> None:
        """Drop all snapshots; call it after loading other weights. The end of a run does it by itself."""
        self._snapshots.clear()
        self._policy.reset()
        self._triggers.loss.reset()

    def reset_run_state(self) -> None:
        self.forget()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Counts, baselines and snapshots: tensors, numbers, strings, lists and dicts."""
        objects = {name: getattr(self, f"_{name}") for name in self._OBJECTS}
        saved = {name: {key: getattr(thing, key) for key in thing.SAVED} for name, thing in objects.items()}
        saved["loss_threshold"] = self._triggers.loss.state_dict()
        return OrderedDict(clone(saved), **{name: getattr(self, f"_{name}") for name in self._FIELDS})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        own = self._training.things.keys()
        if any(snapshot["state"].keys() != own for snapshot in state_dict["snapshots"]["all"]):
            raise ValueError(f"Argument state_dict should hold snapshots of {[*own]}, but it does not")
        self._triggers.loss.load_state_dict(state_dict["loss_threshold"])
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
        if self._policy.recovering:
            return
        self._check_batch_size(engine)
        kept = self._snapshots.all
        if not kept or (stepped and self._policy.healthy and before - kept[-1]["iteration"] >= self._snapshots.every):
            self._snapshots.take(before, self._training.state(), self._thresholds(), self._lr_scale)

    def _check_batch_size(self, engine: Engine) -> None:
        """Reset thresholds at a batch with less than half as many items as any before: its values are noisier."""
        is_last = engine.state.epoch_length and engine.state.iteration % engine.state.epoch_length == 0
        # The last batch of an epoch is small in any run, and ranks have to reset their thresholds together.
        if items := count_items(engine.state.batch) if world_size() == 1 and not is_last else None:
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
        return [optimizer.register_step_post_hook(self._on_step) for optimizer in optimizers]

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
        policy, triggers, snapshots = self._policy, self._triggers, self._snapshots
        iteration, was_recovering = engine.state.iteration, policy.recovering
        if not all(map(all_take_part, self._training.modules)):
            self._warn_once("under join(), where not all ranks take part, no instability is detected")
            return
        if not snapshots.all:  # attached during this iteration
            return
        loss = loss_in(engine.state.output if self.loss is None else self.loss(engine))
        findings = triggers.collect(loss, self._monitors(), device_of(self._training.modules[0]))
        if not triggers.unhealthy and iteration >= _UNSEEN:
            self._warn_once("only request() triggers a rollback: give loss=, or attach a GradMonitor or SpikeMonitor")
        event, reason = self._classify(findings, iteration)
        action, values = policy.next(event, iteration, findings.age), dict[str, float]()
        if action != Action.NONE:
            self._discarded_count += was_recovering
            snapshot = self._restore(action, iteration, findings.margin)
            self._report(engine, action, snapshot, reason)
            values["restored_iteration"] = snapshot["iteration"]
        elif was_recovering and not policy.recovering:
            if policy.discarded >= LONG:  # since then the newest snapshot, healthy now, was restored
                triggers.accept_peak(even_far=False)
            snapshots.drop_newer(snapshots.restored)
            triggers.far.clear()
            self.logger.info("%s: iteration %d: recovered; %d discarded", self._title, iteration, policy.discarded)
        if event == Event.HEALTHY and not policy.recovering:
            triggers.peak.clear()
        self.publish(count=self._count, discarded_count=self._discarded_count, **values)
        if action == Action.ROLL_BACK and self._source is not None:
            self._source.fire(MonitorEvents.ROLLED_BACK)

    def _classify(self, findings: Findings, iteration: int) -> tuple[Event, str]:
        if findings.is_nonfinite and (reason := self._ruin(iteration)):
            return Event.RUINED, reason
        if findings.reasons:
            return Event.UNSTABLE, ", ".join(findings.reasons)
        if findings.is_nonfinite:
            return Event.NONFINITE, f"{self._policy.nonfinite + 1} losses or gradients in a row were not finite"
        return (Event.UNHEALTHY if findings.is_unhealthy else Event.HEALTHY), "the instability continues"

    def _ruin(self, iteration: int) -> str:
        """Return the reason if tensors of any rank's state are not finite that were finite in a snapshot."""
        earlier, now = map(finite, (self._snapshots.before(iteration)["state"], self._training.state()))
        ruined = [path for path, is_finite in now.items() if not is_finite and earlier.get(path)]
        on_any = max_over_ranks(torch.tensor([float(bool(ruined))], device=device_of(self._training.modules[0])))
        return f"{ruined[0] if ruined else 'the state of another rank'} is not finite" if on_any.item() else ""

    def _restore(self, action: Action, iteration: int, margin: int) -> Snapshot:
        snapshot = self._snapshots.all[-1]
        if action in (Action.ROLL_BACK, Action.DISCARD):
            snapshot = self._snapshots.choose(iteration, self._policy.first_sign, self._policy.discarded, margin)
        if action == Action.ROLL_BACK:
            self._count += 1
            self._lr_scale *= self.lr_factor if len(self._policy.rollbacks) > 1 else 1.0
            self._triggers.peak.clear()
        if action == Action.ACCEPT:
            self._lr_scale = snapshot["lr_scale"]
            self._triggers.accept_peak(even_far=True)
            self.accept()
        else:
            self._restore_thresholds(self._snapshots.all[-1]["thresholds"])
        self._training.restore(snapshot["state"], self._lr_scale / snapshot["lr_scale"])
        return snapshot

    def _report(self, engine: Engine, action: Action, snapshot: Snapshot, reason: str) -> None:
        iteration, restored = engine.state.iteration, snapshot["iteration"]
        text = f"{self._title}: iteration {iteration}: {reason}; rolled back to iteration {restored}"
        if action == Action.ROLL_BACK:
            rates = f", learning rates multiplied by {self._lr_scale:g}" if self._lr_scale != 1.0 else ""
            names = ", ".join(self._training.things)
            self.logger.warning("%s, %d batches skipped%s; restored %s", text, iteration - restored, rates, names)
        elif action == Action.ACCEPT:
            self.logger.warning("%s a last time; assuming a regime change, all thresholds are reset", text)
        elif action == Action.END:
            self.logger.error("%s; the run ends", text)
        if action == Action.END or (action == Action.ACCEPT and self.on_exhausted == "terminate"):
            engine.terminate()

    def _monitors(self) -> list[Monitor]:
        """The monitors on the engine that have a threshold."""
        attached = self._source.monitors if self._source is not None else []
        return [monitor for monitor in attached if type(monitor).counts is not Monitor.counts]

    def _thresholds(self) -> dict[str, Any]:
        """The thresholds' state as tensors that are never changed in place."""
        return {"monitors": {m.prefix: m.state_dict() for m in self._monitors()}, "loss": self._triggers.loss.state}

    def _restore_thresholds(self, thresholds: Mapping[str, Any]) -> None:
        """Restore thresholds from before the instability, but not the monitors' counts."""
        self._triggers.loss.load_state_dict(thresholds["loss"])
        for monitor in self._monitors():
            if monitor.prefix in thresholds["monitors"]:
                counts = {k: v for k, v in monitor.state_dict().items() if k == "counts" or k.endswith("_count")}
                monitor.load_state_dict(OrderedDict(clone(thresholds["monitors"][monitor.prefix]), **counts))

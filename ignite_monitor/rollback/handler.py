"""RollbackHandler: restore a snapshot when training diverges, and skip the batches seen since that snapshot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor

from ignite_monitor.checks import check_choice, check_count, check_function, check_type
from ignite_monitor.detection.monitor import CountingMonitor
from ignite_monitor.events.hooks import remove_all
from ignite_monitor.events.monitor_events import MonitorEvents, Phase
from ignite_monitor.keys import ROLLBACK
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.tensors import loss_in
from ignite_monitor.monitor.base import Handlers, Monitor, NoModel
from ignite_monitor.monitor.ranks import Group, Ranks
from ignite_monitor.rollback import limits
from ignite_monitor.rollback.policy import ADAPTING, WATCHING, Action, RecoveryPolicy
from ignite_monitor.rollback.snapshots import Snapshot, Snapshots, TrainingState, clone, finite, public, shared
from ignite_monitor.rollback.triggers import Signals, Triggers


class RollbackHandler(Monitor, schema=ROLLBACK):
    """Restore an in-memory snapshot when training diverges, and skip the batches seen since that snapshot (PaLM, 5.1).

    Every ``every`` iterations the state of ``to_save`` is copied. On instability the newest snapshot from before the
    first sign is restored exactly, learning rates included (but no extra state of modules), and the engine continues
    with its data iterator. The losses after it test the restored weights: if they do badly on the new batches too,
    training continues with these. Triggers are thresholds that monitors reset, the loss, non-finite state and
    :meth:`request`. A loss that has been negative or has never fallen triggers none. Non-finite state is never
    accepted: the run ends.

    {keys}

    Iteration counter, RNG state and spike counts are not restored; gradients are dropped. ROLLED_BACK is fired before
    handlers of ITERATION_COMPLETED. (A. Chowdhery et al., "PaLM", arXiv:2204.02311.)

    Args:
        to_save: name -> model, optimizer, scheduler, GradScaler, EMA: anything with ``state_dict`` and
            ``load_state_dict``. Engines and monitors in it are not restored.
        every: iterations between snapshots; with gradient accumulation a multiple of its micro-batches.
        patience: number of losses above the threshold, of ``1.5 * patience``, that trigger a rollback; half of it in a
            row if losses or gradients are not finite.
        max_rollbacks: number of rollbacks within 1,000 iterations; after it a problem is reported, iterations are still
            discarded, and non-finite state ends the run.
        where: ``"device"``, or ``"host"`` for host memory.
        loss: function of the engine that returns the loss, or None; by default ``engine.state.output``, or its item
            ``"loss"``, if that is one floating-point number.
        group: the ranks that roll back together, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: first part of the keys.

    Raises:
        TypeError: if an argument has the wrong type, or the state of an object in ``to_save`` can't be copied.
        ValueError: if an argument is out of its range, or ``to_save`` has no model or lazy modules.

    Examples:
        .. code-block:: python

            RollbackHandler({"model": model, "optimizer": optimizer}).attach(trainer)
    """

    _state_dict_all_req_keys = ("policy", "snapshots", "triggers", "counts")

    def __init__(
        self,
        to_save: Mapping[str, Any],
        *,
        every: int = 12,
        patience: int = 10,
        max_rollbacks: int = 3,
        where: str = "device",
        loss: Callable[[Engine], float | Tensor | None] | None = None,
        group: Group = None,
        prefix: str = "rollback",
    ) -> None:
        super().__init__(NoModel(), prefix)
        check_type("to_save", to_save, Mapping, "dict")
        check_choice("where", where, "device", "host")
        check_function("loss", loss, "the engine")
        self.loss, self.every = loss, check_count("every", every, least=1)
        self.max_rollbacks = check_count("max_rollbacks", max_rollbacks, least=1)
        self._training = TrainingState({name: obj for name, obj in to_save.items() if not isinstance(obj, Engine)})
        if not self._training.modules:
            raise ValueError("Argument to_save should hold a model, a torch.nn.Module, but it has none")
        self.ranks = Ranks(group, *self._training.modules)
        self._policy = RecoveryPolicy(check_count("patience", patience, least=1), max_rollbacks)
        self._snapshots, self._on_host = Snapshots(every), where == "host"
        self._triggers = Triggers(patience)
        self._parts = {"policy": self._policy, "snapshots": self._snapshots, "triggers": self._triggers}
        self._request = ""
        self._count = self._discarded_count = 0
        self._restoring: list[Any] = []  # handle of the second restore of an iteration

    def request(self, reason: str) -> None:
        """Roll back when this iteration is completed.

        Args:
            reason: text of the warning.
        """
        self._request = str(reason) or "requested"

    def accept(self) -> None:
        """Announce a regime change: reset all thresholds, and drop the snapshots from before."""
        self.forget()
        for monitor in self._monitors():
            monitor.reset_threshold()

    def forget(self) -> None:
        """Drop all snapshots; call it after loading other weights. The end of a run does it by itself."""
        self._snapshots.clear()
        self._policy.reset()
        self._triggers.reset()
        remove_all(self._restoring)

    def reset_run_state(self) -> None:
        self._is_guarded = True
        self.forget()
        self._triggers.start_run()
        self._policy.rollbacks.clear()
        self._request = ""

    def state_dict(self) -> OrderedDict[str, Any]:
        """Counts, baselines and snapshots, which are not copied: tensors, numbers, strings, lists and dicts."""
        saved = {name: shared(public(part)) for name, part in self._parts.items()}
        return OrderedDict(saved, counts=[self._count, self._discarded_count])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        loaded = {name: shared(dict(state_dict[name])) for name in self._parts}
        count, discarded_count = state_dict["counts"]
        if any(loaded[name].keys() != public(part).keys() for name, part in self._parts.items()):
            raise ValueError(f"Argument state_dict should hold states of {[*self._parts]}, but it does not")
        for name, part in self._parts.items():
            vars(part).update(loaded[name])
        self._count, self._discarded_count = count, discarded_count
        self._forget_unfit()

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [(Events.ITERATION_STARTED, self._on_iteration_started)]

    def _on_iteration_started(self, engine: Engine) -> None:
        """Take a snapshot before any other handler has changed anything in this iteration."""
        before, snapshots = engine.state.iteration - 1, self._snapshots
        if snapshots.all and before < snapshots.all[-1]["iteration"]:
            self.forget()  # they are of a run that was longer
        if self._policy.phase == WATCHING and snapshots.is_due(before, self._policy.healthy):
            self._forget_unfit()
            snapshots.make_room()
            snapshots.all.append(self._snapshot(before))

    def _snapshot(self, iteration: int) -> Snapshot:
        thresholds: dict[str, Any] = {monitor.prefix: monitor.threshold_state() for monitor in self._monitors()}
        thresholds[""] = self._triggers.loss
        state, layout = clone(self._training.state(), on_host=self._on_host), self._training.layout()
        return {"iteration": iteration, "layout": layout, "state": state, "thresholds": thresholds}

    def _forget_unfit(self) -> None:
        """Drop all snapshots if the newest one is of other objects or parameters, and can't be restored."""
        if self._snapshots.all and self._snapshots.all[-1]["layout"] != self._training.layout():
            self.forget()
            self.report("other_parameters", "the snapshots are of other objects or parameters: dropped", once=False)

    def handlers(self) -> Handlers:
        return [(Phase.SIGNALS_PUBLISHED, self._on_signals_published)]

    def _on_signals_published(self, engine: Engine) -> None:
        if not self._is_running or not self._snapshots.all:  # attached during this iteration
            return
        if not self.ranks.all_present:
            self.report("join", "under join(), where not all ranks take part, no instability is detected")
            return
        policy, triggers, iteration = self._policy, self._triggers, engine.state.iteration
        device = device_of(self._training.modules[0])
        loss = loss_in(engine.state.output if self.loss is None else self.loss(engine))
        signals = triggers.collect(loss, self._monitors(), self.ranks, device, iteration, self._request)
        self._request = ""
        if not triggers.signs and iteration >= limits.MEMORY:
            text = "only request() triggers a rollback: give loss=, or attach a GradMonitor or SpikeMonitor"
            self.report("no_trigger", text)
        if signals.is_nonfinite:
            signals.ruin = self._ruin(iteration)
        was_phase, action = policy.phase, policy.next(signals, iteration)
        if action != Action.NONE:
            self._forget_unfit()
            if not self._snapshots.all:
                return
            is_start = was_phase == WATCHING
            # A probe may continue from this iteration.
            self._discarded_count += not (is_start or action == Action.PROBE)
            self._count += action == Action.ROLL_BACK
            snapshot = self._choose(action, iteration, is_start)
            self.publish(restored_iteration=snapshot["iteration"])
            self._restore(engine, snapshot, is_regime=action == Action.ADAPT)
            self._report(action, iteration, snapshot["iteration"], signals, is_start)
        elif policy.phase == WATCHING and was_phase != WATCHING:
            self._end_recovery(iteration, is_regime=was_phase == ADAPTING)
        self.publish(count=self._count, discarded_count=self._discarded_count)
        if action == Action.ROLL_BACK and self._source is not None:
            self._source.fire(MonitorEvents.ROLLED_BACK)
        elif action == Action.END:
            engine.terminate()

    def _ruin(self, iteration: int) -> str:
        """Return the reason if tensors of any rank's state are not finite that were finite in a snapshot."""
        earlier, now = map(finite, (self._snapshots.before(iteration)["state"], self._training.state()))
        ruined = [".".join(map(str, place)) for place in now if earlier.get(place) and not now[place]]
        on_any = self.ranks.any(torch.tensor(bool(ruined), device=device_of(self._training.modules[0])))
        return f"{(ruined or ['the state of another rank'])[0]} is not finite" if on_any.item() else ""

    def _choose(self, action: Action, iteration: int, is_start: bool) -> Snapshot:
        policy, snapshots = self._policy, self._snapshots
        if is_start:
            snapshots.start(iteration, policy.first_sign)
        if action in (Action.ROLL_BACK, Action.PROBE):
            snapshots.resumable = None  # its memory is free for the copy
            snapshots.resumable = self._snapshot(iteration)
        resumes = action == Action.RESUME or (action == Action.ADAPT and policy.keeps_current)
        return (resumes and snapshots.resumable) or snapshots.choose(iteration, policy.candidate)

    def _report(self, action: Action, iteration: int, restored: int, signals: Signals, is_start: bool) -> None:
        names, exhausted = ", ".join(self._training.objects), f"{self.max_rollbacks} rollbacks within {limits.WINDOW}"
        reasons = signals.reasons or [f"{self._policy.nonfinite} losses or gradients in a row were not finite"]
        text = f"{signals.ruin or ', '.join(reasons)}; rolled back to iteration {restored}"
        if action == Action.ROLL_BACK:
            text += f", {iteration - restored} batches skipped; restored {names}"
            self.report("rolled_back", text, once=False)
        elif action == Action.END:
            self.report("run_ended", f"{text}; the run ends", severity="problem", once=False)
        elif action == Action.ADAPT:
            text = "restored weights exceeded a threshold on new batches as well; training continues with such batches"
            self.report("adapted", text, once=False)
        elif is_start:
            text += f" after {exhausted} iterations: lower the learning rate"
            self.report("rollbacks_exhausted", text, severity="problem", once=False)

    def _restore(self, engine: Engine, snapshot: Snapshot, *, is_regime: bool) -> None:
        self._is_guarded = False  # training can't go on with a part of it restored
        if is_regime:
            self._triggers.start_regime()
        else:
            self._triggers.loss = snapshot["thresholds"][""]
        for monitor in self._monitors():
            if is_regime or monitor.prefix not in snapshot["thresholds"]:
                monitor.reset_threshold()
            else:
                monitor.restore_threshold(snapshot["thresholds"][monitor.prefix])
        self._training.restore(snapshot["state"])
        self._is_guarded = True
        remove_all(self._restoring)
        # After the user's handlers of this iteration: a schedule has made a step there.
        # It takes the engine, or Ignite would write its arguments, all tensors among them, in an error that it drops.
        again = engine.add_event_handler(Events.ITERATION_COMPLETED, self._restore_again, state=snapshot["state"])
        self._restoring.append(again)

    def _restore_again(self, engine: Engine, state: Any) -> None:
        self._forget_unfit()  # a handler may have changed the model
        if self._restoring:  # Ignite still calls a handler that one before it has removed
            remove_all(self._restoring)
            self._training.restore(state)  # Ignite calls it: an error ends training

    def _end_recovery(self, iteration: int, *, is_regime: bool) -> None:
        if is_regime:
            self._triggers.accept(self._policy.failed, iteration)
            self._snapshots.clear()
        else:
            self._snapshots.end()
        self._triggers.signs.clear()
        text = "%s: iteration %d: recovered; %d discarded so far"
        self.logger.info(text, self._title, iteration, self._discarded_count)

    def _monitors(self) -> list[CountingMonitor]:
        attached = self._source.monitors if self._source is not None else []
        return [monitor for monitor in attached if isinstance(monitor, CountingMonitor)]

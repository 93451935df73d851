"""RollbackHandler: back to a state from before the trouble, and on without the batches since."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from numbers import Real
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_monitor.checks import check_choice, check_count, check_function, check_real, check_type
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import ROLLBACK
from ignite_monitor.model.devices import device_of
from ignite_monitor.monitor.base import Handlers, Monitor, NoModel
from ignite_monitor.monitor.ranks import all_take_part, sum_over_ranks, world_size
from ignite_monitor.rollback.parts import Training, lower
from ignite_monitor.rollback.policy import Action, Event, RecoveryPolicy
from ignite_monitor.rollback.snapshots import Snapshot, Snapshots
from ignite_monitor.rollback.triggers import Watch

_UNSEEN = 20  # iterations without any sign to judge by, or overdue without a step, after which it says so

_WORDS = {
    Action.GO_BACK: "{reason}. Back to the state after iteration {state}, {left_out} batches are left out",
    Action.ACCEPT: "the trouble has not gone ({reason}), so it is taken for a new level. The state after iteration "
    "{state} is put back once more, and all rules start afresh",
    Action.END: "what is not finite comes again and again ({reason}): the run ends, with the state after iteration "
    "{state}",
}


class RollbackHandler(Monitor, schema=ROLLBACK):
    """Goes back to a state from before the trouble, and leaves out the batches since: PaLM's recipe.

    (A. Chowdhery et al., "PaLM", arXiv:2204.02311, section 5.1: restart from an earlier state, and skip the batches
    around the spike.) Every ``every`` iterations, between optimizer steps, the state of ``to_save`` and of the monitors
    on the engine is copied in memory. Where there is trouble it is put back, and the engine goes on with its iterator.

    A snapshot is taken when an iteration starts, before any other handler, not after an unhealthy one, nor of a state
    that is not finite; it is *good* after ``quiet`` iterations without a spike. Trouble goes back to the newest good
    one, and where none is good to the oldest. If it comes again before that one has proved good once more, it is so no
    longer. Trouble is

    - THRESHOLD_RESET of any monitor on the engine: of a ``GradMonitor``, ten spikes in a row;
    - a loss more than two deviations and a factor of 1.5 above its level (of its logarithm, exponentially weighted with
      0.95) ``patience`` times in a row; of several ranks it is the mean;
    - a parameter, buffer or optimizer state that is not finite, and was at the first snapshot; looked at where a loss
      or gradient is not finite. Where the state is finite, it was the batch's: ``patience`` of them in a row go back;
    - running statistics of a normalization whose second moment is more than three times its level, three times in a
      row;
    - :meth:`request`.

    Having gone back, every iteration that is unhealthy by the thresholds of the snapshot (of the first, which has none
    yet, those of the time when it proved good) is *undone*: the snapshot is put back. That ends after ``probation``
    healthy iterations in a row. After ``hold`` iterations without, or where there have been ``max_rollbacks`` within
    ``window`` iterations, the trouble is taken for a new level: the snapshot is put back a last time, all rules start
    afresh, and training goes on with a warning. What is not finite is never accepted: the run ends then.

    {keys}

    Iteration counter, random numbers, counts (``grad/spike_count``) and schedules go on. Gradients are dropped.
    It goes back before any handler of ITERATION_COMPLETED, so no evaluator or ``Checkpoint`` sees what is left out, and
    MonitorEvents.ROLLED_BACK is fired then. The iterations that the handler is not attached to with its
    filter are not judged.

    A snapshot takes the memory of what it copies, two (SGD with momentum) to three (Adam) times that of the weights;
    there are ``keep`` good ones, and one that is not good yet, seldom more (``keep`` at most). ``Checkpoint`` with the
    handler in it saves the newest good one and those that are not good yet, usually two; all of them as long as it has
    gone back to one that has not proved good again. Every rank keeps its own parts, and all decide the
    same, by a sum of a few numbers over the ranks in every iteration. To decide, an iteration's signs are read on the
    host: on an accelerator that waits once for the end of the train step. So does a snapshot, of which is known then
    whether it is finite, and with ``where="host"`` its copies do.

    Args:
        to_save: name -> what makes up the training: models, optimizers, schedulers, GradScaler, EMA; anything with a
            ``state_dict`` and ``load_state_dict``. Monitors need not be named. The trainer does not go back.
        every: in which distance snapshots are taken, in iterations.
        keep: how many good ones are kept.
        quiet: after how many iterations without a spike a snapshot is good.
        patience: how many losses in a row above their level, or that are not finite, mean trouble.
        probation: how many healthy iterations in a row end the healing.
        hold: after how many iterations of healing the trouble is a new level.
        max_rollbacks: how often it may go back within ``window``.
        window: in that many iterations.
        where: ``"device"``, or ``"host"`` for pinned memory of the host.
        loss: function of the engine that returns the loss, a number or a tensor with one element, or None where there
            is none. By default ``engine.state.output``, where that is one number.
        schedule: ``"keep"`` to leave schedules, and what they set (``lr``, ``initial_lr``, ``momentum``, ``betas``,
            ``weight_decay``), as they are now; ``"rewind"`` to have them go back as well.
        lr_factor: what learning rates are multiplied by each time it goes back, in (0, 1]: those in parameter groups
            and those that the schedulers in ``to_save`` compute them from.
        on_exhausted: ``"continue"``, or ``"terminate"`` to end the run in place of accepting a new level.
        prefix: what the values' names start with.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, or ``to_save`` holds nothing that learns.

    Examples:
        .. code-block:: python

            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)
            to_save = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
            rollback = RollbackHandler(to_save)
            rollback.attach(trainer)
            to_save |= {"trainer": trainer, "rollback": rollback}  # what a Checkpoint saves
    """

    _state_dict_all_req_keys = ("course", "snapshots", "levels", "count", "discarded_count")
    _NUMBERS = ("count", "discarded_count", "factor", "iteration", "healthy", "stepped")

    def __init__(
        self,
        to_save: Mapping[str, Any],
        *,
        every: int = 50,
        keep: int = 3,
        quiet: int = 20,
        patience: int = 10,
        probation: int = 5,
        hold: int = 50,
        max_rollbacks: int = 3,
        window: int = 1000,
        where: str = "device",
        loss: Callable[[Engine], float | Tensor | None] | None = None,
        schedule: str = "keep",
        lr_factor: float = 1.0,
        on_exhausted: str = "continue",
        prefix: str = "rollback",
    ) -> None:
        super().__init__(NoModel(), prefix)
        _check_to_save(to_save)
        check_choice("where", where, "device", "host")
        check_choice("schedule", schedule, "keep", "rewind")
        check_choice("on_exhausted", on_exhausted, "continue", "terminate")
        check_function("loss", loss, "the engine")
        if lr_factor != 1.0:
            lr_factor = check_real("lr_factor", lr_factor, above=0.0, below=1.0)
        self.to_save = dict(to_save)
        self.loss = loss
        self.schedule = schedule
        self.lr_factor = lr_factor
        self.on_exhausted = on_exhausted
        self._course = RecoveryPolicy(
            **_counts(patience=patience, probation=probation, hold=hold, max_rollbacks=max_rollbacks, window=window)
        )
        self._snapshots = Snapshots(**_counts(every=every, keep=keep, quiet=quiet), on_host=where == "host")
        self._training = Training(self.to_save, rewind=schedule == "rewind")
        self._watch = Watch(self._course.patience, self._training.modules)
        self._count = self._discarded_count = 0
        self._factor = 1.0
        self._iteration = 0  # the last one
        self._healthy = self._stepped = True  # that one

    # What users call

    def detach(self) -> None:
        """Undo ``attach`` and ``log_to``, and let the snapshots go."""
        super().detach()
        self._snapshots.clear()
        self._snapshots.release()

    def request(self, reason: str) -> None:
        """Go back when this iteration is completed, or the next; while the training is getting well, undo it.

        Args:
            reason: what the warning says.

        Raises:
            TypeError: if ``reason`` is no string.
        """
        check_type("reason", reason, str, "str")
        self._watch.request = reason

    def state_dict(self) -> OrderedDict[str, Any]:
        """Counts, levels and the snapshots that going back may need: tensors, numbers, strings, lists and dicts."""
        return OrderedDict(
            {name: getattr(self, f"_{name}") for name in self._NUMBERS},
            course=self._course.state_dict(),
            snapshots=self._snapshots.state_dict(),
            levels=self._watch.state_dict(),
            exempt=sorted(self._training.exempt),
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = [*state_dict["snapshots"]["good"], *state_dict["snapshots"]["pending"]]
        names, own = {name for each in saved for name in each["state"]["parts"]}, self._training.parts.keys()
        if saved and names != own:
            raise ValueError(f"Argument state_dict should be of {sorted(own)}, but it holds {sorted(names)}")
        self._course.load_state_dict(state_dict["course"])
        self._snapshots.load_state_dict(state_dict["snapshots"])
        self._watch.load_state_dict(state_dict["levels"])
        for name in self._NUMBERS:
            setattr(self, f"_{name}", state_dict[name])
        self._training.exempt = set(state_dict["exempt"])

    # Before the train step

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [(Events.ITERATION_STARTED, self._before_others)]

    def _before_others(self, engine: Engine) -> None:
        """Take a snapshot, of the state in which no handler has changed anything since the last iteration."""
        before = engine.state.iteration - 1
        if before < self._iteration:  # another run: its states are not those of this one
            self._snapshots.clear()
            self._course.forget()
            self._healthy = self._stepped = True
        overdue = self._snapshots.overdue(before)
        if overdue >= 0 and self._healthy and not self._course.healing:
            if self._stepped or not self._snapshots:
                self._take(before)
            elif overdue >= _UNSEEN * self._snapshots.every:
                self._warn_once(
                    "no step of the optimizers in to_save has been seen in %d iterations, so no snapshot is taken: are "
                    "they those that the train step uses?",
                    before - self._snapshots.taken,
                )
        self._stepped = not self._training.optimizers

    def start_iteration(self, engine: Engine) -> None:
        self._watch.meet(self._others())

    def _take(self, iteration: int) -> None:
        self._watch.look_for_statistics()
        if not self._any_rank(bool(self._new_nonfinite())):
            self._snapshots.take(iteration, {"parts": self._training.state(), **self._thresholds()}, self._factor)

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        engine = self._attached_to()
        if not self._is_running or engine is None or self._snapshots.overdue(engine.state.iteration) < 0:
            return []
        return [self._seeing_steps()]

    @contextmanager
    def _seeing_steps(self) -> Iterator[None]:
        with ExitStack() as handles:
            for optimizer in self._training.optimizers:
                handles.enter_context(optimizer.register_step_post_hook(self._on_step))
            yield

    def _on_step(self, *_: Any) -> None:
        self._stepped = True

    # After it

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def _on_train_step_completed(self, engine: Engine) -> Callable[[], Any] | None:
        # When all monitors have judged, those too that wait for what others publish, and have looked at that.
        return (lambda: lambda: functools.partial(self._decide, engine)) if self._is_running else None

    def _decide(self, engine: Engine) -> None:
        ranks = world_size()
        if ranks > 1 and not all(map(all_take_part, self._training.modules)):
            self._warn_once("under join(), where not all ranks take part, nothing is judged")
            return
        iteration, was_healing = engine.state.iteration, self._course.healing
        event, reason = self._judge(engine, ranks)
        action = self._course.next(event, iteration)
        self._iteration, self._healthy = iteration, event == Event.HEALTHY
        for proved in self._snapshots.note(self._healthy):
            if proved.young:
                self._snapshots.update(proved, self._thresholds())
        values: dict[str, float] = {}
        if action != Action.NONE and self._snapshots:
            snapshot = self._snapshots.current if was_healing else self._snapshots.choose(action == Action.GO_BACK)
            self._count += action == Action.GO_BACK
            self._discarded_count += was_healing
            self._put_back(snapshot, lower_rates=action == Action.GO_BACK)
            self._tell(iteration, action, snapshot, reason)
            if action == Action.ACCEPT:
                self._accept(snapshot)
            if action == Action.END or (action == Action.ACCEPT and self.on_exhausted == "terminate"):
                engine.terminate()
            values["restored_iteration"] = snapshot.iteration
        elif was_healing and not self._course.healing:
            self.logger.info("%s: well again at iteration %d, %d undone", self.prefix, iteration, self._course.undone)
        self.publish(count=self._count, discarded_count=self._discarded_count, **values)
        if action == Action.GO_BACK and self._source is not None:
            self._source.fire(MonitorEvents.ROLLED_BACK)

    def _judge(self, engine: Engine, ranks: int) -> tuple[Event, str]:
        """What the iteration was, and why; the same on every rank, but for the words."""
        signs = self._watch.signs(self._loss_of(engine), self._others(), ranks)
        if not self._watch.has_signs and engine.state.iteration >= _UNSEEN:
            self._warn_once(
                "nothing tells of trouble but request(): the train step returns no loss, there is no GradMonitor "
                "or SpikeMonitor, and no running statistics. Give loss=, or attach a monitor"
            )
        if signs.look:
            paths = self._new_nonfinite()
            if self._any_rank(bool(paths)):
                return Event.RUINED, f"{paths[0]} is not finite" if paths else "a state is not finite on another rank"
        if signs.trouble:
            return Event.TROUBLE, ", ".join(signs.trouble)
        if signs.nonfinite:
            return Event.NONFINITE, f"a loss or gradient has not been finite {self._course.patience} times in a row"
        return (Event.UNHEALTHY, "something exceeds its threshold") if signs.spike else (Event.HEALTHY, "")

    def _loss_of(self, engine: Engine) -> float | Tensor | None:
        value = engine.state.output if self.loss is None else self.loss(engine)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return value.detach() if value.device.type != "cpu" else float(value.detach())
        if isinstance(value, Real) and not isinstance(value, bool):
            return float(value)
        if self.loss is not None and value is not None:
            raise TypeError(f"Argument loss should return one number or None, but it returned {value!r}")
        return None

    def _put_back(self, snapshot: Snapshot, lower_rates: bool) -> None:
        self._training.put_back(snapshot.state["parts"], self._others(), snapshot.state["monitors"])
        self._watch.load_state_dict(snapshot.state["levels"])
        if lower_rates:
            self._factor *= self.lr_factor
        rewound = self._factor / snapshot.factor
        factor = rewound if self._training.rewind else self.lr_factor if lower_rates else 1.0
        if factor != 1.0:
            lower(self.to_save.values(), factor)

    def _accept(self, snapshot: Snapshot) -> None:
        for monitor in self._others():
            monitor.reset_threshold()
        self._watch.reset_threshold()
        self._snapshots.start_from(snapshot, self._thresholds())

    def _tell(self, iteration: int, action: Action, snapshot: Snapshot, reason: str) -> None:
        if action in _WORDS:
            level = logging.ERROR if action == Action.END else logging.WARNING
            left_out = iteration - snapshot.iteration
            text = _WORDS[action].format(reason=reason, state=snapshot.iteration, left_out=left_out)
            self.logger.log(level, "%s: iteration %d: %s", self.prefix, iteration, text)

    # Its parts

    def _others(self) -> list[Monitor]:
        attached = self._source.monitors if self._source is not None else []
        return [each for each in dict.fromkeys([*attached, *self._training.monitors]) if each is not self]

    def _thresholds(self) -> dict[str, Any]:
        return {"monitors": self._training.state_of(self._others()), "levels": self._watch.state_dict()}

    def _new_nonfinite(self) -> list[str]:
        return self._training.new_nonfinite(self._snapshots.newest.state["parts"] if self._snapshots else None)

    def _any_rank(self, flag: bool) -> bool:
        if world_size() == 1:
            return flag
        return bool(sum_over_ranks(torch.tensor([float(flag)], device=device_of(self._training.modules[0]))))


def _counts(**values: object) -> dict[str, int]:
    return {name: check_count(name, value, least=1) for name, value in values.items()}


def _check_to_save(to_save: Mapping[str, Any]) -> None:
    check_type("to_save", to_save, Mapping, "dict")
    for name, thing in to_save.items():
        if not isinstance(name, str):
            raise TypeError(f"Argument to_save should have strings as keys, but given {type(name)}")
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(f"Argument to_save should hold what has a state_dict, but {name!r} is {type(thing)}")
        if isinstance(thing, Engine):
            raise ValueError(f"Argument to_save should not hold an engine, which goes on: leave {name!r} out")
    if not any(isinstance(thing, nn.Module) for thing in to_save.values()):
        raise ValueError("Argument to_save should hold a model, a torch.nn.Module, but it has none")

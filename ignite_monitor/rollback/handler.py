"""RollbackHandler: back to a state from before the trouble, and on without the batches since."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_monitor.checks import check_count, check_real, check_type
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import ROLLBACK
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.monitor.base import Handlers, Monitor, NoModel
from ignite_monitor.monitor.publisher import transfer
from ignite_monitor.monitor.ranks import all_take_part, sum_over_ranks, world_size
from ignite_monitor.rollback.course import Action, Course, Event
from ignite_monitor.rollback.parts import MonitorPart, Part, is_scheduler, nonfinite_in, part_of, tensors_in
from ignite_monitor.rollback.rates import lower
from ignite_monitor.rollback.signs import LossLevel, RunningStatistics
from ignite_monitor.rollback.snapshots import Snapshot, Snapshots

_UNSEEN = 20  # iterations without any sign to judge by, or overdue without a step, after which it says so


class RollbackHandler(Monitor, schema=ROLLBACK):
    """Goes back to a state from before the trouble, and leaves out the batches since: PaLM's recipe.

    (A. Chowdhery et al., "PaLM", arXiv:2204.02311, section 5.1: restart from an earlier state, and skip the batches
    around the spike.) Every ``every`` iterations, between optimizer steps, the state of ``to_save`` and of the monitors
    on the engine is copied in memory. Where there is trouble it is put back, and the engine goes on with its iterator.

    A snapshot is taken when an iteration starts, not after an unhealthy one, nor of a state that is not finite; it
    is *good* after ``quiet`` iterations without a spike. Trouble goes back to the newest good one, and where none is
    good to the oldest. If it comes again before that one has proved good once more, it is so no longer. Trouble is

    - LEVEL_CHANGED of any monitor on the engine: of a ``GradMonitor``, ten spikes in a row;
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
    handler in it saves those that going back may need, usually two. Every rank keeps its own parts, and all decide the
    same, by a sum of a few numbers over the ranks in every iteration. To decide, an iteration's signs are read on the
    host: on an accelerator that waits for the end of the train step.

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

    _state_dict_all_req_keys = ("course", "snapshots", "loss", "statistics", "count", "undone_count")

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
        _check_one_of("where", where, "device", "host")
        _check_one_of("schedule", schedule, "keep", "rewind")
        _check_one_of("on_exhausted", on_exhausted, "continue", "terminate")
        if loss is not None and not callable(loss):
            raise TypeError(f"Argument loss should be a function of the engine or None, but given {type(loss)}")
        if lr_factor != 1.0:
            lr_factor = check_real("lr_factor", lr_factor, above=0.0, below=1.0)
        self.to_save = dict(to_save)
        self.every = check_count("every", every, least=1)
        self.loss = loss
        self.schedule = schedule
        self.lr_factor = lr_factor
        self.on_exhausted = on_exhausted
        self._course = Course(
            patience=check_count("patience", patience, least=1),
            probation=check_count("probation", probation, least=1),
            hold=check_count("hold", hold, least=1),
            max_rollbacks=check_count("max_rollbacks", max_rollbacks, least=1),
            window=check_count("window", window, least=1),
        )
        kept, quiet = check_count("keep", keep, least=1), check_count("quiet", quiet, least=1)
        self._snapshots = Snapshots(kept, quiet, on_host=where == "host")
        self._parts = {
            name: part_of(thing)
            for name, thing in self.to_save.items()
            if not isinstance(thing, Monitor) and (schedule == "rewind" or not is_scheduler(thing))
        }
        self._modules = [each for each in self.to_save.values() if isinstance(each, nn.Module)]
        self._optimizers = [each for each in self.to_save.values() if hasattr(each, "register_step_post_hook")]
        self._loss_level = LossLevel(self._course.patience)
        self._statistics = RunningStatistics()
        self._exempt: set[str] = set()  # what was not finite when it was first seen
        self._counts: WeakKeyDictionary[Monitor, list[float]] = WeakKeyDictionary()
        self._request: str | None = None
        self._count = self._undone = 0
        self._factor = 1.0
        self._iteration = 0  # the last one
        self._taken = 0  # the iteration after which the last snapshot was taken
        self._healthy = self._stepped = True  # that one
        self._has_signs = self._reported = False

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
        self._request = reason

    def state_dict(self) -> OrderedDict[str, Any]:
        """Counts, levels and the snapshots that going back may need: tensors, numbers, strings, lists and dicts."""
        return OrderedDict(
            course=self._course.state_dict(),
            snapshots=self._snapshots.state_dict(),
            loss=self._loss_level.state_dict(),
            statistics=self._statistics.state_dict(),
            count=self._count,
            undone_count=self._undone,
            factor=self._factor,
            iteration=self._iteration,
            taken=self._taken,
            healthy=self._healthy,
            stepped=self._stepped,
            exempt=sorted(self._exempt),
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        names = {name for each in state_dict["snapshots"]["pending"] for name in each["state"]["parts"]}
        if not names <= self._parts.keys():
            raise ValueError(f"Argument state_dict should be of {sorted(self._parts)}, but it holds {sorted(names)}")
        self._course.load_state_dict(state_dict["course"])
        self._snapshots.load_state_dict(state_dict["snapshots"])
        self._loss_level.load_state_dict(state_dict["loss"])
        self._statistics.load_state_dict(state_dict["statistics"])
        self._count, self._undone = int(state_dict["count"]), int(state_dict["undone_count"])
        self._factor = float(state_dict["factor"])
        self._iteration, self._taken = int(state_dict["iteration"]), int(state_dict["taken"])
        self._healthy, self._stepped = bool(state_dict["healthy"]), bool(state_dict["stepped"])
        self._exempt = set(state_dict["exempt"])

    # Before the train step

    def start_iteration(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        if iteration <= self._iteration:  # another run: its states are not those of this one
            self._snapshots.clear()
            self._course.forget()
            self._healthy = self._stepped = True
        self._statistics.look_for(self._modules)
        for monitor in self._others():
            if monitor not in self._counts and (counts := monitor.counts()) is not None:
                self._counts[monitor] = counts.tolist()
        due = not self._snapshots or iteration - 1 - self._taken >= self.every
        if due and self._healthy and not self._course.healing:
            if self._stepped or not self._snapshots:
                self._take(iteration - 1)
            elif iteration - 1 - self._taken >= self.every + _UNSEEN * self.every:
                self._warn_once(
                    "no step of the optimizers in to_save has been seen in %d iterations, so no snapshot is taken: are "
                    "they those that the train step uses?",
                    iteration - 1 - self._taken,
                )
        self._stepped = not self._optimizers

    def contexts(self) -> list[AbstractContextManager[Any]]:
        return [self._seeing_steps()] if self._is_running and self._optimizers else []

    @contextmanager
    def _seeing_steps(self) -> Iterator[None]:
        handles = [optimizer.register_step_post_hook(self._on_step) for optimizer in self._optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_step(self, *_: Any) -> None:
        self._stepped = True

    def _take(self, iteration: int) -> None:
        state = self._state()
        if self._any_rank(bool(self._new_nonfinite(state["parts"]))):
            return
        self._snapshots.take(iteration, state, self._factor)
        self._taken = iteration

    def _state(self) -> dict[str, Any]:
        return {"parts": {name: part.state() for name, part in self._parts.items()}, **self._thresholds()}

    def _thresholds(self) -> dict[str, Any]:
        return {
            "monitors": {name: part.state() for name, part in self._monitor_parts().items()},
            "loss": self._loss_level.state_dict(),
            "statistics": self._statistics.state_dict(),
        }

    def _others(self) -> list[Monitor]:
        attached = self._source.monitors if self._source is not None else []
        named = [each for each in self.to_save.values() if isinstance(each, Monitor)]
        return [each for each in {id(each): each for each in [*attached, *named]}.values() if each is not self]

    def _monitor_parts(self) -> dict[str, Part]:
        named = {each.prefix or each.families[0]: each for each in self._others()}
        # Who has parameter groups sets learning rates, as schedules do.
        kept = {n: m for n, m in named.items() if self.schedule == "rewind" or not hasattr(m, "param_groups")}
        return {name: MonitorPart(monitor) for name, monitor in kept.items()}

    # After it

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def _on_train_step_completed(self, engine: Engine) -> Callable[[], Any] | None:
        # When all monitors have judged, those too that wait for what others publish, and have looked at that.
        return (lambda: lambda: functools.partial(self._decide, engine)) if self._is_running else None

    def _decide(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        if not all(all_take_part(module) for module in self._modules):
            self._warn_once("under join(), where not all ranks take part, nothing is judged")
            return
        was_healing = self._course.healing
        event, reason = self._judge(engine)
        action = self._course.next(event, iteration)
        self._iteration, self._healthy = iteration, event == Event.HEALTHY
        for proved in self._snapshots.note(self._healthy):
            if proved.young:
                self._snapshots.update(proved, self._thresholds())
        values: dict[str, float] = {}
        if action != Action.NONE and self._snapshots:
            snapshot = self._snapshots.current if was_healing else self._snapshots.choose(action == Action.GO_BACK)
            self._count += action == Action.GO_BACK
            self._undone += was_healing
            self._put_back(snapshot, lower_rates=action == Action.GO_BACK)
            self._tell(engine, action, snapshot, reason)
            if action == Action.ACCEPT:
                self._accept(snapshot)
            values["iteration"] = snapshot.iteration
        elif was_healing and not self._course.healing:
            self.logger.info("%s: well again at iteration %d, %d undone", self.prefix, iteration, self._course.undone)
        self.publish(count=self._count, undone_count=self._undone, **values)
        if action == Action.GO_BACK and self._source is not None:
            self._source.fire(MonitorEvents.ROLLED_BACK)

    def _judge(self, engine: Engine) -> tuple[Event, str]:
        """What the iteration was, and why; the same on every rank, but for the words."""
        signs = self._signs(engine)
        loss = signs.loss / signs.losses if signs.losses else None
        is_finite = loss is None or math.isfinite(loss)
        above, stays_above = (False, False) if loss is None else self._loss_level.observe(loss)
        reasons = list(signs.reasons)
        if stays_above:
            reasons.append(f"the loss has been above its level {self._course.patience} times in a row")
        if signs.look or not is_finite:
            paths = sorted(self._new_nonfinite(self._state()["parts"]))
            if self._any_rank(bool(paths)):
                return Event.RUINED, f"{paths[0]} is not finite" if paths else "a state is not finite on another rank"
        if stays_above or signs.trouble:
            return Event.TROUBLE, ", ".join(reasons) or "another rank has trouble"
        if signs.nonfinite or not is_finite:
            return Event.NONFINITE, f"a loss or gradient has not been finite {self._course.patience} times in a row"
        return (Event.UNHEALTHY if above or signs.spike else Event.HEALTHY), ""

    def _signs(self, engine: Engine) -> _Signs:
        loss = self._loss_of(engine)
        statistics = self._statistics.observe()
        counts = {each: counts for each in self._others() if (counts := each.counts()) is not None}
        if not self._has_signs:
            self._has_signs = bool(counts) or loss is not None or statistics is not None
            if not self._has_signs and engine.state.iteration >= _UNSEEN:
                self._warn_once(
                    "nothing tells of trouble but request(): the train step returns no loss, there is no GradMonitor "
                    "or SpikeMonitor, and no running statistics. Give loss=, or attach a monitor"
                )
        asked = [each for each in (loss, statistics) if isinstance(each, Tensor)]
        numbers = transfer([list(counts.values()), asked])
        own = iter(numbers[1])
        if isinstance(loss, Tensor):
            [loss] = next(own)
        signs = _Signs(0.0 if loss is None else loss, loss is not None)
        for monitor, now in zip(counts, numbers[0], strict=True):
            spikes, nonfinite, restarts = (a > b for a, b in zip(now, self._counts.get(monitor, now), strict=True))
            self._counts[monitor] = now
            signs.spike |= spikes
            signs.look |= nonfinite
            signs.nonfinite |= nonfinite and spikes  # what a GradScaler looks after is no spike
            if restarts:
                signs.trouble = True
                signs.reasons.append(f"{monitor.prefix} has had so many spikes in a row that its level has changed")
        if statistics is not None:
            nonfinite, spike, changed = map(bool, next(own))
            signs.look |= nonfinite
            signs.spike |= spike
            if changed:
                signs.trouble = True
                signs.reasons.append("running statistics are far above their level")
        if self._request is not None:
            signs.trouble = True
            signs.reasons.append(self._request)
            self._request = None
        return signs if world_size() == 1 else signs.summed(self._device())

    def _loss_of(self, engine: Engine) -> float | Tensor | None:
        value = engine.state.output if self.loss is None else self.loss(engine)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return value.detach() if value.device.type != "cpu" else float(value.detach())
        if isinstance(value, Real) and not isinstance(value, bool):
            return float(value)
        if self.loss is not None and value is not None:
            raise TypeError(f"Argument loss should return one number or None, but it returned {value!r}")
        return None

    def _new_nonfinite(self, parts: Mapping[str, Any]) -> set[str]:
        """What is not finite, and was at the first snapshot; masks of attention are not, and may be made later."""
        nonfinite = nonfinite_in(parts, self._exempt)
        if not nonfinite:
            return nonfinite
        known = {path for path, _ in tensors_in(self._snapshots.newest.state["parts"])} if self._snapshots else set()
        self._exempt |= {path for path in nonfinite - known if ".buffers." in path or not known}
        return nonfinite - self._exempt

    def _put_back(self, snapshot: Snapshot, lower_rates: bool) -> None:
        rewind = self.schedule == "rewind"
        for name, part in self._parts.items():
            part.put_back(snapshot.state["parts"][name], rewind)
        for name, part in self._monitor_parts().items():
            if name in snapshot.state["monitors"]:
                part.put_back(snapshot.state["monitors"][name], rewind)
        self._loss_level.load_state_dict(snapshot.state["loss"])
        self._statistics.load_state_dict(snapshot.state["statistics"])
        if lower_rates:
            self._factor *= self.lr_factor
        factor = self._factor / snapshot.factor if rewind else self.lr_factor if lower_rates else 1.0
        if factor != 1.0:
            lower(self.to_save.values(), factor)
        learning = [*self._modules, *self._optimizers]
        for parameter in {id(p): p for each in learning for p in _parameters_of(each)}.values():
            parameter.grad = None

    def _tell(self, engine: Engine, action: Action, snapshot: Snapshot, reason: str) -> None:
        iteration = engine.state.iteration
        if action == Action.GO_BACK:
            self.logger.warning(
                "%s: iteration %d: %s. Back to the state after iteration %d, %d batches are left out",
                self.prefix,
                iteration,
                reason,
                snapshot.iteration,
                iteration - snapshot.iteration,
            )
        elif action == Action.ACCEPT:
            self.logger.warning(
                "%s: iteration %d: the trouble has not gone, so it is taken for a new level%s. The state after "
                "iteration %d is put back once more, and all rules start afresh",
                self.prefix,
                iteration,
                f" ({reason})" if reason else "",
                snapshot.iteration,
            )
        elif action == Action.END:
            self.logger.error(
                "%s: iteration %d: what is not finite comes again and again (%s): the run ends, with the state after "
                "iteration %d",
                self.prefix,
                iteration,
                reason,
                snapshot.iteration,
            )
        if action == Action.END or (action == Action.ACCEPT and self.on_exhausted == "terminate"):
            engine.terminate()

    def _accept(self, snapshot: Snapshot) -> None:
        for monitor in self._others():
            monitor.start_afresh()
        self._loss_level.start_afresh()
        self._statistics.start_afresh()
        self._snapshots.start_from(snapshot, self._thresholds())

    def _device(self) -> torch.device:
        parameters = (parameter for each in [*self._modules, *self._optimizers] for parameter in _parameters_of(each))
        first = next(parameters, None)
        return torch.device("cpu") if first is None else first.device

    def _any_rank(self, flag: bool) -> bool:
        if world_size() == 1:
            return flag
        return bool(sum_over_ranks(torch.tensor([float(flag)], device=self._device())))

    def _warn_once(self, text: str, *values: Any) -> None:
        if not self._reported:
            self._reported = True
            self.logger.warning(f"%s: {text}", self.prefix, *values)


@dataclass
class _Signs:
    """What an iteration's signs are, on one rank or on all of them.

    Attributes:
        loss: the sum of the ranks' losses.
        losses: how many there are.
        reasons: which trouble, on this rank.
        look: something is not finite: is the state?
        nonfinite: a gradient is not finite, and nobody looks after it.
        spike: something is above its threshold.
        trouble: something is trouble by itself.
    """

    loss: float
    losses: float
    reasons: list[str] = field(default_factory=list)
    look: bool = False
    nonfinite: bool = False
    spike: bool = False
    trouble: bool = False

    def summed(self, device: torch.device) -> _Signs:
        """The signs of all ranks."""
        own = [self.loss, self.losses, self.look, self.nonfinite, self.spike, self.trouble]
        loss, losses, *flags = sum_over_ranks(torch.tensor(own, dtype=wide_dtype(device), device=device)).tolist()
        return _Signs(loss, losses, self.reasons, *map(bool, flags))


def _parameters_of(thing: Any) -> Iterable[Tensor]:
    if isinstance(thing, nn.Module):
        return thing.parameters()
    return (parameter for group in thing.param_groups for parameter in group["params"])


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


def _check_one_of(name: str, value: object, *allowed: str) -> None:
    check_type(name, value, str, "str")
    if value not in allowed:
        raise ValueError(f"Argument {name} should be {' or '.join(map(repr, allowed))}, but given {value!r}")

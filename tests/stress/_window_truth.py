"""What the window rule says of a list of events, in plain Python.

The rule's seven clauses stand in the design ("A gradient's window"); numbers in comments are theirs. One thing is
other than its words say: where another optimizer makes its step with a backward that reached several monitored models,
the window is laid aside, and a step of its own in the same iteration still takes it (models that are trained together).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from tests._judge import Detection, Judge, Rule
from tests.stress._steps import Event, order_statistics

Moment = tuple[bool, float | None]


@dataclasses.dataclass(eq=False)
class Window:
    """The newest detection since the last own step."""

    detection: Detection
    iteration: int
    shared: bool  # the backward reached other monitored models too
    laid_aside: bool = False
    unshared: Window | None = None  # of a shared backward: that of the iteration's last one that was not


@dataclasses.dataclass(eq=False)
class Taken:
    """The detection that a step took."""

    detection: Detection
    of_backward: bool
    again: bool = False


class WindowTruth:
    """What GradMonitor is to say.

    Args:
        rule: its threshold rule.
        own: names of the parameters that count.
        makes_step: whether a step of an optimizer is its own.
        others: names of the parameters of other monitored models.
        said: flag and norm that the monitor said at each moment: where rounding decides, the flag is taken from there.

    Attributes:
        moments: flag and norm at each moment.
        published: of each iteration.
        announced: the iterations in which a spike was announced.
    """

    def __init__(
        self,
        rule: Rule,
        own: Iterable[str],
        makes_step: Callable[[int], bool],
        others: Iterable[str],
        reported: list[Moment],
    ) -> None:
        self.own, self.others, self.makes_step = set(own), set(others), makes_step
        self.judge, self.said = Judge(rule), reported
        self.moments: list[Moment] = []
        self.published: list[dict[str, float]] = []
        self.announced: list[int] = []
        self.window: Window | None = None
        self.was_announced = False  # the gradient of the window
        self.without_entry: Judge | None = None  # what was known before an entry that is tentative
        self.iteration = 0
        self.has_judged = False  # in this iteration

    def follow(self, events: list[Event], monitored: Callable[[int], bool]) -> WindowTruth:
        for event in events:
            if event.kind == "iteration":
                self.iteration += 1
                self.is_monitored = monitored(self.iteration)
                self.said_now: Detection | None = None
                self.taken: Taken | None = None
                self.made: Taken | None = None
                self.has_judged = False
                if not self.is_monitored:  # 6
                    self._close()
                    self.published.append({})
            elif event.kind == "moment":
                now = self.said_now
                self.moments.append((False, None) if now is None else (now.spike, now.norm))
            elif self.is_monitored:
                getattr(self, f"_{event.kind}")(event)
        return self

    def _judged(self, event: Event) -> Detection:
        self.has_judged = True
        place = len(self.moments)
        reported = self.said[place][0] if place < len(self.said) else False
        norm = math.sqrt(math.fsum(event.norms[name] ** 2 for name in self.own if name in event.norms))
        return self.judge.judge(norm, reported)

    def _close(self) -> None:
        self.window = None
        self.was_announced = False

    def _announce(self, detection: Detection) -> None:
        if detection.spike and not self.was_announced:
            self.was_announced = True
            self.announced.append(self.iteration)

    def _backward(self, event: Event) -> None:
        if not event.reached & self.own:
            return
        if self.without_entry is not None:  # 7
            if event.before & self.own:
                self.judge = self.without_entry
            else:
                self.was_announced = False
            self.without_entry = None
        detection = self.said_now = self._judged(event)  # 1
        if self.taken is not None and event.optimizer is not None:  # 2: inside of the own step
            return
        shared = bool(event.reached & self.others)
        now = self.window if self.window is not None and self.window.iteration == self.iteration else None
        unshared = now.unshared if now is not None and now.shared else now
        self.window = Window(detection, self.iteration, shared, unshared=unshared if shared else None)
        if not shared:  # 3
            self._announce(detection)

    def _step(self, event: Event) -> None:
        now = self.window if self.window is not None and self.window.iteration == self.iteration else None
        if not self.makes_step(event.optimizer):
            if now is not None and now.shared:  # 3
                now.laid_aside = True
                self.said_now = None if self.made is None else self.made.detection
            return
        if not any(name in event.norms for name in self.own):  # 2
            self._close()
            self.said_now = None if self.made is None else self.made.detection
            return
        if now is not None:
            self.taken = Taken(now.detection, of_backward=True)
        elif self.made is not None and self.made.of_backward:  # 4
            self.taken = Taken(self.made.detection, of_backward=True, again=True)
        else:
            if self.without_entry is not None:  # 2: in place of the tentative entry
                self.judge, self.without_entry = self.without_entry, None
            self.taken = Taken(self._judged(event), of_backward=False)
        self.said_now = self.taken.detection
        if not self.taken.again:
            self._announce(self.taken.detection)

    def _stepped(self, event: Event) -> None:
        if not self.makes_step(event.optimizer) or self.taken is None:
            return
        if not self.taken.again:
            self.judge.observe(self.taken.detection)
        self.made, self.taken = self.taken, None
        self._close()

    def _returned(self, event: Event) -> None:
        now = self.window if self.window is not None and self.window.iteration == self.iteration else None
        final = None if self.made is None else self.made.detection
        aside = now is not None and now.laid_aside
        if aside:  # 3
            now = now.unshared if final is None else None
        if now is not None and (final is None or (now.detection.spike and not now.shared)):  # 5
            if now.detection.spike or not math.isfinite(now.detection.norm):
                final = now.detection
                self.without_entry = self.judge.copy()
                self.judge.observe(final)
            if final is now.detection:
                self._announce(final)
        if aside:
            self._close()
        if final is None:
            # That an iteration with a gradient had no step is told.
            self.published.append({"stepped": 0.0} if self.has_judged else {})
            return
        self.said_now = final
        values = final.statistics() | {
            "spike_count": float(self.judge.spike_count),
            "skipped_count": 0.0,
            "nonfinite_count": float(self.judge.nonfinite_count),
            "stepped": float(self.made is not None),
        }
        self.published.append(values)


class UpdateTruth:
    """What WeightUpdateHandler is to publish.

    Args:
        own: names of the parameters that count.
        trained: names of those that have requires_grad.
        held_by: names of an optimizer's parameters.
    """

    def __init__(self, own: Iterable[str], trained: Iterable[str], held_by: Callable[[int], set[str]]) -> None:
        self.own, self.trained, self.held_by = set(own), set(trained), held_by
        self.published: list[dict[str, float]] = []
        self._still: dict[str, int] = {}
        self._iteration = 0

    def follow(self, events: list[Event], monitored: Callable[[int], bool]) -> UpdateTruth:
        for event in events:
            if event.kind == "iteration":
                self._iteration += 1
                self._start = event.weights
                self._left: dict[str, float] = {}  # by a backward: what becomes of it after that makes no difference
                self._used: dict[str, float] = {}  # by a parameter's last step
                self._moved: set[str] = set()
            elif event.kind == "backward":
                self._left |= {name: event.norms[name] for name in event.reached & self.own}
            elif event.kind == "step":
                members = self.held_by(event.optimizer) & self.own & self.trained
                self._stepping = (
                    members,
                    {name: self._left.get(name, norm) for name, norm in event.norms.items() if name in members},
                )
            elif event.kind == "stepped" and self._stepping[1]:
                self._used |= self._stepping[1]
                self._moved |= self._stepping[0]
            elif event.kind == "returned":
                self.published.append(self._values(event) if monitored(self._iteration) else {})
        return self

    def _values(self, event: Event) -> dict[str, float]:
        norms = self._left | self._used
        values: dict[str, float] = {}
        if norms:
            values |= order_statistics("grad", list(norms.values()))
            values["vanishing_count"] = float(sum(norm < 1e-7 for norm in norms.values()))
            values["exploding_count"] = float(sum(norm > 1e2 for norm in norms.values()))
        if self._moved:
            ratios = {}
            for name in sorted(self._moved):
                before, after = self._start[name], event.weights[name]
                ratios[name] = float((after - before).norm()) / (float(before.norm()) + 1e-12)
                self._still[name] = self._still.get(name, 0) + 1 if ratios[name] <= 1e-12 else 0
            values |= order_statistics("update_ratio", list(ratios.values()))
            values["frozen_count"] = float(sum(self._still[name] >= 3 for name in ratios))
        return values

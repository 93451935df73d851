"""Expected metrics of a training run in float64, from what is recorded without monitors.

Of any train step there is one list of events, with gradients and weights. :class:`WindowTruth` has what GradMonitor
makes of it, and :class:`UpdateTruth` what WeightUpdateHandler does; functions have it of weights and modules' outputs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.names import tags
from tests._oracle import Detection, Oracle, Rule

Values = dict[str, float]
Moment = tuple[bool, float | None]


def wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def dense(values: Tensor) -> Tensor:
    return values if values.layout == torch.strided else values.to_dense()


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(math.fsum(float(wide(dense(item)).abs().square().sum()) for item in tensors))


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: item.detach().clone() for name, item in model.named_parameters()}


def order_statistics(name: str, values: Iterable[float]) -> Values:
    values = sorted(values)
    count = len(values)
    median = (values[(count - 1) // 2] + values[count // 2]) / 2
    p95 = values[math.ceil(0.95 * count) - 1]
    return {f"{name}_median": median, f"{name}_p95": p95, f"{name}_min": values[0], f"{name}_max": values[-1]}


# Train steps


@dataclasses.dataclass(frozen=True)
class Event:
    """Event of a run, in order.

    Args:
        kind: "iteration" starts, "backward" ends, "step" starts (with a closure, when that has returned first),
            "stepped" or "skipped", the train step has "returned", and a "moment" at which monitors are asked.
        optimizer: whose step it is, or in whose step the backward is.
        reached: names of the parameters that a backward reached.
        before: names of those that had a gradient other than zero before it.
        gradients: those that there are now, by name.
        weights: at "iteration" and "returned", by name.
    """

    kind: str
    optimizer: int | None = None
    reached: Collection[str] = ()
    before: Collection[str] = ()
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def norms(self) -> Values:
        return {name: norm([item]) for name, item in self.gradients.items()}


@dataclasses.dataclass(eq=False)
class Window:
    """The newest detection since the last own step."""

    detection: Detection
    iteration: int
    shared: bool  # the backward reached other monitored models too
    used_by_other: bool = False
    unshared: Window | None = None  # of a shared backward: that of the iteration's last one that was not


@dataclasses.dataclass(eq=False)
class Taken:
    """The detection that a step took."""

    detection: Detection
    of_backward: bool
    again: bool = False
    skipped: bool = False


class WindowTruth:
    """Expected results of GradMonitor by the window rule: numbers in comments are its clauses in the architecture.

    One thing is other than its words say: where another optimizer makes its step with a backward that reached several
    monitored models, the window is marked as used by it, and a step of its own in the same iteration still takes it.

    Args:
        rule: its threshold rule.
        own: names of the parameters that count.
        makes_step: whether a step of an optimizer is its own.
        others: names of the parameters of other monitored models.
        reported: flag and norm that the monitor reports at each moment, for where rounding decides.
        scaled: whether there is a GradScaler, whose overflows are no spikes.

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
        others: Iterable[str] = (),
        reported: Iterable[Moment] = (),
        scaled: bool = False,
    ) -> None:
        self.own, self.others, self.makes_step = set(own), set(others), makes_step
        self.oracle, self.reported = Oracle(rule, overflow_is_spike=not scaled), list(reported)
        self.moments: list[Moment] = []
        self.published: list[Values] = []
        self.announced: list[int] = []
        self.window: Window | None = None
        self.was_announced = False  # the gradient of the window
        self.without_update: Oracle | None = None  # what was known before a provisional update
        self.iteration = 0
        self.has_detected = False  # in this iteration
        self.skipped_count = 0

    def follow(self, events: Iterable[Event], monitored: Callable[[int], bool] = lambda _: True) -> WindowTruth:
        for event in events:
            if event.kind == "iteration":
                self.iteration += 1
                self.is_monitored = monitored(self.iteration)
                self.reported_now: Detection | None = None
                self.taken: Taken | None = None
                self.made: Taken | None = None
                self.has_detected = False
                if not self.is_monitored:  # 6
                    self._close()
                    self.published.append({})
            elif event.kind == "moment":
                now = self.reported_now
                self.moments.append((False, None) if now is None else (now.spike, now.norm))
            elif self.is_monitored:
                getattr(self, f"_{event.kind}")(event)
        return self

    def _detected(self, event: Event) -> Detection:
        self.has_detected = True
        place = len(self.moments)
        reported = self.reported[place][0] if place < len(self.reported) else False
        norm = math.sqrt(math.fsum(event.norms[name] ** 2 for name in self.own if name in event.norms))
        return self.oracle.detect(norm, reported)

    def _close(self) -> None:
        self.window = None
        self.was_announced = False

    def _announce(self, detection: Detection) -> None:
        if detection.spike and not self.was_announced:
            self.was_announced = True
            self.announced.append(self.iteration)

    def _backward(self, event: Event) -> None:
        if not self.own.intersection(event.reached):
            return
        if self.without_update is not None:  # 7
            if self.own.intersection(event.before):
                self.oracle = self.without_update
            else:
                self.was_announced = False
            self.without_update = None
        detection = self.reported_now = self._detected(event)  # 1
        if self.taken is not None and event.optimizer is not None:  # 2: inside of the own step
            return
        shared = bool(self.others.intersection(event.reached))
        now = self.window if self.window is not None and self.window.iteration == self.iteration else None
        unshared = now.unshared if now is not None and now.shared else now
        self.window = Window(detection, self.iteration, shared, unshared=unshared if shared else None)
        if not shared:  # 3
            self._announce(detection)

    def _step(self, event: Event) -> None:
        now = self.window if self.window is not None and self.window.iteration == self.iteration else None
        if not self.makes_step(event.optimizer):
            if now is not None and now.shared:  # 3
                now.used_by_other = True
                self.reported_now = None if self.made is None else self.made.detection
            return
        if not any(name in event.norms for name in self.own):  # 2
            self._close()
            self.reported_now = None if self.made is None else self.made.detection
            return
        if now is not None:
            self.taken = Taken(now.detection, of_backward=True)
        elif self.made is not None and self.made.of_backward:  # 4
            self.taken = Taken(self.made.detection, of_backward=True, again=True)
        else:
            if self.without_update is not None:  # 2: in place of the provisional update
                self.oracle, self.without_update = self.without_update, None
            self.taken = Taken(self._detected(event), of_backward=False)
        self.reported_now = self.taken.detection
        if not self.taken.again:
            self._announce(self.taken.detection)

    def _stepped(self, event: Event) -> None:
        if not self.makes_step(event.optimizer) or self.taken is None:
            return
        if not self.taken.again:
            self.oracle.observe(self.taken.detection)
        self.made, self.taken = self.taken, None
        self._close()

    def _skipped(self, event: Event) -> None:
        self._stepped(event)
        if self.makes_step(event.optimizer) and self.made is not None:
            assert self.made.detection.spike
            self.made.skipped = True
            self.skipped_count += 1

    def _returned(self, event: Event) -> None:
        now = self.window if self.window is not None and self.window.iteration == self.iteration else None
        final = None if self.made is None else self.made.detection
        is_used = now is not None and now.used_by_other
        if is_used:  # 3
            now = now.unshared if final is None else None
        if now is not None and (final is None or not now.shared):  # 5
            detection = now.detection
            if detection.spike or not math.isfinite(detection.norm):
                self.without_update = self.oracle.copy()
                self.oracle.observe(detection)
                self._announce(detection)
                final = final or detection
        if is_used:
            self._close()
        if final is None:
            # That an iteration with a gradient had no step is published.
            self.published.append({"stepped": 0.0} if self.has_detected else {})
            return
        values = final.statistics() | {
            "spike_count": float(self.oracle.spike_count),
            "skipped_count": float(self.skipped_count),
            "nonfinite_count": float(self.oracle.nonfinite_count),
            "stepped": float(self.made is not None and not self.made.skipped),
        }
        self.published.append(values)


class UpdateTruth:
    """Expected metrics of WeightUpdateHandler.

    Args:
        own: names of the parameters that count.
        held_by: names of an optimizer's parameters that have requires_grad.
        top_k: how many of the largest norms are published by name.
        scaled: whether there is a GradScaler, whose overflows are left to it.
    """

    def __init__(
        self, own: Iterable[str], held_by: Callable[[int], Iterable[str]], top_k: int = 0, scaled: bool = False
    ) -> None:
        self.own, self.held_by, self.top_k, self.scaled = set(own), held_by, top_k, scaled
        self.published: list[Values] = []
        self._still: dict[str, int] = {}
        self._iteration = 0

    def follow(self, events: Iterable[Event], monitored: Callable[[int], bool] = lambda _: True) -> UpdateTruth:
        for event in events:
            if event.kind == "iteration":
                self._iteration += 1
                self._start, self._has_backward = event.weights, False
                self._left: Values = {}  # by a backward: what becomes of it after that makes no difference
                self._used: Values = {}  # by a parameter's last step
                self._moved: dict[str, Tensor | None] = {}  # and the gradients of the steps
            elif event.kind == "backward":
                reached = self.own.intersection(event.reached)
                self._has_backward |= bool(reached)
                self._left |= {name: event.norms[name] for name in reached if self._counts(event.norms[name])}
            elif event.kind == "step":
                names = self.own.intersection(self.held_by(event.optimizer))
                self._members = {name: event.gradients.get(name) for name in names}
                self._stepping = {n: self._left.get(n, event.norms[n]) for n in names if n in event.norms}
            elif event.kind == "stepped" and self._stepping:
                self._used |= self._stepping
                self._moved |= self._members
            elif event.kind == "returned":
                values = self._values(event) if monitored(self._iteration) else {}
                self.published.append({f"monitor/{name}": value for name, value in values.items()})
        return self

    def _counts(self, norm: float) -> bool:
        return math.isfinite(norm) or not self.scaled

    def _values(self, event: Event) -> Values:
        norms = self._left | self._used
        values: Values = {}
        if norms or self._has_backward:
            values["vanishing_count"] = float(sum(item < 1e-7 for item in norms.values()))
            values["exploding_count"] = float(sum(item > 1e2 for item in norms.values()))
            largest = sorted(norms, key=lambda name: -norms[name])[: self.top_k]
            values |= {f"topk_grad/{name}": norms[name] for name in largest}
        if norms:
            values |= order_statistics("grad", norms.values())
        if self._moved:
            pairs = {name: (self._start[name], event.weights[name]) for name in self._moved}
            ratios = {name: norm([wide(b) - wide(a)]) / (norm([a]) + 1e-12) for name, (a, b) in pairs.items()}
            for name, ratio in ratios.items():
                self._still[name] = self._still.get(name, 0) + 1 if ratio <= 1e-12 else 0
            values |= order_statistics("update_ratio", ratios.values())
            values["frozen_count"] = float(sum(self._still[name] >= 3 for name in ratios))
            narrow = [name for name, (a, _) in pairs.items() if a.dtype in (torch.bfloat16, torch.float16)]
            had = {name: gradient != 0 for name in narrow if (gradient := self._moved[name]) is not None}
            if any(item.any() for item in had.values()):
                same = sum(int(((pairs[name][0] == pairs[name][1]) & item).sum()) for name, item in had.items())
                values["lost_update_fraction"] = same / sum(int(item.sum()) for item in had.values())
        return values


# Weights


def statistics_of_step(weights: Iterable[Tensor], rate: float) -> Values:
    """Compute the metrics of StepStatsHandler, without clocks and memory."""
    floats = [item for item in weights if item.is_floating_point() or item.is_complex()]
    return {"step/lr/group_0": rate, "step/parameter_norm": norm(floats)}


def spectral(
    model: nn.Module, before: dict[str, Tensor], after: dict[str, Tensor], held: Collection[str], has_step: bool
) -> Values:
    """Compute the metrics of SpectralNormHandler with updates; ``held`` names the parameters that may move."""
    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    then, now = _effective(before), _effective(after)
    names = [name for name, item in now.items() if item.ndim > 1 and item.numel() and item.dtype in floats]
    norms = {name: float(torch.linalg.matrix_norm(wide(now[name]).flatten(1), 2)) for name in names}
    tables = {
        name
        for name, item in model.named_parameters()
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is item
    }
    pairs = zip(names, tags(names), strict=True)
    values = {f"{'embedding' if name in tables else 'norm'}/{tag}": norms[name] for name, tag in pairs}
    every = torch.tensor([*norms.values()], dtype=torch.float64)
    values |= {"norm_max": every.max(), "norm_mean": every.mean(), "norm_std": every.std(correction=0)}
    ranks = [(norm([now[name]]) / item) ** 2 for name, item in norms.items() if item]
    if ranks:
        summary = order_statistics("stable_rank", ranks)
        values |= {key: summary[key] for key in ("stable_rank_min", "stable_rank_median")}
    shapes = {name: now[name].flatten(1).shape for name in names if name not in tables}
    scales = {name: math.sqrt(rows / columns) for name, (rows, columns) in shapes.items()}
    conditions = {"weight_condition": [norms[name] / item for name, item in scales.items()]}
    own = [name for name in names if set(held) & set(_made_of(name, after))]
    if has_step and own:
        moves = {name: (wide(now[name]) - wide(then[name])).flatten(1) for name in own}
        sizes = {name: float(torch.linalg.matrix_norm(move, 2)) for name, move in moves.items()}
        values["update_norm_max"] = max(sizes.values())
        conditions["update_condition"] = [item / scales[name] for name, item in sizes.items() if name in scales]
    for key, item in conditions.items():
        if item:
            summary = order_statistics(key, item)
            values |= {f"{key}_max": summary[f"{key}_max"], f"{key}_median": summary[f"{key}_median"]}
    return {f"spectral/{name}": float(value) for name, value in values.items()}


def _made_of(name: str, weights: dict[str, Tensor]) -> list[str]:
    """The parameters that a weight is made of."""
    module, _, last = name.rpartition(".")
    parts = [f"{module}.parametrizations.{last}.original{i}".lstrip(".") for i in (0, 1)]
    return parts if parts[0] in weights else [name]


def _effective(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as modules use them: of weight normalisation the rows of the second part, as long as the first."""
    result = {}
    for name, weight in weights.items():
        if name.endswith("original0"):
            rows = wide(weights[name[:-1] + "1"])
            normed = wide(weight) * rows / rows.flatten(1).norm(dim=1).view(-1, *[1] * (rows.ndim - 1))
            # It stands where the module's weight does, before what is made of its own parameters.
            result[name.replace(".parametrizations.weight.original0", ".weight")] = normed
        elif not name.endswith("original1"):
            result[name] = weight
    return result


# Outputs of modules


Call = list[tuple[str, Tensor]]  # the floating-point tensors of its output, with their places


@dataclasses.dataclass
class Iteration:
    """Record of an iteration with one optimizer step."""

    rng: Tensor
    x: Any
    weights: dict[str, Tensor]
    calls: dict[str, list[Call]] = dataclasses.field(default_factory=dict)
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    after: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def events(self) -> Iterator[Event]:
        yield Event("iteration", weights=self.weights)
        if self.gradients:
            yield Event("backward", None, reached=[*self.gradients], gradients=self.gradients)
        yield Event("step", 0, gradients=self.gradients)
        yield Event("stepped", 0)
        yield Event("returned", weights=self.after)


def updates(iterations: Iterable[Iteration], held: set[str]) -> list[Values]:
    """Compute the metrics of WeightUpdateHandler; ``held`` names the optimizer's parameters."""
    events = (event for iteration in iterations for event in iteration.events())
    return UpdateTruth(held, lambda _: held).follow(events).published


def floating(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
        return
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    for key, member in members:
        yield from floating(member, f"{path}/{key}".lstrip("/"))


class Recorder:
    """Records the outputs of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, list[Call]] = {}
        self._open: dict[str, list[Call]] = {}
        self._handles = []
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)),
                module.register_forward_hook(lambda _, args, output, name=name: self._leave(name, output)),
            ]

    def _enter(self, name: str) -> None:
        self.calls.setdefault(name, []).append([])
        self._open.setdefault(name, []).append(self.calls[name][-1])

    def _leave(self, name: str, output: Any) -> None:
        self._open[name].pop()[:] = [(place, tensor.detach().clone()) for place, tensor in floating(output)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def run_reference(initial: nn.Module, iteration: Iteration) -> dict[str, list[Call]]:
    """The calls of the model as it was at the start, on an iteration's input and with its RNG state."""
    model = copy.deepcopy(initial)
    recorder = Recorder(model)
    before = torch.get_rng_state()
    torch.set_rng_state(iteration.rng)
    model(iteration.x)
    torch.set_rng_state(before)
    return recorder.calls


def statistics(parts: list[Tensor], units: bool) -> Values:
    """The built-in statistics of what came in parts of one kind; without those that are not defined."""
    parts = [wide(part) for part in parts if part.numel()]
    if not parts:
        return {}
    flat = torch.cat([part.reshape(-1) for part in parts])
    result = {"nonfinite_count": float((~flat.isfinite()).sum())}
    if result["nonfinite_count"]:
        return result
    vectors = torch.cat([part.reshape(-1, part.shape[-1] if part.ndim else 1).norm(dim=1) for part in parts])
    result |= {"mean": float(flat.mean()), "l2_norm": float(vectors.mean()), "max_abs": float(flat.abs().max())}
    if result["max_abs"]:
        result["max_over_rms"] = result["max_abs"] / float(flat.square().mean().sqrt())
    if len(flat) > 1:
        result["std"] = float(flat.std())
    if units and parts[0].ndim > 1:
        place = 1 if parts[0].ndim >= 4 else -1
        alive: dict[int, list[Tensor]] = {}  # calls with other numbers of units are of other units
        for part in parts:
            alive.setdefault(part.shape[place], []).append(part.movedim(place, 0).flatten(1).abs().amax(1) > 0)
        result["dead_fraction"] = 1 - float(
            torch.cat([torch.stack(item).any(0) for item in alive.values()]).double().mean()
        )
    return result


def activations(initial: nn.Module, iteration: Iteration) -> Values:
    """Compute all metrics of ActivationHandler but attention; ``initial`` is the model as it was created."""
    expected, names = run_reference(initial, iteration), dict(initial.named_modules())
    module_tags = dict(zip(names, tags(name or "_root_" for name in names), strict=True))
    values: Values = {}
    for name, calls in iteration.calls.items():
        tag, others = module_tags[name], expected.get(name, [])
        values |= _of_outputs(f"activation/{tag}", calls)
        pairs = [_difference(*pair) for pair in zip(calls, others, strict=False)]
        if len(calls) == len(others) and all(pair is not None for pair in pairs):
            result = _of_outputs(f"activation_difference/{tag}", [pair for pair in pairs if pair is not None])
            values |= {key: value for key, value in result.items() if not key.endswith("/dead_fraction")}
    start = copies(initial)
    for name, tag in zip(start, tags(start), strict=True):
        weight, gradient = iteration.weights[name], iteration.gradients.get(name)
        families = {"gradient": gradient, "parameter": weight, "parameter_difference": wide(weight) - wide(start[name])}
        for family, tensor in families.items():
            if tensor is not None and not tensor.is_complex():
                result = statistics([dense(tensor)], False)
                values |= {f"{family}/{tag}/{key}": value for key, value in result.items()}
    return values


def _of_outputs(start: str, calls: list[Call]) -> Values:
    parts: dict[str, list[Tensor]] = {}
    for outputs in calls:
        places = [place for place, _ in outputs] if [place for place, _ in outputs] == [""] else None
        for place, (_, tensor) in zip(places or tags(place for place, _ in outputs), outputs, strict=True):
            parts.setdefault(f"{start}/{place}".rstrip("/"), []).append(tensor)
    return {f"{key}/{kind}": x for key, tensors in parts.items() for kind, x in statistics(tensors, True).items()}


def _difference(actual: Call, expected: Call) -> Call | None:
    if [tensor.shape for _, tensor in actual] != [tensor.shape for _, tensor in expected]:
        return None
    return [(place, wide(one) - wide(other)) for (place, one), (_, other) in zip(actual, expected, strict=True)]

"""Expected metrics of one train step in float64, from whole copies of weights, gradients and outputs.

The formulas are those of the documentation; the package is not imported. :class:`UpdateTruth` computes the metrics
of WeightUpdateHandler from the events of a train step, and functions compute the metrics of other monitors.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Values = dict[str, float]


def wide(values: Tensor) -> Tensor:
    return values.detach().to(torch.complex128 if values.is_complex() else torch.float64)


def dense(values: Tensor) -> Tensor:
    values = values.full_tensor() if hasattr(values, "full_tensor") else values
    return values if values.layout == torch.strided else values.to_dense()


def norm(tensors: Tensor | Iterable[Tensor | None], norm_type: float = 2.0) -> float:
    """Return the norm over all elements of tensors."""
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    values = [wide(dense(item)).abs().flatten() for item in tensors if item is not None]
    if norm_type == math.inf:
        return float(torch.cat(values).max())
    return math.fsum(float((item**norm_type).sum()) for item in values) ** (1 / norm_type)


def spectral_norm(weight: Tensor) -> float:
    """Return the largest singular value of a weight as a matrix."""
    return float(torch.linalg.matrix_norm(wide(weight).flatten(1), 2))


def update_ratio(before: Tensor, after: Tensor, eps: float = 1e-12) -> float:
    return norm(wide(after) - wide(before)) / (norm(before) + eps)


def lost_update_fraction(steps: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> float | None:
    """Return the fraction of 16-bit elements with a gradient that a step (before, after, gradient) did not move."""
    had = same = 0
    for before, after, gradient in steps:
        if gradient is not None and before.dtype in (torch.bfloat16, torch.float16):
            had += int((gradient != 0).sum())
            same += int(((before == after) & (gradient != 0)).sum())
    return same / had if had else None


def tags(names: Iterable[str]) -> list[str]:
    """Return names as in keys: other characters than ``A-Za-z0-9_./-`` replaced, repeated names numbered."""
    result: list[str] = []
    for name in names:
        tag, number = re.sub(r"[^A-Za-z0-9_./-]", "_", name), 1
        while tag + f"_{number}" * (number > 1) in result:
            number += 1
        result.append(tag + f"_{number}" * (number > 1))
    return result


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
            "stepped", the train step has "returned", and a "moment" at which monitors are asked.
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


class UpdateTruth:
    """Expected metrics of WeightUpdateHandler.

    Args:
        own: names of the parameters that count.
        held_by: names of an optimizer's parameters that have requires_grad.
    """

    def __init__(self, own: Iterable[str], held_by: Callable[[int], Iterable[str]]) -> None:
        self.own, self.held_by = set(own), held_by
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
                self._left |= {name: event.norms[name] for name in reached}
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

    def _values(self, event: Event) -> Values:
        norms = self._left | self._used
        values: Values = {}
        if norms or self._has_backward:
            values["vanishing_count"] = float(sum(item < 1e-7 for item in norms.values()))
            values["exploding_count"] = float(sum(item > 1e2 for item in norms.values()))
        if norms:
            values |= order_statistics("grad", norms.values())
        if self._moved:
            pairs = {name: (self._start[name], event.weights[name]) for name in self._moved}
            ratios = {name: update_ratio(*pair) for name, pair in pairs.items()}
            for name, ratio in ratios.items():
                self._still[name] = self._still.get(name, 0) + 1 if ratio == 0.0 else 0
            values |= order_statistics("update_ratio", ratios.values())
            values["frozen_count"] = float(sum(self._still[name] >= 3 for name in ratios))
            lost = lost_update_fraction((*pairs[name], gradient) for name, gradient in self._moved.items())
            values |= {} if lost is None else {"lost_update_fraction": lost}
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
    then, now = before, after
    computed = {name for name in now if ".parametrizations." in f".{name}"}
    matrices = {name: item for name, item in now.items() if item.ndim > 1 and item.numel() and name not in computed}
    names = [name for name, item in matrices.items() if item.dtype in floats]
    norms = {name: spectral_norm(now[name]) for name in names}
    tables = {
        name
        for name, item in model.named_parameters()
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is item
    }
    pairs = zip(names, tags(names), strict=True)
    values = {f"norm/{tag}": norms[name] for name, tag in pairs}
    every = torch.tensor([*norms.values()], dtype=torch.float64)
    values |= {"norm_max": every.max(), "norm_mean": every.mean()}
    ranks = [(norm([now[name]]) / item) ** 2 for name, item in norms.items() if item]
    if ranks:
        summary = order_statistics("stable_rank", ranks)
        values |= {key: summary[key] for key in ("stable_rank_min", "stable_rank_median")}
    shapes = {name: now[name].flatten(1).shape for name in names if name not in tables}
    scales = {name: math.sqrt(rows / columns) for name, (rows, columns) in shapes.items()}
    conditions = {"weight_spectral_scale": [norms[name] / item for name, item in scales.items()]}
    own = [name for name in names if name in held]
    if has_step and own:
        sizes = {name: spectral_norm(wide(now[name]) - wide(then[name])) for name in own}
        values["update_norm_max"] = max(sizes.values())
        conditions["update_spectral_scale"] = [item / scales[name] for name, item in sizes.items() if name in scales]
    for key, item in conditions.items():
        if item:
            summary = order_statistics(key, item)
            values |= {f"{key}_max": summary[f"{key}_max"], f"{key}_median": summary[f"{key}_median"]}
    return {f"spectral/{name}": float(value) for name, value in values.items()}


def optimizer_state(
    optimizer: torch.optim.Optimizer, before: dict[Tensor, Tensor], gradients: dict[Tensor, Tensor]
) -> Values:
    """Compute the metrics of OptimizerStateHandler of the parameters that had a gradient in the last step."""
    series: dict[str, list[float]] = {"rms": [], "epsilon_dominated": [], "momentum_cosine": []}
    for group in optimizer.param_groups:
        for p in gradients.keys() & set(group["params"]):
            g, state = gradients[p].double() * (-1 if group.get("maximize") else 1), optimizer.state[p]
            is_apart = type(optimizer).__name__ in ("AdamW", "Muon") or group.get("decoupled_weight_decay")
            if not is_apart and group.get("weight_decay"):  # torch adds it to gradients
                g = g + float(group["weight_decay"]) * before[p].double()
            v = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
            if v is not None:
                eps, steps = float(group["eps"]), float(state.get("step", group.get("step")))
                root = (v.double() / (1 - float(group["betas"][1]) ** steps)).sqrt()
                ratio = torch.where(g == 0, 0.0, g / root.clamp(min=eps))
                series["rms"].append(float(ratio.square().mean().sqrt()))
                series["epsilon_dominated"].append(float((root < eps).double().mean()))
            m = state.get("exp_avg", state.get("momentum_buffer"))
            if m is not None:
                cosine = F.cosine_similarity(g.flatten(), m.double().flatten(), dim=0, eps=0.0)
                series["momentum_cosine"].append(float(cosine))
    values = {"update_norm": norm([wide(p) - wide(before[p]) for p in gradients])}
    published = {"rms": ("median", "p95", "max"), "epsilon_dominated": ("median", "max")}
    for name, ends in (published | {"momentum_cosine": ("median", "min")}).items():
        finite = [item for item in series[name] if math.isfinite(item)]
        if finite:
            summary = order_statistics(name, finite)
            values |= {f"{name}_{end}": summary[f"{name}_{end}"] for end in ends}
    return {f"optimizer/{name}": value for name, value in values.items()}


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


def statistics(parts: list[Tensor], unit: int | None) -> Values:
    """The built-in statistics of what came in parts of one kind, with units along a dimension, where defined."""
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
    if unit is not None:
        alive: dict[int, list[Tensor]] = {}  # calls with other numbers of units are of other units
        for part in parts:
            alive.setdefault(part.shape[unit], []).append(part.movedim(unit, 0).flatten(1).abs().amax(1) > 0)
        result["dead_fraction"] = 1 - float(
            torch.cat([torch.stack(item).any(0) for item in alive.values()]).double().mean()
        )
    return result


def activations(model: nn.Module, iteration: Iteration, held: Collection[str]) -> Values:
    """Compute all metrics of ActivationHandler but attention, for an optimizer that holds the named parameters."""
    names = dict(model.named_modules())
    module_tags = dict(zip(names, tags(name or "_root_" for name in names), strict=True))
    values: Values = {}
    for name, calls in iteration.calls.items():
        values |= _of_outputs(f"activation/{module_tags[name]}", calls, _unit_dimension(names[name]))
    for name, tag in zip(iteration.weights, tags(iteration.weights), strict=True):
        gradient = iteration.gradients.get(name) if name in held else None
        for family, tensor in (("gradient", gradient), ("parameter", iteration.weights[name])):
            if tensor is not None and not tensor.is_complex():
                result = statistics([dense(tensor)], None)
                values |= {f"{family}/{tag}/{key}": value for key, value in result.items()}
    return values


def _unit_dimension(module: nn.Module) -> int | None:
    """The dimension of the units in a layer's output; None for other modules."""
    is_layer = isinstance(module, (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase))
    is_layer |= isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1
    return _feature_dimension(module) if is_layer else None


def _of_outputs(start: str, calls: list[Call], unit: int | None = None) -> Values:
    parts: dict[str, list[Tensor]] = {}
    for outputs in calls:
        places = [place for place, _ in outputs] if [place for place, _ in outputs] == [""] else None
        for place, (_, tensor) in zip(places or tags(place for place, _ in outputs), outputs, strict=True):
            parts.setdefault(f"{start}/{place}".rstrip("/"), []).append(tensor)
    return {f"{key}/{kind}": x for key, tensors in parts.items() for kind, x in statistics(tensors, unit).items()}


# Refined coordinate check

_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.conv._ConvNd)
_BATCH_AND_INSTANCE_NORMS = nn.modules.batchnorm._NormBase


def _is_measured_layer(module: nn.Module) -> bool:
    """Return True for layers of torch, and Conv1D of transformers, whose weight is a parameter."""
    is_layer = isinstance(module, (*_LAYERS, _BATCH_AND_INSTANCE_NORMS)) or type(module).__name__ == "Conv1D"
    packages = ("torch.nn.modules.", "transformers.pytorch_utils")
    has_weight = isinstance(dict(module.named_parameters(recurse=False)).get("weight"), nn.Parameter)
    return is_layer and has_weight and type(module).forward.__module__.startswith(packages)


@torch.no_grad()
def rcc(model: nn.Module, reference: nn.Module, batches: Sequence[Any]) -> Values:
    """Compute the metrics of RCCHandler from evaluations of whole layers."""
    model, reference = copy.deepcopy(model).double(), copy.deepcopy(reference).double()
    actual, expected = _arguments(model, batches), _arguments(reference, batches)
    others = dict(reference.named_modules())
    lengths: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        if name not in actual or not _is_measured_layer(module):
            continue
        for now, then in zip(actual[name], expected[name], strict=True):
            y_t, crossed, y_0 = _output(module, now), _output(others[name], now), _output(others[name], then)
            x_t, x_0 = _first(now), _first(then)
            vectors = {"weight_update": y_t - crossed}
            if x_t is not None:
                vectors |= {"input_drift": crossed - y_0, "output_change": y_t - y_0}
                vectors |= {"input": x_t, "input_change": x_t - x_0}
            for key, item in vectors.items():
                rows = item.movedim(_feature_dimension(module), -1).norm(dim=-1).flatten()
                lengths.setdefault(f"{key}/{name or '_root_'}", []).extend(rows.tolist())
    values = {key: math.fsum(item) / len(item) for key, item in lengths.items()}
    for key in [key for key in values if key.startswith("input_drift/")]:
        update = values[key.replace("input_drift", "weight_update")]
        share = update / (update + values[key]) if update else 0.0
        values[key.replace("input_drift", "weight_share")] = share
    for kind in ("weight_update", "input_drift"):
        layers = [value for key, value in values.items() if key.startswith(f"{kind}/")]
        if layers:
            summary = order_statistics(kind, layers)
            values |= {f"{kind}_{end}": summary[f"{kind}_{end}"] for end in ("max", "median")}
    return {f"rcc/{key}": value for key, value in values.items()}


def _arguments(model: nn.Module, batches: Sequence[Any]) -> dict[str, list[Any]]:
    """The arguments of every module's calls."""
    calls: dict[str, list[Any]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: calls.setdefault(name, []).append(copy.deepcopy((args, kwargs))),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
    ]
    for batch in batches:
        if isinstance(batch, dict):
            model(**batch)
        else:
            model(batch.double() if batch.is_floating_point() else batch)
    for handle in handles:
        handle.remove()
    return calls


def _first(value: Any) -> Tensor | None:
    return next((tensor for _, tensor in floating(value)), None)


def _output(module: nn.Module, arguments: Any) -> Tensor:
    args, kwargs = arguments
    output = _first(copy.deepcopy(module)(*args, **kwargs))
    assert output is not None
    return output


def _feature_dimension(module: nn.Module) -> int:
    if isinstance(module, nn.modules.conv._ConvNd):
        return -1 - len(module.kernel_size)
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return -1 - int(type(module).__name__[-2])
    return 1 if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.PReLU)) else -1

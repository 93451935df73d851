"""What every handler should say of a training, in float64, from what is recorded of it without monitors."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.names import tags
from tests.stress._steps import order_statistics

Values = dict[str, float]


@dataclasses.dataclass
class Call:
    """One call of a module: the first floating-point tensor that went in, and all that came out, with their places."""

    x: Tensor | None
    inputs: list[Tensor]
    outputs: list[tuple[str, Tensor]]
    changed: bool = False  # whether it has changed its input in place


@dataclasses.dataclass
class Iteration:
    """What is recorded of one iteration of a training."""

    rng: Tensor
    x: Tensor
    weights: dict[str, Tensor]
    calls: dict[str, list[Call]] = dataclasses.field(default_factory=dict)
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    after: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def floating(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
        return
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    for key, member in members:
        yield from floating(member, f"{path}/{key}".lstrip("/"))


class Recorder:
    """Records the calls of a model's modules, with copies of all tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, list[Call]] = {}
        self._open: dict[str, list[tuple[Call, Tensor | None, int]]] = {}
        self._handles = []
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda _, args, name=name: self._enter(name, args)),
                module.register_forward_hook(lambda _, args, output, name=name: self._leave(name, output)),
            ]

    def _enter(self, name: str, args: Any) -> None:
        x = next((tensor for _, tensor in floating(args)), None)
        kept = None if x is None else x.detach().clone()
        call = Call(kept, [item.detach().clone() for item in args], [])
        self.calls.setdefault(name, []).append(call)
        self._open.setdefault(name, []).append((call, x, 0 if x is None else x._version))

    def _leave(self, name: str, output: Any) -> None:
        call, x, version = self._open[name].pop()
        call.outputs = [(place, tensor.detach().clone()) for place, tensor in floating(output)]
        call.changed = x is not None and x._version != version

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: item.detach().clone() for name, item in model.named_parameters()}


def run_reference(initial: nn.Module, iteration: Iteration) -> dict[str, list[Call]]:
    """The calls of the model as it was at the start, on an iteration's input and with its random numbers."""
    model = copy.deepcopy(initial)
    recorder = Recorder(model)
    before = torch.get_rng_state()
    torch.set_rng_state(iteration.rng)
    model(iteration.x)
    torch.set_rng_state(before)
    return recorder.calls


def wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(math.fsum(float(wide(item).abs().square().sum()) for item in tensors))


def dense(values: Tensor) -> Tensor:
    return values if values.layout == torch.strided else values.to_dense()


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


class Truth:
    """The truth of one iteration, by handler.

    Args:
        initial: the model as it was when the handlers were made.
        iteration: the iteration.
        held: names of the optimizer's parameters.
    """

    def __init__(self, initial: nn.Module, iteration: Iteration, held: set[str]) -> None:
        self.initial, self.iteration, self.held = initial, iteration, held
        self.modules = dict(initial.named_modules())
        self.tags = dict(zip(self.modules, tags(name or "_root_" for name in self.modules), strict=True))
        self.weights_0 = copies(initial)
        self.parameter_tags = dict(zip(self.weights_0, tags(self.weights_0), strict=True))
        self.theirs: dict[str, list[Call]] = {}

    def _needs_reference(self) -> None:
        if not self.theirs:
            self.theirs = run_reference(self.initial, self.iteration)

    def update(self, still: dict[str, int]) -> Values:
        """Of WeightUpdateHandler; ``still`` is how long each parameter has not moved, and goes on."""
        of, before, after = self.iteration.gradients, self.iteration.weights, self.iteration.after
        own = [name for name in before if name in self.held and before[name].numel()]
        norms = [norm([dense(of[name])]) for name in own if name in of]
        values: Values = {}
        if norms:
            values |= order_statistics("grad", norms)
            values["vanishing_count"] = float(sum(item < 1e-7 for item in norms))
            values["exploding_count"] = float(sum(item > 1e2 for item in norms))
            ratios = {
                name: norm([wide(after[name]) - wide(before[name])]) / (norm([before[name]]) + 1e-12) for name in own
            }
            for name, ratio in ratios.items():
                still[name] = still.get(name, 0) + 1 if ratio <= 1e-12 else 0
            values |= order_statistics("update_ratio", [*ratios.values()])
            values["frozen_count"] = float(sum(still[name] >= 3 for name in ratios))
            narrow = [name for name in own if name in of and before[name].dtype in (torch.bfloat16, torch.float16)]
            had = sum(int((dense(of[name]) != 0).sum()) for name in narrow)
            if had:
                same = [((before[name] == after[name]) & (dense(of[name]) != 0)).sum() for name in narrow]
                values["lost_update_fraction"] = int(sum(same)) / had
        return {f"monitor/{name}": value for name, value in values.items()}

    def activations(self) -> Values:
        """Of ActivationHandler with everything."""
        self._needs_reference()
        values: Values = {}
        for name, calls in self.iteration.calls.items():
            values |= self._of_outputs("activation", name, [call.outputs for call in calls])
            expected = self.theirs.get(name, [])
            pairs = [self._difference(*pair) for pair in zip(calls, expected, strict=False)]
            if len(calls) == len(expected) and all(pair is not None for pair in pairs):
                result = self._of_outputs("activation_difference", name, [pair for pair in pairs if pair is not None])
                values |= {key: value for key, value in result.items() if not key.endswith("/dead_fraction")}
            module = self.modules[name]
            if hasattr(module, "scale") and getattr(getattr(module, "function", None), "__name__", "") == "attention":
                values |= self._of_attention(name, calls, self.iteration.weights)
        for name, tag in self.parameter_tags.items():
            weight, gradient = self.iteration.weights[name], self.iteration.gradients.get(name)
            if not weight.is_complex():
                values |= {f"parameter/{tag}/{key}": value for key, value in statistics([weight], False).items()}
                change = wide(weight) - wide(self.weights_0[name])
                values |= {f"parameter_difference/{tag}/{key}": x for key, x in statistics([change], False).items()}
            if gradient is not None and not gradient.is_complex():
                result = statistics([dense(gradient)], False)
                values |= {f"gradient/{tag}/{key}": value for key, value in result.items()}
        return values

    def _of_outputs(self, family: str, name: str, calls: list[list[tuple[str, Tensor]]]) -> Values:
        parts: dict[str, list[Tensor]] = {}
        for outputs in calls:
            places = [place for place, _ in outputs] if [place for place, _ in outputs] == [""] else None
            for place, (_, tensor) in zip(places or tags(place for place, _ in outputs), outputs, strict=True):
                parts.setdefault(f"{self.tags[name]}/{place}".rstrip("/"), []).append(tensor)
        return {
            f"{family}/{key}/{metric}": value
            for key, tensors in parts.items()
            for metric, value in statistics(tensors, True).items()
        }

    @staticmethod
    def _difference(actual: Call, expected: Call) -> list[tuple[str, Tensor]] | None:
        if [tensor.shape for _, tensor in actual.outputs] != [tensor.shape for _, tensor in expected.outputs]:
            return None
        return [
            (place, wide(tensor) - wide(other))
            for (place, tensor), (_, other) in zip(actual.outputs, expected.outputs, strict=True)
        ]

    def _of_attention(self, name: str, calls: list[Call], weights: dict[str, Tensor]) -> Values:
        scale = wide(weights[f"{name}.scale"])
        entropies, largest, parts = [], [], {"query": [], "key": [], "value": []}
        for call in calls:
            # In float32, in which the model multiplies.
            keys = call.x * weights[f"{name}.scale"]
            logits = wide(call.x) @ wide(keys).T / math.sqrt(scale.numel())
            entropies.append(torch.distributions.Categorical(logits=logits).entropy())
            largest.append(logits.max())
            for kind, tensor in (("query", call.x), ("key", keys), ("value", call.x)):
                parts[kind].append(tensor.unsqueeze(0))
        tag = self.tags[name]
        values = {f"attention_entropy/{tag}/head_0": float(torch.cat(entropies).mean())}
        values[f"attention_logit_max/{tag}/head_0"] = float(torch.stack(largest).max())
        for kind, tensors in parts.items():
            result = statistics(tensors, True)
            values |= {f"activation/{tag}/head_0/{kind}/{metric}": value for metric, value in result.items()}
        return values

    def _paired(self) -> dict[str, list[tuple[Call, Call]]]:
        self._needs_reference()
        actual = self.iteration.calls
        return {
            name: list(zip(actual[name], self.theirs[name], strict=True))
            for name in actual
            if len(actual[name]) == len(self.theirs.get(name, []))
        }

    def rcc(self) -> Values:
        """Of RCCHandler."""
        norms: dict[str, list[Tensor]] = {}
        for name, pairs in self._paired().items():
            module = self.modules[name]
            own = any(item is not None for item in module._parameters.values()) or hasattr(module, "parametrizations")
            if not own or ".parametrizations." in f".{name}.":
                continue
            result: dict[str, list[Tensor]] = {}
            for now, then in pairs:
                parts = self._changes(name, module, now, then)
                if parts is None:
                    result.clear()
                    break
                for key, change in parts.items():
                    dim = 1 if isinstance(module, nn.BatchNorm1d) else -1
                    change = change.reshape(1) if not change.ndim else change
                    result.setdefault(key, []).append(change.movedim(dim, -1).norm(dim=-1).reshape(-1))
            norms |= result
        means = {key: float(torch.cat(item).mean()) for key, item in norms.items() if sum(map(len, item))}
        for key in [key for key in means if key.startswith("input_drift/")]:
            layer = key.partition("/")[2]
            update, drift = means[f"weight_update/{layer}"], means[key]
            means[f"weight_share/{layer}"] = update / (update + drift) if update + drift else 0.0
        for kind in ("weight_update", "input_drift"):
            plain = {key for key in means if key.startswith(f"{kind}/")}
            if plain:
                summary = order_statistics(kind, [means[key] for key in plain])
                means |= {f"{kind}_max": summary[f"{kind}_max"], f"{kind}_median": summary[f"{kind}_median"]}
        return {f"rcc/{key}": value for key, value in means.items()}

    def _changes(self, name: str, module: nn.Module, now: Call, then: Call) -> dict[str, Tensor] | None:
        """The vectors whose norms are published of one call; None if it can't be compared."""
        tag, weights = self.tags[name], self.iteration.weights

        def pair(last: str) -> tuple[Tensor, Tensor]:
            key = next(key for key, item in self._parameters() if item is getattr(module, last))
            return wide(weights[key]), wide(self.weights_0[key])

        if isinstance(module, nn.Embedding):
            table, table_0 = pair("weight")
            return {f"weight_update/{tag}": (table - table_0)[now.inputs[0]]}
        if now.x is None or then.x is None or now.x.shape != then.x.shape:
            linear_like = isinstance(module, (nn.Linear, nn.LayerNorm)) and not hasattr(module, "parametrizations")
            if linear_like or now.x is not None or then.x is not None:
                return None
        result: dict[str, Tensor] = {}
        if now.x is not None and then.x is not None:
            x, x_0 = wide(now.x), wide(then.x)
            result = {f"input/{tag}": x, f"input_change/{tag}": x - x_0}
        is_plain = type(module) in (nn.Linear, nn.LayerNorm)
        if is_plain:
            weight, weight_0 = pair("weight")
            z, z_0 = x, x_0
            if type(module) is nn.LayerNorm:
                z, z_0 = (nn.functional.layer_norm(item, module.normalized_shape, eps=module.eps) for item in (x, x_0))
                update, drift = z * (weight - weight_0), (z - z_0) * weight_0
            else:
                update, drift = z @ (weight - weight_0).T, (z - z_0) @ weight_0.T
            bias = sum(pair("bias")[i] * (1, -1)[i] for i in (0, 1)) if module.bias is not None else 0.0
            update = update + bias
        else:
            if now.changed or then.changed or not now.outputs or not then.outputs:
                return None
            output, output_0 = now.outputs[0][1], then.outputs[0][1]
            crossed = output_0
            if name:
                other = dict(copy.deepcopy(self.initial).named_modules())[name]
                with torch.no_grad():
                    crossed = next(floating(other(*copy.deepcopy(now.inputs))))[1]
            if output.shape != output_0.shape:
                return None
            update, drift = wide(output) - wide(crossed), wide(crossed) - wide(output_0)
        result |= {f"weight_update/{tag}": update}
        if now.x is not None:
            result |= {f"input_drift/{tag}": drift, f"output_change/{tag}": update + drift}
        return result

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.initial.named_parameters())

    def spectral(self) -> Values:
        """Of SpectralNormHandler with updates and per_parameter."""
        floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        of = self.iteration.gradients
        before, after = self._acting(self.iteration.weights), self._acting(self.iteration.after)
        names = [name for name, item in after.items() if item.ndim > 1 and item.numel() and item.dtype in floats]
        order = tags(names)
        norms = {name: float(torch.linalg.matrix_norm(wide(after[name]).flatten(1), 2)) for name in names}
        tables = {
            key for key, item in self._parameters() for module in self.modules.values()
            if isinstance(module, nn.Embedding) and module.weight is item
        }  # fmt: skip
        kinds = ["embedding" if name in tables else "norm" for name in names]
        values = {f"{kind}/{tag}": norms[name] for kind, name, tag in zip(kinds, names, order, strict=True)}
        every = torch.tensor([*norms.values()], dtype=torch.float64)
        values |= {"norm_max": every.max(), "norm_mean": every.mean(), "norm_std": every.std(correction=0)}
        ranks = [(norm([after[name]]) / item) ** 2 for name, item in norms.items() if item]
        if ranks:
            summary = order_statistics("stable_rank", ranks)
            values |= {key: summary[key] for key in ("stable_rank_min", "stable_rank_median")}
        scales = {}
        for name in names:
            rows, columns = after[name].flatten(1).shape
            if name not in tables:
                scales[name] = math.sqrt(rows / columns)
        conditions = {"weight_condition": [norms[name] / item for name, item in scales.items()]}
        own = [name for name in names if any(item in self.held for item in self._made_of(name))]
        if any(item in of for name in own for item in self._made_of(name)):
            moves = {
                name: float(torch.linalg.matrix_norm((wide(after[name]) - wide(before[name])).flatten(1), 2))
                for name in own
            }
            values["update_norm_max"] = max(moves.values())
            conditions["update_condition"] = [item / scales[name] for name, item in moves.items() if name in scales]
        for key, item in conditions.items():
            if not item:
                continue
            summary = order_statistics(key, item)
            values |= {f"{key}_max": summary[f"{key}_max"], f"{key}_median": summary[f"{key}_median"]}
        return {f"spectral/{name}": float(value) for name, value in values.items()}

    def _made_of(self, name: str) -> list[str]:
        """The parameters that a weight is made of."""
        module, _, last = name.rpartition(".")
        parts = [f"{module}.parametrizations.{last}.original{i}".lstrip(".") for i in (0, 1)]
        return parts if parts[0] in self.iteration.weights else [name]

    def _acting(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights as modules use them: of weight normalisation the rows of the second part, as long as the first."""
        acting = {}
        for name, weight in weights.items():
            if name.endswith("original0"):
                rows = wide(weights[name[:-1] + "1"])
                normed = wide(weight) * rows / rows.flatten(1).norm(dim=1).view(-1, *[1] * (rows.ndim - 1))
                # It stands where the module's weight does, before what is made of its own parameters.
                acting[name.replace(".parametrizations.weight.original0", ".weight")] = normed
            elif not name.endswith("original1"):
                acting[name] = weight
        return acting

    def alignment(self) -> Values:
        """Of AlignmentHandler."""
        rows: dict[str, list[float]] = {}
        for name, pairs in self._paired().items():
            module = self.modules[name]
            if type(module) is not nn.Linear or module.in_features < 2 or not module.weight.numel():
                continue
            if module.weight.is_complex():
                continue
            key = next(key for key, item in self._parameters() if item is module.weight)
            w_0 = wide(self.weights_0[key])
            change = wide(self.iteration.weights[key]) - w_0
            for now, then in pairs:
                z_0 = wide(then.x)
                moved = wide(now.x) - z_0
                for term, z, w in (("z0_dW", z_0, change), ("dZ_w0", moved, w_0), ("dZ_dW", moved, change)):
                    for row in z:
                        out, entering, size = ((item**2).mean().sqrt().item() for item in (w @ row, row, w))
                        if out and entering and size:
                            of_row = (math.log(out) - math.log(entering * size)) / math.log(module.in_features)
                            rows.setdefault(f"{term}/{self.tags[name]}", []).append(of_row)
        values = {key: math.fsum(item) / len(item) for key, item in rows.items()}
        for term in ("z0_dW", "dZ_w0", "dZ_dW"):
            item = [value for key, value in values.items() if key.startswith(f"{term}/")]
            if item:
                summary = {"mean": math.fsum(item) / len(item), "min": min(item), "max": max(item)}
                values |= {f"{term}_{kind}": value for kind, value in summary.items()}
        return {f"alignment/{key}": value for key, value in values.items()}

    def stats(self, rate: float) -> Values:
        """Of StepStatsHandler, without clocks and memory."""
        floats = [item for item in self.iteration.after.values() if item.is_floating_point() or item.is_complex()]
        return {"step/lr/group_0": rate, "step/parameter_norm": norm(floats)}

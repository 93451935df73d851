"""What every monitor should say of a training of a real model, in float64, from one that is recorded without them."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.model.names import tags
from tests.stress import _truth
from tests.stress._steps import order_statistics
from tests.stress._truth import Values, floating, statistics, wide

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def copied(value: Any) -> Any:
    """A structure of tensors with copies of them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def first(values: Any) -> Tensor | None:
    return next((tensor for _, tensor in floating(values)), None)


class Call:
    """One call of a module: what went in and came out, and the random state that it began with."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = copied(args), copied(kwargs)
        self.rng = torch.get_rng_state()
        self.entered = first((args, *kwargs.values()))
        self.version = 0 if self.entered is None else self.entered._version
        self.outputs: list[tuple[str, Tensor]] = []

    def leave(self, output: Any) -> None:
        self.outputs = [(place, tensor.detach().clone()) for place, tensor in floating(output)]
        self.changed = self.entered is not None and self.entered._version != self.version
        self.entered = None

    @property
    def x(self) -> Tensor | None:
        return first((self.args, *self.kwargs.values()))

    @property
    def y(self) -> Tensor | None:
        return self.outputs[0][1] if self.outputs else None


class Calls:
    """Records the calls of a model's modules, and what they compute attention from.

    Attributes:
        calls: name of a module -> its calls.
        attention: name of a module -> the queries, keys and values of each call of attention that it makes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, list[Call]] = {}
        self.attention: dict[str, list[tuple[Tensor, ...]]] = {}
        self._open: list[tuple[str, Call]] = []
        self._function = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._attend
        self._handles = [
            handle
            for name, module in model.named_modules()
            for handle in (
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: self._enter(name, args, kwargs), with_kwargs=True
                ),
                module.register_forward_hook(lambda _, args, output: self._open.pop()[1].leave(output)),
            )
        ]

    def _enter(self, name: str, args: Any, kwargs: Any) -> None:
        self._open.append((name, Call(args, kwargs)))
        self.calls.setdefault(name, []).append(self._open[-1][1])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.attention.setdefault(self._open[-1][0], []).append(copied((query, key, value)))
        return self._function(query, key, value, *args, **kwargs)

    def close(self) -> dict[str, list[Call]]:
        F.scaled_dot_product_attention = self._function
        for handle in self._handles:
            handle.remove()
        return self.calls


@dataclasses.dataclass
class Iteration(_truth.Iteration):
    """One iteration; ``x`` is what the model is called with, a batch for each backward.

    Attributes:
        accumulated: the gradients after each backward.
        attention: as in :class:`Calls`.
        loss: what the train step returns.
    """

    accumulated: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    attention: dict[str, list[tuple[Tensor, ...]]] = dataclasses.field(default_factory=dict)
    loss: float = math.nan


class Truth(_truth.Truth):
    """The truth of one iteration."""

    def _needs_reference(self) -> None:
        if self.theirs:
            return
        model = copy.deepcopy(self.initial)
        calls, before = Calls(model), torch.get_rng_state()
        torch.set_rng_state(self.iteration.rng)
        for batch in self.iteration.x:
            call(model, batch)  # with gradients, since some kernels round otherwise without
        torch.set_rng_state(before)
        self.theirs = calls.close()

    def _paired(self) -> dict[str, list[tuple[Any, Any]]]:
        """Of the modules that are called as often in the reference, and are given as much."""
        pairs = super()._paired()
        return {name: each for name, each in pairs.items() if all(_alike(*pair) for pair in each)}

    # ActivationHandler

    def attention_inputs(self) -> Values:
        """Statistics of what attention is computed from, by head."""
        found: Values = {}
        for name, calls in self.iteration.attention.items():
            for kind, tensors in zip(("query", "key", "value"), zip(*calls, strict=True), strict=True):
                for head in range(tensors[0].shape[-3]):
                    start = f"activation/{self.tags[name]}/head_{head}/{kind}"
                    values = statistics([each[..., head, :, :] for each in tensors], True)
                    found |= {f"{start}/{metric}": value for metric, value in values.items()}
        return found

    # RCCHandler

    def rcc(self) -> Values:
        found: dict[str, float] = {}
        for name, pairs in self._paired().items():
            module = self.modules[name]
            if not any(each is not None for each in module._parameters.values()):
                continue
            parts: dict[str, list[Tensor]] = {}
            dim = feature_dim(module)
            for now, then in pairs:
                for key, change in self._changes_of(name, module, now, then):
                    change = change.reshape(1) if not change.ndim else change
                    parts.setdefault(key, []).append(change.movedim(dim, -1).norm(dim=-1).flatten())
            found |= {key: float(torch.cat(each).mean()) for key, each in parts.items()}
        for key in [key for key in found if key.startswith("input_drift/")]:
            layer = key.partition("/")[2]
            update, drift = found[f"weight_update/{layer}"], found[key]
            found[f"weight_share/{layer}"] = update / (update + drift) if update + drift else 0.0
        return {f"rcc/{key}": value for key, value in found.items()}

    def _changes_of(self, name: str, module: nn.Module, now: Call, then: Call) -> Iterator[tuple[str, Tensor]]:
        tag, prefix = self.tags[name], f"{name}.".lstrip(".")

        def moved(last: str) -> tuple[Tensor, Tensor]:
            key = next(key for key, each in self.initial.named_parameters() if each is getattr(module, last))
            return wide(self.iteration.weights[key]), wide(self.weights_0[key])

        if type(module) is nn.Embedding:
            w, w_0 = moved("weight")
            rows = now.args[0] if now.args else now.kwargs["input"]
            yield f"weight_update/{tag}", (w - w_0)[rows]
            return
        x, x_0 = now.x, then.x
        if x is not None and x_0 is not None:
            x, x_0 = wide(x), wide(x_0)
            yield f"input/{tag}", x
            yield f"input_change/{tag}", x - x_0
        kind = type(module)
        is_linear = linear(module) is not None
        if is_linear or (kind in (nn.LayerNorm, nn.RMSNorm) and module.weight is not None):
            product = linear(module) if is_linear else torch.mul
            w, w_0 = moved("weight")
            z, z_0 = (x, x_0) if is_linear else (normalized(module, each) for each in (x, x_0))
            update, drift = product(z, w) - product(z, w_0), product(z, w_0) - product(z_0, w_0)
            if getattr(module, "bias", None) is not None or not is_linear:
                yield f"input/{tag}.weight", z
                yield f"input_change/{tag}.weight", z - z_0
                yield f"weight_update/{tag}.weight", update
                yield f"input_drift/{tag}.weight", drift
                yield f"output_change/{tag}.weight", update + drift
            if getattr(module, "bias", None) is not None:
                b, b_0 = moved("bias")
                update = update + (b - b_0).reshape(-1, *[1] * (-feature_dim(module) - 1))
        else:
            if now.y is None or then.y is None or now.changed or then.changed:
                return
            crossed = wide(then.y) if not name else self._crossed(prefix, module, now)
            update, drift = wide(now.y) - crossed, crossed - wide(then.y)
        yield f"weight_update/{tag}", update
        if x is not None:
            yield f"input_drift/{tag}", drift
            yield f"output_change/{tag}", update + drift

    def _crossed(self, prefix: str, module: nn.Module, now: Call) -> Tensor:
        """What the module gave at the start for today's input and random numbers."""
        with torch.no_grad():
            module, before = copy.deepcopy(module), torch.get_rng_state()
            torch.set_rng_state(now.rng)
            output = module(*copied(now.args), **copied(now.kwargs))
            torch.set_rng_state(before)
        return wide(first((output,)))

    # AlignmentHandler

    def alignment(self) -> Values:
        sums: dict[str, list[Tensor]] = {}
        for name, pairs in self._paired().items():
            module = self.modules[name]
            product = linear(module)
            key = next(
                (key for key, each in self.initial.named_parameters() if each is getattr(module, "weight", 0)), ""
            )
            if product is None or fan_in(module) <= 1 or not key:
                continue
            w_0 = wide(self.weights_0[key])
            change = wide(self.iteration.weights[key]) - w_0
            for now, then in pairs:
                features = now.x.shape[now.x.ndim + feature_dim(module) :]
                z_0, moved = (each.reshape(-1, *features) for each in (wide(then.x), wide(now.x) - wide(then.x)))
                for term, z, w in (("z0_dW", z_0, change), ("dZ_w0", moved, w_0), ("dZ_dW", moved, change)):
                    entering, out = (each.flatten(1).square().mean(1).sqrt() for each in (z, product(z, w)))
                    size = w.square().mean().sqrt()
                    defined = (out > 0) & (entering > 0) & (size > 0)
                    exponents = (out.log() - (entering * size).log())[defined] / math.log(fan_in(module))
                    sums.setdefault(f"{term}/{self.tags[name]}", []).append(exponents)
        return {f"alignment/{key}": float(torch.cat(each).mean()) for key, each in sums.items() if len(torch.cat(each))}

    # SpectralNormHandler

    def spectral(self) -> Values:
        before, after = self.iteration.weights, self.iteration.after
        values: Values = {}
        norms, ranks, conditions, updates, update_conditions = [], [], [], [], []
        stepped = bool(self.iteration.gradients)
        parameters = dict(self.initial.named_parameters())
        owners: dict[int, nn.Module] = {}
        for module in self.modules.values():
            for each in module._parameters.values():
                owners.setdefault(id(each), module)  # shared ones count where they come first
        names = [name for name in parameters if matrices(name, parameters[name], owners[id(parameters[name])])]
        for name, tag in zip(names, tags(names), strict=True):
            owner = owners[id(parameters[name])]
            is_table, shape, last = matrices(name, parameters[name], owner)
            now = wide(after[name]).reshape(-1, *shape)
            step = now - wide(before[name]).reshape(-1, *shape)
            for i, (weight, change) in enumerate(zip(now, step, strict=True)):
                own = f"{tag}/{i}" if len(now) > 1 else tag
                sigma, moved = (float(torch.linalg.matrix_norm(each, 2)) for each in (weight, change))
                values[f"{'embedding' if is_table else 'norm'}/{own}"] = sigma
                norms.append(sigma)
                ranks += [float(weight.square().sum()) / sigma**2] if sigma else []
                scale = math.sqrt(shape[0] / shape[1]) if not last else math.sqrt(shape[1] / shape[0])
                conditions += [sigma / scale] if not is_table else []
                if name in self.held:
                    updates.append(moved)
                    update_conditions += [moved / scale] if not is_table else []
        every = torch.tensor(norms, dtype=torch.float64)
        values |= {"norm_max": every.max(), "norm_mean": every.mean(), "norm_std": every.std(correction=0)}
        summary = order_statistics("stable_rank", ranks)
        values |= {key: summary[key] for key in ("stable_rank_min", "stable_rank_median")}
        if stepped:
            values["update_norm_max"] = max(updates)
        for key, each in (("weight_condition", conditions), ("update_condition", update_conditions)):
            if each and (stepped or key == "weight_condition"):
                summary = order_statistics(key, each)
                values |= {f"{key}_max": summary[f"{key}_max"], f"{key}_median": summary[f"{key}_median"]}
        return {f"spectral/{name}": float(value) for name, value in values.items()}


def call(model: nn.Module, batch: dict[str, Any]) -> Any:
    """A model's output: what is named by numbers is given by position."""
    batch = copied(batch)
    return model(
        *(value for key, value in batch.items() if key.isdigit()),
        **{key: value for key, value in batch.items() if not key.isdigit()},
    )


def doubled(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: doubled(each) for key, each in batch.items()}
    return [doubled(each) for each in batch] if isinstance(batch, list) else batch


def _alike(now: Call, then: Call) -> bool:
    pairs = ((now.x, then.x), (now.y, then.y))
    return all((a is None) == (b is None) and (a is None or a.shape == b.shape) for a, b in pairs)


def feature_dim(module: nn.Module) -> int:
    if isinstance(module, nn.modules.conv._ConvNd):
        return -1 - len(module.kernel_size)
    over_channels = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.PReLU)
    return 1 if isinstance(module, over_channels) else -1


def linear(module: nn.Module) -> Any:
    """What a module computes of an input and a weight, bias apart; None of other modules."""
    if type(module).__name__ == "Conv1D":
        return torch.matmul
    kind = type(module)
    if getattr(module, "weight", None) is None or "weight" not in module._parameters:
        return None
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return F.linear
    for dims, each in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), start=1):
        if isinstance(module, each) and kind.forward is each.forward and kind._conv_forward is each._conv_forward:
            assert module.padding_mode == "zeros"
            function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
            more = (module.stride, module.padding, module.dilation, module.groups)
            return lambda x, w: function(x, w, None, *more)
    return None


def fan_in(module: nn.Module) -> int:
    return module.weight.shape[0] if type(module).__name__ == "Conv1D" else module.weight[0].numel()


def normalized(module: Any, x: Tensor) -> Tensor:
    dims = tuple(range(-len(module.normalized_shape), 0))
    if type(module) is nn.LayerNorm:
        x = x - x.mean(dims, keepdim=True)
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return x / (x.square().mean(dims, keepdim=True) + eps).sqrt()


def matrices(name: str, parameter: Tensor, owner: nn.Module) -> tuple[bool, tuple[int, ...], bool] | None:
    """Whether a parameter is a table, the shape of the matrices in it, and whether their rows are what goes in."""
    shape, last = tuple(parameter.shape), name.rpartition(".")[2]
    if parameter.ndim < 2 or last.endswith("bias"):
        return None
    if isinstance(owner, nn.Embedding):
        return True, shape, False
    if isinstance(owner, LINEAR) and last == "weight":
        return False, (shape[0], math.prod(shape[1:])), False
    if type(owner).__name__ == "Conv1D":
        return False, shape, True
    if parameter.ndim > 2 and shape[0] == 1:
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        return (True, shape, False) if len(shape) == 2 else None
    is_table = parameter.ndim == 2 and any(word in last for word in ("embed", "token", "table", "position", "pos_"))
    return is_table, shape[-2:], False

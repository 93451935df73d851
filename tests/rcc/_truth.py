"""Refined coordinate check in float64 from whole evaluations of modules, and as published."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.names import named_modules
from tests._helpers import run_monitored

QUANTITIES = ("weight_update", "input_drift", "input", "input_change", "output_change")


def features(module: nn.Module) -> int:
    if isinstance(module, nn.modules.conv._ConvNd):
        return -1 - len(module.kernel_size)
    return 1 if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.PReLU)) else -1


def first(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return next((result for item in value if (result := first(item)) is not None), None)
    return None


def calls_of(model: nn.Module, batches: Sequence[Any]) -> dict[str, list[tuple[Any, Any]]]:
    """The arguments and outputs of every module's calls, by float64 copies."""
    calls: dict[str, list[tuple[Any, Any]]] = {}
    handles = [
        module.register_forward_hook(
            lambda _, args, kwargs, output, name=name: calls.setdefault(name, []).append(
                copy.deepcopy(((args, kwargs), output))
            ),
            with_kwargs=True,
        )
        for name, module in named_modules(model)
    ]
    for batch in batches:
        call(model, batch)
    for handle in handles:
        handle.remove()
    return calls


@torch.no_grad()
def truth(model: nn.Module, reference: nn.Module, batches: Sequence[Any]) -> dict[str, float]:
    """All values by name."""
    model, reference = copy.deepcopy(model).double(), copy.deepcopy(reference).double()
    batches = [
        batch.double() if isinstance(batch, Tensor) and batch.is_floating_point() else batch for batch in batches
    ]
    return truth_of_calls(model, reference, calls_of(model, batches), calls_of(reference, batches))


@torch.no_grad()
def truth_of_calls(
    model: nn.Module,
    reference: nn.Module,
    actual: dict[str, list[tuple[Any, Any]]],
    expected: dict[str, list[tuple[Any, Any]]],
) -> dict[str, float]:
    """The same, of float64 models and what :func:`calls_of` says of either."""
    norms: dict[str, list[float]] = {}

    def note(name: str, values: Tensor, dim: int) -> None:
        norms.setdefault(name, []).extend(values.movedim(dim, -1).norm(dim=-1).flatten().tolist())

    def note_change(end: str, f_t: Callable[..., Any], f_0: Callable[..., Any], now: Any, then: Any, dim: int) -> None:
        y_t, crossed, y_0 = (
            first(f_t(*now[0], **now[1])),
            first(f_0(*now[0], **now[1])),
            first(f_0(*then[0], **then[1])),
        )
        note(f"weight_update/{end}", y_t - crossed, dim)
        if first((now[0], now[1])) is not None:
            note(f"input_drift/{end}", crossed - y_0, dim)
            note(f"output_change/{end}", y_t - y_0, dim)

    modules, others = dict(named_modules(model)), dict(named_modules(reference))
    for name, module in modules.items():
        if not list(module.parameters(recurse=False)) or name not in actual:
            continue
        f_t, f_0, dim, tag = module, others[name], features(module), name or "_root_"
        for (now, _), (then, _) in zip(actual[name], expected[name], strict=True):
            note_change(tag, copy.deepcopy(f_t), copy.deepcopy(f_0), now, then, dim)
            x_t, x_0 = first((now[0], now[1])), first((then[0], then[1]))
            if x_t is None:
                continue
            note(f"input/{tag}", x_t, dim)
            note(f"input_change/{tag}", x_t - x_0, dim)
    result = {name: math.fsum(values) / len(values) for name, values in norms.items()}
    for name in [name for name in result if name.startswith("input_drift/")]:
        layer = name.removeprefix("input_drift/")
        update, drift = result[f"weight_update/{layer}"], result[name]
        result[f"weight_share/{layer}"] = update / (update + drift) if update + drift else 0.0
    for kind in ("weight_update", "input_drift"):
        of_layers = sorted(value for name, value in result.items() if name.startswith(f"{kind}/"))
        if of_layers:
            middle = of_layers[(len(of_layers) - 1) // 2], of_layers[len(of_layers) // 2]
            result |= {f"{kind}_max": of_layers[-1], f"{kind}_median": sum(middle) / 2}
    return {f"rcc/{name}": value for name, value in result.items()}


def perturb(model, size=0.1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(batch)


def measure(handler, batches, around=None):
    """Return the metrics of one iteration with a forward pass for each batch."""

    def train_step(engine, _):
        with around or torch.enable_grad():
            for batch in batches:
                call(handler.model, batch)

    (values,) = run_monitored(train_step, [0], handler)
    handler.detach()
    return values

"""Preconditioner of Adam and AdamW, and stability thresholds of optimizers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from ignite_monitor.curvature.hessian import flat_dtype
from ignite_monitor.model.devices import move, move_like


def makes_step_of(optimizer: Optimizer, *kinds: type[Optimizer]) -> bool:
    """Return True if an optimizer is of one of these classes, and a subclass does not override ``step``."""
    steps = [inspect.unwrap(kind.step) for kind in kinds]
    return isinstance(optimizer, kinds) and inspect.unwrap(type(optimizer).step) in steps


def adam_preconditioner(optimizer: Optimizer, parameters: Sequence[Tensor], gradient: Tensor) -> Tensor:
    r"""Preconditioner :math:`\sqrt{\hat v} + \epsilon` of the step of Adam or AdamW with a flat gradient.

    NaN if second moments are not of the parameters' shapes.
    """
    groups = {id(item): group for group in optimizer.param_groups for item in group["params"]}
    parts = []
    for parameter, part in zip(parameters, gradient.split([item.numel() for item in parameters]), strict=True):
        group = groups[id(parameter)]
        state = optimizer.state.get(parameter, {})
        known = state.get("exp_avg_sq", None if state else torch.zeros_like(parameter))
        if not isinstance(known, Tensor) or known.shape != parameter.shape:
            return torch.full_like(gradient, math.nan)
        if group.get("maximize"):
            part = -part
        if not group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)):
            part = part + group["weight_decay"] * parameter.detach().flatten()
        beta = group["betas"][1]
        step = move_like(torch.as_tensor(state.get("step", 0)), part) + 1
        second = beta * known.detach().flatten() + (1 - beta) * part**2
        most = state.get("max_exp_avg_sq")
        second = second if most is None else torch.maximum(second, most.detach().flatten())
        parts.append((second / (1 - beta**step)).sqrt() + group["eps"])
    return torch.cat(parts)


def stability_limit(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Tensor:
    r"""Curvature above which gradient descent diverges on a quadratic loss, for the group with the smallest threshold.

    :math:`2 / \eta` for gradient descent, :math:`(2 + 2\beta) / \eta` with momentum, :math:`(2 + 2\beta) / ((1 +
    2\beta)\,\eta)` with Nesterov's (arXiv:2103.00065, section 2), and :math:`(2 + 2\beta_1) / ((1 - \beta_1)\,\eta)`
    for Adam, where it is the preconditioned curvature that counts (arXiv:2207.14484, section 3); infinite if all
    learning rates are 0, NaN if a group maximizes.
    """
    ids, limits = set(map(id, parameters)), []
    for group in optimizer.param_groups:
        if not ids.intersection(map(id, group["params"])):
            continue
        if "betas" in group:
            momentum = group["betas"][0]
            damped = 1 - momentum
        else:
            momentum = group.get("momentum", 0.0)
            dampening = group.get("dampening", 0.0) if momentum else 0.0  # SGD without momentum ignores it
            damped = 1 + 2 * momentum if group.get("nesterov") else 1 - dampening
        is_known = not group.get("maximize") and group.get("lr") is not None
        rate = torch.as_tensor(group["lr"] if is_known else math.nan, dtype=flat_dtype(parameters)).detach().reshape(())
        limits.append(move((2 + 2 * momentum) / (damped * rate), parameters[0].device))
    return torch.stack(limits).min()

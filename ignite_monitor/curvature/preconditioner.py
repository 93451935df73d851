"""What an optimizer divides a gradient by, and up to which curvature its steps are stable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def adam_preconditioner(optimizer: Optimizer, parameters: Sequence[Tensor], gradient: Tensor) -> Tensor | None:
    r"""What Adam and its kin divide momentum by in their next step, :math:`\sqrt{\hat v} + \epsilon`, flat.

    Args:
        parameters: the parameters, in the order of the gradient's parts.
        gradient: the gradient of the next step, flat.

    Returns:
        None for an optimizer without betas, or whose second moments are not of the parameters' shapes.
    """
    groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    parts = []
    for parameter, part in zip(parameters, gradient.split([each.numel() for each in parameters]), strict=True):
        group = groups[id(parameter)]
        state = optimizer.state.get(parameter, {})
        known = state.get("exp_avg_sq", None if state else torch.zeros_like(parameter))
        betas = group.get("betas")
        if betas is None or "eps" not in group or not isinstance(known, Tensor) or known.shape != parameter.shape:
            return None
        step = torch.as_tensor(state.get("step", 0)).to(part.device, part.dtype, non_blocking=True) + 1
        second = betas[1] * known.detach().flatten() + (1 - betas[1]) * part**2
        most = state.get("max_exp_avg_sq")
        second = second if most is None else torch.maximum(second, most.detach().flatten())
        parts.append((second / (1 - betas[1] ** step)).sqrt() + group["eps"])
    return torch.cat(parts)


def stability_limit(optimizer: Optimizer, parameters: Sequence[Tensor]) -> float | Tensor | None:
    r"""The curvature above which steps on a quadratic loss grow, of the group with the largest learning rate.

    :math:`2 / \eta` for gradient descent, :math:`(2 + 2\beta) / \eta` with momentum, :math:`(2 + 2\beta) / ((1 +
    2\beta)\,\eta)` with Nesterov's (arXiv:2103.00065, section 2), and :math:`(2 + 2\beta_1) / ((1 - \beta_1)\,\eta)`
    for Adam, where it is the preconditioned curvature that counts (arXiv:2207.14484, section 3).

    Returns:
        None where no learning rate is greater than 0.
    """
    ids = set(map(id, parameters))
    limits: list[float | Tensor] = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if not ids.intersection(map(id, group["params"])) or rate is None:
            continue
        if not isinstance(rate, Tensor) and not rate > 0:
            continue
        betas = group.get("betas")
        momentum = group.get("momentum", 0.0)
        if betas is not None:
            factor = (2 + 2 * betas[0]) / (1 - betas[0])
        elif group.get("nesterov"):
            factor = (2 + 2 * momentum) / (1 + 2 * momentum)
        else:
            factor = (2 + 2 * momentum) / (1 - group.get("dampening", 0.0))
        limits.append(factor / (rate.detach() if isinstance(rate, Tensor) else rate))
    if not limits:
        return None
    if any(isinstance(each, Tensor) for each in limits):
        return torch.stack([torch.as_tensor(each) for each in limits]).min()
    return min(limits)

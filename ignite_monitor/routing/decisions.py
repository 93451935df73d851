"""Decisions of the routers in one iteration: sums that add up over calls and ranks, and the values computed of them."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.devices import move_like, wide_dtype
from ignite_monitor.model.forward import ModuleHook
from ignite_monitor.model.isolation import in_second_pass
from ignite_monitor.model.modes import has_local_data, hidden_from_user_modes, in_backward

VALUES = ("load_entropy", "max_share", "dead_share", "logit_max", "margin")
TEXTS = {  # by kind of report
    "no_logits": "nothing is reported of modules that do not return a plain tensor of logits over two or more experts",
    "no_choice": "only logit_max is reported, since top_k is not given or greater than the number of experts",
    "probabilities": "logit_max and margin are not reported of routers that return probabilities in place of logits",
}


def is_of_transformers(module: nn.Module) -> bool:
    """Return True for a router of transformers 5, which returns the chosen experts, also if it is wrapped."""
    return any(
        kind.__module__.startswith("transformers.") and re.search("Top[kK1]Router$", kind.__name__)
        for kind in type(module).__mro__
    )


class RouterDecisions(ModuleHook):
    """Sums up the decisions of routers, by name, in training mode, as a hook on them."""

    def __init__(self, root: nn.Module, routers: dict[nn.Module, str], top_k: int | None) -> None:
        self._root, self._routers, self._top_k = root, {id(module): name for module, name in routers.items()}, top_k
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}  # results of routing_sums() by name, over all calls
        self.skipped: dict[str, set[str]] = {"no_logits": set(), "no_choice": set()}  # names of routers by kind

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        name = self._routers.get(id(module))  # a shallow copy has the hooks of the module itself
        if name is None or in_backward() or in_second_pass() or not self._root.training:  # repeated or evaluated
            return
        try:
            self._add(name, module, output)
        except Exception as error:  # noqa: BLE001
            self.error = error

    def _add(self, name: str, module: nn.Module, output: Any) -> None:
        logits, choice, is_mask = _parts(output) if is_of_transformers(module) else (output, None, False)
        known = self.sums.get(name)
        if not _fits(logits, choice) or (known and len(known[0]) != logits.shape[-1] + 2):
            self.skipped["no_logits"].add(name)
        elif logits.numel():
            with hidden_from_user_modes():
                if choice is None and self._top_k is not None and self._top_k <= logits.shape[-1]:
                    choice = logits.topk(self._top_k).indices
                elif choice is None:
                    self.skipped["no_choice"].add(name)
                sums, largest = routing_sums(logits, choice, is_mask)
                if known:
                    sums, largest = known[0] + move_like(sums, known[0]), known[1].maximum(move_like(largest, known[1]))
                self.sums[name] = sums, largest


def _parts(output: Any) -> tuple[Any, Any, bool]:
    """Return the logits and the chosen experts in (logits, weights, indices) or, with True, (mask, weight, logits)."""
    first, _, third = output[:3] if isinstance(output, tuple) and len(output) > 2 else (None,) * 3
    is_mask = isinstance(first, Tensor) and not first.is_floating_point()
    return (third, first, True) if is_mask else (first, third, False)


def _fits(logits: Any, choice: Any) -> bool:
    tensors = [logits] if choice is None else [logits, choice]
    if not all(isinstance(tensor, Tensor) and has_local_data(tensor) and tensor.ndim for tensor in tensors):
        return False
    is_real = logits.is_floating_point() and logits.itemsize > 1  # float8 has no arithmetic
    return is_real and logits.shape[-1] > 1 and all(tensor.shape[:-1] == logits.shape[:-1] for tensor in tensors)


def routing_sums(logits: Tensor, choice: Tensor | None, is_mask: bool = False) -> tuple[Tensor, Tensor]:
    """Sum up one call of a router.

    Args:
        logits: of shape (tokens ..., experts), not empty.
        choice: indices of chosen experts, of shape (tokens ..., k); None if not known.
        is_mask: whether ``choice`` is a mask of chosen experts, of the shape of the logits.

    Returns:
        Tokens per expert, number of tokens with a margin, and sum of margins: of shape (experts + 2,), NaN if a logit
        is NaN or the choice is not known, has other indices or an index twice. Largest logit: of shape (1,). It and the
        sum of margins are NaN if the logits are probabilities: none is negative, and those of every token add up to 1.
    """
    logits = logits.reshape(-1, logits.shape[-1]).to(wide_dtype(logits.device))
    # Routers of transformers 5.2 return probabilities in the place of logits.
    are_logits = (logits < 0).any() | ~((logits.sum(1) - 1).abs() < 0.01).all()
    largest, experts = torch.where(are_logits, logits.amax(), math.nan).reshape(1), logits.shape[1]
    if choice is None:
        return torch.full_like(logits[0, :1], math.nan).expand(experts + 2), largest
    chosen, is_known = choice.reshape(len(logits), -1), ~logits.isnan().any()
    if is_mask:
        chosen = chosen > 0
    else:
        index = torch.where((chosen >= 0) & (chosen < experts), chosen, experts).long()
        mask = torch.zeros(len(logits), experts + 1, dtype=torch.bool, device=logits.device)
        chosen = mask.scatter_(1, index, True)[:, :experts]
        is_known &= chosen.sum() == index.numel()
    has_margin = chosen.any(1)  # a token beyond an expert's capacity has no expert; infinite if all are chosen
    margins = torch.where(chosen, logits, math.inf).amin(1) - torch.where(chosen, -math.inf, logits).amax(1)
    margin = torch.where(are_logits, torch.where(has_margin, margins, 0.0).sum(), math.nan)
    sums = torch.cat([chosen.sum(0), has_margin.sum().reshape(1), margin.reshape(1)])
    return torch.where(is_known, sums, math.nan), largest


def routing_values(sums: Tensor, largest: Tensor) -> Tensor:
    """Compute the :data:`VALUES` of a router from its sums over calls and ranks, NaN for what is not known."""
    counts, tokens, margin = sums[:-2], sums[-2], sums[-1]
    shares = counts / counts.sum()
    entropy, dead = torch.special.entr(shares).sum(), torch.where(shares == 0, 1.0, 0.0 * shares).mean()
    return torch.stack([entropy.exp() / len(counts), shares.amax(), dead, largest[0], margin / tokens])

"""Decisions of the routers in one iteration: sums that add up over calls and ranks, and the values computed of them."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import in_backward
from ignite_monitor.model.devices import move_like, wide_dtype
from ignite_monitor.model.forward import ModuleHook
from ignite_monitor.model.isolation import in_second_pass
from ignite_monitor.model.modes import has_local_data, hidden_from_user_modes

VALUES = ("load_entropy", "max_share", "dead_share", "logit_max", "margin")


def is_of_transformers(module: nn.Module) -> bool:
    """Return True for a router of transformers 5, which returns the chosen experts, also if it is wrapped."""
    names = [f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__]
    return any(re.match(r"transformers\..*Top[kK]Router$", name) for name in names)


class RouterDecisions(ModuleHook):
    """Sums up the decisions of routers, by name, in training mode, as a hook on them."""

    def __init__(self, root: nn.Module, routers: dict[nn.Module, str], top_k: int | None) -> None:
        self._root, self._routers, self._top_k = root, {id(module): name for module, name in routers.items()}, top_k
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}  # results of routing_sums() by name, over all calls
        self.without_logits: set[str] = set()  # names of routers

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        name = self._routers.get(id(module))  # a shallow copy has the hooks of the module itself
        if name is None or in_backward() or in_second_pass() or not self._root.training:  # repeated or evaluated
            return
        try:
            self._add(name, module, output)
        except Exception as error:  # noqa: BLE001
            self.error = error

    def _add(self, name: str, module: nn.Module, output: Any) -> None:
        logits, choice = output, None
        if is_of_transformers(module):
            logits, _, choice = output[:3] if isinstance(output, tuple) and len(output) > 2 else (None,) * 3
            logits = None if choice is None else logits
        known = self.sums.get(name)
        if not self._fits(logits, choice) or (known and len(known[0]) != logits.shape[-1] + 2):
            self.without_logits.add(name)
        elif logits.numel():
            with hidden_from_user_modes():
                sums, largest = routing_sums(logits, logits.topk(self._top_k).indices if choice is None else choice)
                if known:
                    sums, largest = known[0] + move_like(sums, known[0]), known[1].maximum(move_like(largest, known[1]))
                self.sums[name] = sums, largest

    def _fits(self, logits: Any, choice: Any) -> bool:
        tensors = [logits] if choice is None else [logits, choice]
        if not all(isinstance(tensor, Tensor) and has_local_data(tensor) and tensor.ndim for tensor in tensors):
            return False
        has_indices = choice is None or not choice.is_floating_point()
        has_experts = logits.is_floating_point() and logits.shape[-1] >= max(2, self._top_k or 0)
        return has_indices and has_experts and all(item.shape[:-1] == logits.shape[:-1] for item in tensors)


def routing_sums(logits: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    """Sum up one call of a router, from logits (tokens ..., experts) and indices of chosen experts (tokens ..., k).

    Tokens per expert, number of tokens and sum of margins, of shape (experts + 2,), are NaN if a logit is NaN, or the
    choice has other indices or an index twice. The largest logit, of shape (1,), and the sum of margins are NaN if the
    logits are probabilities: none is negative, and those of every token add up to 1.
    """
    logits = logits.reshape(-1, logits.shape[-1]).to(wide_dtype(logits.device))
    tokens, experts = logits.shape
    # Routers of transformers 5.2 return probabilities in the place of logits.
    are_logits = (logits < 0).any() | ~((logits.sum(1) - 1).abs() < 0.01).all()
    index = choice.reshape(tokens, -1)
    index = torch.where((index >= 0) & (index < experts), index, experts).long()
    chosen = torch.zeros(tokens, experts + 1, dtype=torch.bool, device=logits.device)
    chosen = chosen.scatter_(1, index, True)[:, :experts]
    is_known = (chosen.sum() == index.numel()) & ~logits.isnan().any()
    # Infinite if all experts are chosen.
    margins = torch.where(chosen, logits, math.inf).amin(1) - torch.where(chosen, -math.inf, logits).amax(1)
    margin = torch.where(are_logits, margins.sum(), math.nan)
    sums = torch.cat([chosen.sum(0), torch.full_like(margin, tokens).reshape(1), margin.reshape(1)])
    return torch.where(is_known, sums, math.nan), torch.where(are_logits, logits.amax(), math.nan).reshape(1)


def routing_values(sums: Tensor, largest: Tensor) -> Tensor:
    """Compute the :data:`VALUES` of a router from its sums over calls and ranks, NaN for what is not known."""
    counts, tokens, margin = sums[:-2], sums[-2], sums[-1]
    shares = counts / counts.sum()
    entropy, dead = torch.special.entr(shares).sum(), torch.where(shares == 0, 1.0, 0.0 * shares).mean()
    return torch.stack([entropy.exp() / len(counts), shares.amax(), dead, largest[0], margin / tokens])

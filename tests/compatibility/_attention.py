"""What the eager implementation of a model's attention takes its softmax of, in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_monitor.model.names import tags
from tests.compatibility._training import call, doubled
from tests.stress._truth import Iteration, Values


class Softmaxes(TorchDispatchMode):
    """Records what softmaxes are taken of: name of the innermost module that runs -> (batch, heads, queries, keys)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.scores: dict[str, list[Tensor]] = {}
        self._running: list[tuple[str, nn.Module]] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, _, name=name: self._running.append((name, module)))
            module.register_forward_hook(lambda *_: self._running.pop() and None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._softmax.default:
            name, module = self._running[-1]
            scores = args[0].double()
            if isinstance(module, nn.MultiheadAttention):
                scores = scores.unflatten(0, (-1, module.num_heads))
            self.scores.setdefault(name, []).append(scores)
        return func(*args, **(kwargs or {}))


def eager(initial: nn.Module, iteration: Iteration) -> nn.Module:
    """The model as it was when an iteration began, in float64, its attention written out."""
    model = copy.deepcopy(initial)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
        model.config._experts_implementation = "eager"  # the others know no float64
    for module in model.modules():
        if hasattr(module, "fused_attn"):  # timm's
            module.fused_attn = False
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: (args, kwargs | {"need_weights": True}), with_kwargs=True
            )
    for name, parameter in model.named_parameters():
        parameter.data = iteration.weights[name].clone()
    return model.double()


def heads(initial: nn.Module, iteration: Iteration, modules: set[str]) -> Values:
    """Entropy and largest logit of each head of the modules that are called so."""
    model = eager(initial, iteration)
    softmaxes = Softmaxes(model)
    with torch.no_grad(), softmaxes:
        for batch in iteration.x:
            call(model, doubled(batch))
    names = list(dict(model.named_modules()))
    found: Values = {}
    for name, tag in zip(names, tags(name or "_root_" for name in names), strict=True):
        if tag not in modules or name not in softmaxes.scores:  # other models name no softmax of theirs
            continue
        calls = softmaxes.scores[name]
        entropies = torch.cat(
            [torch.special.entr(each.softmax(-1)).sum(-1).transpose(0, 1).flatten(1) for each in calls], 1
        )
        largest = torch.stack([each.amax((0, 2, 3)) for each in calls]).amax(0)
        for head, (entropy, logit) in enumerate(zip(entropies.mean(1).tolist(), largest.tolist(), strict=True)):
            found |= {f"attention_entropy/{tag}/head_{head}": entropy, f"attention_logit_max/{tag}/head_{head}": logit}
    return found

"""Optimizers: those of torch, with the options that change how a step is made, and others.

The others have patterns of step() that do more than use gradients; ``make compatibility`` adds those of packages.
"""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

from tests._models import make_mlp

O = torch.optim  # noqa: E741
OPTIMIZERS = {
    "SGD": lambda p: O.SGD(p, lr=0.01),
    "SGD momentum": lambda p: O.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused SGD": lambda p: O.SGD(p, lr=0.01, weight_decay=0.1, fused=True),
    "fused SGD momentum": lambda p: O.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, fused=True),
    "Adam": lambda p: O.Adam(p, amsgrad=True),
    "AdamW": lambda p: O.AdamW(p, weight_decay=0.1),
    "fused Adam": lambda p: O.Adam(p, amsgrad=True, fused=True),
    "fused AdamW": lambda p: O.AdamW(p, weight_decay=0.1, fused=True),
    "RMSprop": lambda p: O.RMSprop(p, momentum=0.9, centered=True, weight_decay=0.1),
    "Adagrad": lambda p: O.Adagrad(p, weight_decay=0.1),
    "fused Adagrad": lambda p: O.Adagrad(p, weight_decay=0.1, fused=True),
    "Adadelta": lambda p: O.Adadelta(p),
    "Adafactor": lambda p: O.Adafactor(p),
    "Adamax": lambda p: O.Adamax(p),
    "ASGD": lambda p: O.ASGD(p),
    "NAdam": lambda p: O.NAdam(p),
    "RAdam": lambda p: O.RAdam(p),
    "Rprop": lambda p: O.Rprop(p),
}
if hasattr(O, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: O.Muon(p)
FEW = ["SGD momentum", "AdamW", "fused AdamW", "fused SGD momentum", "RMSprop"]


class MuonLike(torch.optim.Optimizer):
    """Muon in the manner of Keller Jordan's: a missing gradient becomes zeros, and the step follows its momentum."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.02, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])
                p.add_(update / (update.norm() + 1e-7), alpha=-group["lr"])


class DecaysAlways(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                p.mul_(1 - 1e-3)
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)


class NeedsAll(torch.optim.Optimizer):
    """Raises where a gradient is missing."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.cat([p.grad.flatten() for p in group["params"]]).norm()
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / norm)


class AdamThatDoesMore(torch.optim.Adam):
    def __init__(self, params):
        super().__init__(params, fused=True)

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        return loss


def of(package, name, **arguments):
    def make(params):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(importlib.import_module(package), name)(params, **arguments)

    return make


FOREIGN = {optimizer.__name__: optimizer for optimizer in (MuonLike, DecaysAlways, NeedsAll, AdamThatDoesMore)}
INSTALLED_FOR_COMPATIBILITY = {
    "schedulefree.AdamWScheduleFree": of("schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=5),
    "schedulefree.SGDScheduleFree": of("schedulefree", "SGDScheduleFree", lr=1e-2),
    **{
        f"timm.{name}": of("timm.optim", name, lr=1e-3)
        for name in ("AdaBelief", "Adan", "Lamb", "Lion", "MADGRAD", "NvNovoGrad", "RMSpropTF", "SGDW")
    },
}
EVERY_FOREIGN = [
    *FOREIGN,
    *(pytest.param(name, marks=pytest.mark.compatibility) for name in INSTALLED_FOR_COMPATIBILITY),
]


def build(name):
    torch.manual_seed(0)
    model = make_mlp(bias=name in OPTIMIZERS.keys() - {"Muon"})  # which takes matrices alone
    optimizer = (OPTIMIZERS | FOREIGN | INSTALLED_FOR_COMPATIBILITY)[name](model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, optimizer

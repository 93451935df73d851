"""The optimizers of torch, with the options that change how a step is made."""

from __future__ import annotations

import torch

from tests._trainers import make_model

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


def build(name):
    model = make_model(bias=name != "Muon")  # which takes matrices alone
    return model, OPTIMIZERS[name](model.parameters())

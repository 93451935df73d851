"""Iterations of forward passes, which RCCHandler measures."""

from __future__ import annotations

import torch

from tests._helpers import run_monitored


def perturb(model, size=0.1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def measure(handler, batches, around=None):
    """Return the metrics of one iteration with a forward pass for each batch."""

    def train_step(engine, _):
        with around or torch.enable_grad():
            for batch in batches:
                handler.model(**batch) if isinstance(batch, dict) else handler.model(batch)

    (values,) = run_monitored(train_step, [0], handler)
    handler.detach()
    return values

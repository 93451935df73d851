"""One forward pass of a model, for what can be seen in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ignite_monitor.model._torch import buffers_in
from ignite_monitor.model.eager import Eager
from ignite_monitor.reference.rng import cuda_devices, drawn_again, generators_of
from ignite_monitor.scaling.module import multiplier_of


def run(model: nn.Module, sample_input: Any) -> Any:
    """What the model returns.

    Args:
        sample_input: a tensor, a tuple of arguments, or a dict of keyword arguments.
    """
    if isinstance(sample_input, Mapping):
        return model(**sample_input)
    return model(*sample_input) if isinstance(sample_input, (tuple, list)) else model(sample_input)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A model that runs eagerly, in evaluation mode and without multipliers; afterwards it is as it was.

    So are random numbers, those of generators too that its modules hold.
    """
    attributes = [(module, dict(vars(module)), dict(buffers_in(module))) for module in model.modules()]
    values = [(buffer, buffer.clone()) for _, _, held in attributes for buffer in held.values() if buffer is not None]
    generators = [each for module in model.modules() for each in generators_of(module).values()]
    multipliers = [hook for module in model.modules() if (hook := multiplier_of(module)) is not None]
    factors = [hook.value for hook in multipliers]
    try:
        with drawn_again(cuda_devices(), generators), torch.no_grad(), Eager(model):
            model.eval()
            for hook in multipliers:
                hook.value = 1.0
            yield
    finally:
        for hook, factor in zip(multipliers, factors, strict=True):
            hook.value = factor
        for module, held, buffers in attributes:
            vars(module).clear()
            vars(module).update(held)
            registry = buffers_in(module)
            registry.clear()
            registry.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)

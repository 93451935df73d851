"""One forward pass of a model, for what can be seen in it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from ignite_monitor.model.eager import eager
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
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for _, _, held in attributes for buffer in held.values() if buffer is not None]
    held_in = (leaf for module in model.modules() for leaf in _pytree.tree_leaves(vars(module)))
    generators = [(each, each.get_state()) for each in held_in if isinstance(each, torch.Generator)]
    multipliers = [hook for module in model.modules() if (hook := multiplier_of(module)) is not None]
    factors = [hook.value for hook in multipliers]
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(cuda), torch.no_grad(), eager():
            model.eval()
            for hook in multipliers:
                hook.value = 1.0
            yield
    finally:
        for hook, factor in zip(multipliers, factors, strict=True):
            hook.value = factor
        for generator, before in generators:
            generator.set_state(before)
        for module, held, buffers in attributes:
            vars(module).clear()
            vars(module).update(held)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

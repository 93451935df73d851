"""Random numbers that are drawn twice."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def drawn_again(devices: Iterable[torch.device], generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Random numbers drawn while it lasts are drawn once more afterwards: by torch, Python and NumPy.

    Args:
        devices: the devices whose default generators count, beside that of the CPU.
    """
    every = [torch.default_generator, *generators]
    others: list[tuple[Any, torch.device, torch.Tensor]] = []
    for device in devices:
        if device.type == "cuda":
            # Its state lies on the host: nothing waits.
            torch.cuda.init()
            place = torch.cuda.current_device() if device.index is None else device.index
            every.append(torch.cuda.default_generators[place])
        elif device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            others.append((module, device, module.get_rng_state(device)))
    states = [generator.get_state() for generator in every]
    python = random.getstate()
    # Nobody has drawn from what is not imported.
    numpy = sys.modules.get("numpy.random")
    numpy_state = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        for generator, state in zip(every, states, strict=True):
            generator.set_state(state)
        for module, device, state in others:
            module.set_rng_state(state, device)
        random.setstate(python)
        if numpy is not None and numpy_state is not None:
            numpy.set_state(numpy_state)

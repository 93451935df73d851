"""Every handler, in every iteration of a longer training: nothing grows, and nothing stays."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers.tensorboard_logger import TensorboardLogger
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    HDF5Logger,
    OptimizerStateHandler,
    RCCHandler,
    SpectralNormHandler,
    StepStatsHandler,
    WeightUpdateHandler,
    read_hdf5,
)
from tests._helpers import footprint, hooks_only

TOKENS, WIDTH = 24, 8


class Training:
    """A small transformer, and an engine that trains it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        encoder = nn.TransformerEncoder(block, 1, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), encoder, nn.Linear(WIDTH, TOKENS))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.engine = Engine(self.train_step)

    def train_step(self, engine: Engine, factor: float) -> float:
        tokens = torch.randint(0, TOKENS, (4, 8))
        self.optimizer.zero_grad()
        loss = factor * nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self, iterations: int) -> None:
        self.engine.state.max_epochs = None
        batches = (1000.0 if iteration == 60 else 1.0 for iteration in range(1, iterations + 1))
        self.engine.run(batches, max_epochs=1, epoch_length=iterations)


def monitors(training: Training) -> list[Any]:
    """All there are; of no parameters by name, since HDF5Logger remembers the last 64 lists of names, each another."""
    model, optimizer = training.model, training.optimizer
    return [
        GradMonitor(model, optimizer, on_spike="skip"),
        WeightUpdateHandler(model, optimizer, top_k=0),
        ActivationHandler(
            model,
            activations=True,
            parameters={"norm": torch.norm},
            gradients={"norm": torch.norm},
            activation_differences={"norm": lambda now, then: (now - then).norm()},
            parameter_differences={"norm": lambda now, then: (now - then).norm()},
            reference="init",
            attention=True,
        ),
        OptimizerStateHandler(model, optimizer, top_k=0),
        RCCHandler(model),
        SpectralNormHandler(model, updates=True, top_k=0),
        StepStatsHandler(model, optimizer, items=lambda _: 32, peak_flops=1e12, flops_per_item=1e3),
    ]


class Heap(ctypes.Structure):
    """What glibc's mallinfo2() gives."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


def heap_in_use() -> int:
    """Bytes that malloc has given out, to torch among others; 0 without glibc."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = Heap
    found = mallinfo()
    return found.uordblks + found.hblkhd


def alive_tensors() -> tuple[int, int]:
    """How many tensors there are, and the bytes of their storages."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not is_lazy(each)]
    storages = {}
    for each in tensors:
        with contextlib.suppress(NotImplementedError):  # sparse ones, and those that torch has left undefined
            storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
    return len(tensors), sum(storages.values())


def attached(training: Training) -> dict[str, Any]:
    """Every hook, handler and attribute that there is on what is trained."""
    found = footprint(training.engine, training.model, training.optimizer)
    return {key: value for key, value in found.items() if key != "metrics"}


@pytest.fixture
def training(tmp_path: Path) -> Any:
    """With every handler attached, after a first run, in which torch makes what it keeps for good."""
    training = Training()
    before = footprint(training.engine, training.model, training.optimizer)
    with TensorboardLogger(log_dir=str(tmp_path / "board")) as board, HDF5Logger(tmp_path / "run.h5") as file:
        attached = monitors(training)
        for monitor in attached:
            monitor.attach(training.engine)
            monitor.log_to(board, training.engine)
            monitor.log_to(file, training.engine)
        training.flush = lambda: (board.writer.flush(), file.flush())
        training.run(3)
        yield training
        for monitor in attached:
            monitor.detach()
    after = footprint(training.engine, training.model, training.optimizer)
    assert hooks_only(after) == hooks_only(before)


def test_nothing_grows_over_hundreds_of_iterations(training, tmp_path):
    """Not by a single tensor in all, nor two Python objects or 1 KiB (an activation in a graph, say) an iteration.

    The smallest growth of three spans counts: a leak grows in each of them, a cache of the process in one.
    """
    tensors, heaps, blocks, at_first = [], [], [], {}

    @training.engine.on(Events.ITERATION_STARTED)
    def count(engine: Engine) -> None:
        if engine.state.iteration not in (2, 102, 152, 202, 252):
            return
        assert attached(training) == at_first.setdefault("attached", attached(training))
        training.flush()
        tensors.append(alive_tensors())
        heaps.append(heap_in_use())
        gc.collect()  # until then Python keeps freed tuples
        blocks.append(sys.getallocatedblocks())

    training.run(252)
    assert tensors[1:] == [tensors[1]] * 4
    assert min(later - earlier for earlier, later in pairwise(blocks[1:])) < 100
    assert min(later - earlier for earlier, later in pairwise(heaps[1:])) < 50 * 2**10
    steps, skipped = read_hdf5(tmp_path / "run.h5")["grad/skipped_count"]
    assert (steps[-1], skipped[-1]) == (252, 1)


def test_iterations_leave_no_cycles_to_the_garbage_collector(training):
    found = []

    @training.engine.on(Events.ITERATION_STARTED)
    def collect(engine: Engine) -> None:
        if engine.state.iteration in (4, 24):
            gc.disable()
            found.append(gc.collect())

    try:
        training.run(24)
    finally:
        gc.enable()
    assert found[1] < 20, "of 20 iterations"

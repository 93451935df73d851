"""Trainings whose iterations are timed one by one, with a handler that watches some of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from bench_grad_monitor import make_model
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import (
    ActivationHandler,
    GradientNoiseScaleHandler,
    GradMonitor,
    HistogramHandler,
    OptimizerStateHandler,
    RCCHandler,
    ReplicaCheckHandler,
    RollbackHandler,
    SpectralNormHandler,
    SpikeMonitor,
    SpikeRecorder,
    StepStatsHandler,
    WeightUpdateHandler,
)
from ignite_monitor.replicas import handler as replicas

NEVER = 10**9


class Setting(NamedTuple):
    """A transformer, and the batches that it is trained on."""

    blocks: int = 2
    width: int = 64
    rows: int = 50
    sequences: int = 8
    length: int = 8


def clip(model: nn.Module, tokens: torch.Tensor) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)


@torch.no_grad()
def two_passes(model: nn.Module, tokens: torch.Tensor) -> None:
    model(tokens)
    model(tokens)


def clone(model: nn.Module, tokens: torch.Tensor) -> None:
    [parameter.detach().clone() for parameter in model.parameters()]


def replica_check(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """As on the first of two ranks, the second of which holds the same, without the time that the collective takes."""
    replicas.world_size = lambda: 2
    replicas.sum_over_ranks = lambda table: table[:1].expand_as(table)
    return [ReplicaCheckHandler(model, optimizer)]


def all_of_them(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        monitor for name in MONITORS if name not in (PLAIN, ALL, NOISE) for monitor in MONITORS[name](model, optimizer)
    ]


def recorded(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    monitor = SpikeMonitor(lambda engine: 1.0, prefix="value", flag="value_is_spike")
    return [monitor, SpikeRecorder(monitor, "never")]  # made with the first spike, which does not come


def rollback(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [RollbackHandler({"model": model, "optimizer": optimizer}, loss=lambda engine: 1.0)]


PLAIN, ALL = "`ActivationHandler`", "all of these"
NOISE = "`GradientNoiseScaleHandler`, two micro-batches"
COMPARISONS = {"`clip_grad_norm_`": clip, "two forward passes": two_passes, "a clone of the weights": clone}
MONITORS: dict[str, Callable[..., list[Any]]] = {
    "`GradMonitor`": lambda model, optimizer: [GradMonitor(model, optimizer)],
    "`WeightUpdateHandler`": lambda model, optimizer: [WeightUpdateHandler(model, optimizer)],
    "`OptimizerStateHandler`": lambda model, optimizer: [OptimizerStateHandler(model, optimizer)],
    PLAIN: lambda model, _: [ActivationHandler(model, activations=True)],
    "the same with attention": lambda model, _: [ActivationHandler(model, activations=True, attention=True)],
    "`SpectralNormHandler`": lambda model, _: [SpectralNormHandler(model)],
    "`RCCHandler`": lambda model, _: [RCCHandler(model)],
    "`HistogramHandler`": lambda model, _: [HistogramHandler(model)],
    "`ReplicaCheckHandler`": replica_check,
    "`StepStatsHandler`": lambda model, optimizer: [StepStatsHandler(model, optimizer)],
    "`SpikeMonitor` and `SpikeRecorder`": recorded,
    "`RollbackHandler` between snapshots": rollback,
    ALL: all_of_them,
    NOISE: lambda model, optimizer: [GradientNoiseScaleHandler(model, optimizer, micro_batches=2)],
}


class Runner:
    """A model, a trainer of it, and the time that each of its iterations takes.

    Args:
        setting: the model's sizes.
        device: where it is.
        variant: what is in its train step or attached to its trainer; none of the names for nothing.
        idle: leave forward and backward out, so that what is around them can be measured to the microsecond.
    """

    def __init__(self, setting: Setting, device: str, variant: str = "", idle: bool = False) -> None:
        torch.manual_seed(0)
        model = make_model(setting.width, device, setting.blocks, setting.rows)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        extra = COMPARISONS.get(variant)

        def train_step(engine: Engine, tokens: torch.Tensor) -> None:
            optimizer.zero_grad()
            for part in () if idle else tokens.chunk(2 if variant == NOISE else 1):
                nn.functional.cross_entropy(model(part).flatten(0, 1), part.flatten() % 10).backward()
            if extra is not None and self.watches(engine, engine.state.iteration):
                extra(model, tokens)
            optimizer.step()

        self.every = 1
        self.trainer = Engine(train_step)
        for monitor in MONITORS[variant](model, optimizer) if variant in MONITORS else ():
            monitor.attach(self.trainer, Events.ITERATION_STARTED(event_filter=self.watches))
            self.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda each: each.on_host(), monitor)
        self.trainer.add_event_handler(Events.GET_BATCH_STARTED, self._stamp)
        self._stamps: list[float] = []
        self._clock = _synchronized if device == "cuda" else time.thread_time
        self._tokens = partial(torch.randint, 0, setting.rows, (setting.sequences, setting.length), device=device)

    def watches(self, engine: Engine, iteration: int) -> bool:
        return iteration % self.every == 0

    def _stamp(self) -> None:
        self._stamps.append(self._clock())

    def __call__(self, iterations: int, every: int) -> list[float]:
        """Seconds of each of so many iterations, from the second of a run on, in which one in ``every`` is watched."""
        self.every = every
        self._stamps.clear()
        self.trainer.state.max_epochs = None
        self.trainer.run([self._tokens() for _ in range(iterations + 2)], max_epochs=1)
        return [after - before for before, after in itertools.pairwise(self._stamps)][1:]


def _synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()

"""A training run on any device, with monitors, and the metrics of its iterations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    HistogramHandler,
    MeanStdThreshold,
    Metric,
    OptimizerStateHandler,
    RCCHandler,
    ReplicaCheckHandler,
    RobustThreshold,
    RoutingHandler,
    SpectralNormHandler,
    SpikeMonitor,
    StaticThreshold,
    StepStatsHandler,
    WeightUpdateHandler,
)
from tests._handlers import EarlyDrift
from tests._models import GPT
from tests.accelerator._device import Device

Make = Callable[..., Any]
Rows = list[dict[str, float]]


def transformer(blocks: int = 2, width: int = 16, records: bool = True) -> GPT:
    return GPT(64, width, 8, blocks=blocks, heads=4, dropout=0.0, records=records, fused=True)


NORMS = {"norm": torch.linalg.vector_norm}
CLAMPED = {"clamped": Metric(lambda x: x.abs().clamp(max=1), aggregate="max")}


def _loss(engine: Engine) -> Tensor:
    return engine.state.loss


def _routing(model: nn.Module, *_: Any) -> RoutingHandler:
    return RoutingHandler(model, routers="head$", top_k=2)


# Called with model, optimizer and scaler.
MONITORS: dict[str, Make] = {
    "GradMonitor": lambda m, o, s: GradMonitor(m, o, scaler=s),
    "GradMonitor of all time": lambda m, o, s: GradMonitor(m, o, scaler=s, threshold=MeanStdThreshold(3.0, 2, None)),
    "GradMonitor, RobustThreshold": lambda m, o, s: GradMonitor(m, o, scaler=s, threshold=RobustThreshold(warmup=3)),
    "GradMonitor, StaticThreshold": lambda m, o, s: GradMonitor(m, o, scaler=s, threshold=StaticThreshold(1.5)),
    "GradMonitor, function": lambda m, o, s: GradMonitor(m, o, scaler=s, threshold=lambda mean, std, count: 2 * mean),
    "GradMonitor, clip": lambda m, o, s: GradMonitor(m, o, scaler=s, threshold=StaticThreshold(1.5), on_spike="clip"),
    "GradMonitor, largest": lambda m, o, s: GradMonitor(m, o, scaler=s, norm_type=float("inf")),
    "WeightUpdateHandler": lambda m, o, s: WeightUpdateHandler(m, o, scaler=s, sample_size=128),
    "WeightUpdateHandler of all": lambda m, o, s: WeightUpdateHandler(m, scaler=s, sample_size=None),
    "ActivationHandler": lambda m, o, s: ActivationHandler(m, activations=True, attention=True),
    "ActivationHandler of weights": lambda m, o, s: ActivationHandler(m, parameters=True, gradients=True),
    "ActivationHandler, functions": lambda m, o, s: ActivationHandler(
        m, activations=CLAMPED, parameters=NORMS, gradients=NORMS
    ),
    "RCCHandler": lambda m, o, s: RCCHandler(m),
    "SpectralNormHandler": lambda m, o, s: SpectralNormHandler(m, updates=True, per_parameter=True),
    "SpectralNormHandler, ns5": lambda m, o, s: SpectralNormHandler(m, method="ns5-fast", top_k=0),
    "StepStatsHandler": lambda m, o, s: StepStatsHandler(m, o, items=lambda batch: batch[0].numel()),
    "SpikeMonitor": lambda m, o, s: SpikeMonitor(_loss, threshold=MeanStdThreshold(warmup=3)),
    "SpikeMonitor, both": lambda m, o, s: SpikeMonitor(_loss, threshold=MeanStdThreshold(warmup=3), direction="both"),
    "DriftMonitor": lambda m, o, s: EarlyDrift(_loss, direction="both"),
    "GradMonitor, tensors": lambda m, o, s: GradMonitor(
        m, o, scaler=s, threshold=StaticThreshold(1.5), per_parameter=True
    ),
    "OptimizerStateHandler": lambda m, o, s: OptimizerStateHandler(m, o),
    "ReplicaCheckHandler": lambda m, o, s: ReplicaCheckHandler(m, o),
    "HistogramHandler": lambda m, o, s: HistogramHandler(m),
    "RoutingHandler": _routing,
}
# No other numbers agree with these.
_OF_THE_MACHINE = ("time_ms", "items_per_s", "data_wait_ms", "data_wait_share", "memory_mb")


def batches(count: int, device: str, spikes: Iterable[int] = ()) -> list[tuple[Tensor, Tensor, float]]:
    """Tokens, targets and a factor of the loss, which is huge at the 0-based places ``spikes``."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for place in range(count):
        tokens, targets = torch.randint(0, 64, (2, 2, 8), generator=generator).unbind()
        result.append((tokens.to(device), targets.to(device), 100.0 if place in spikes else 1.0))
    return result


class Training:
    """A transformer, its optimizer and a trainer on a device.

    In ``make_step`` nothing may synchronize where a GradScaler reads its overflow on the host.

    Args:
        kind: "plain", "accumulated" (two backwards to a step) or "scaled" (a GradScaler, with an overflow).
        fused: whether the optimizer is, which skips steps on the device.
        clip: whether the train step clips gradients, with a limit that none exceeds.
        lr: learning rate of SGD.
        place: whether to move the model to the device.
    """

    def __init__(
        self,
        device: Device,
        kind: str = "plain",
        fused: bool = False,
        model: nn.Module | None = None,
        clip: bool = False,
        lr: float = 0.05,
        place: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        model = transformer() if model is None else model
        self.model = model.to(device.name) if place else model
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        if fused:  # of SGD the first step would have to be looked at
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.scaler = torch.amp.GradScaler(device.name, init_scale=1024.0) if kind == "scaled" else None
        self.kind, self.clip = kind, clip
        self.trainer = Engine(self.train_step)
        self.rows: Rows = []

    def loss(self, batch: tuple[Tensor, Tensor, float]) -> Tensor:
        tokens, targets, factor = batch
        return factor * F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def train_step(self, engine: Engine, batch: tuple[Tensor, Tensor, float]) -> Tensor:
        loss = self.loss(batch)
        engine.state.loss = loss.detach()
        if self.scaler is not None:
            self.optimizer.zero_grad()
            scaled = self.scaler.scale(loss)
            if engine.state.iteration == 4:
                scaled = scaled * float("inf")
            scaled.backward()
            with self.device.may_synchronize():  # it looks for overflows
                self.scaler.step(self.optimizer)
                self.scaler.update()
            return engine.state.loss
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
        if self.kind != "accumulated" or engine.state.iteration % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return engine.state.loss

    def state(self) -> Any:
        """Copies of weights and optimizer state, on the host."""
        return copied([self.model.state_dict(), self.optimizer.state_dict()], "cpu")

    def synchronizations(self, data: list[Any]) -> list[str]:
        """Train; return the synchronizations of the whole run, start and end included."""
        with self.device.counted_synchronizations() as synchronizations:
            self.trainer.run(data, max_epochs=self.trainer.state.epoch + 1)
        return synchronizations

    def run(self, monitors: list[Any], data: list[Any], *, quiet: bool = True) -> Rows:
        """Return the metrics of each iteration; with ``quiet`` none of them synchronizes host and device."""
        quietly, trainer = contextlib.ExitStack(), self.trainer

        # Before the monitors' handlers, and after them.
        @trainer.on(Events.ITERATION_STARTED)
        def start() -> None:
            if quiet:
                quietly.enter_context(self.device.no_synchronization())

        for monitor in monitors:
            monitor.attach(trainer, Events.ITERATION_STARTED)

        @trainer.on(Events.ITERATION_COMPLETED)
        def end() -> None:
            quietly.close()
            for monitor in monitors:
                monitor.on_host()
            self.rows.append({name: float(value) for name, value in trainer.state.metrics.items()})

        try:
            trainer.run(data, max_epochs=1)
        finally:
            with contextlib.suppress(AssertionError):
                quietly.close()
        return self.rows


def copied(value: Any, device: str) -> Any:
    """A copy whose tensors are on a device."""
    return tree_map(lambda item: item.detach().clone().to(device) if isinstance(item, Tensor) else item, value)


def without_machine(rows: Rows) -> Rows:
    return [{name: value for name, value in row.items() if not name.endswith(_OF_THE_MACHINE)} for row in rows]


def all_monitors(training: Training) -> list[Any]:
    names = ("WeightUpdateHandler", "ActivationHandler", "RCCHandler", "SpectralNormHandler", "StepStatsHandler")
    reacting = GradMonitor(training.model, training.optimizer, scaler=training.scaler)
    return [reacting, *(MONITORS[name](training.model, training.optimizer, training.scaler) for name in names)]


def assert_alike(actual: Rows, expected: Rows, tolerance: float, least: float = 1e-6) -> None:
    assert [sorted(item) for item in actual] == [sorted(item) for item in expected]
    for iteration, (row, other) in enumerate(zip(actual, expected, strict=True), 1):
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=tolerance, abs=least, nan_ok=True), (iteration, name)

"""Any sequence of norms through a real GradMonitor, beside the contract's rules over the whole history in Python.

``HARD_USE_EXAMPLES=50`` tries 50 times as many sequences, see :mod:`tests.stress._profile`.
"""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ignite.engine import Engine, Events
from torch import nn
from torch.amp import GradScaler

from ignite_monitor import GradMonitor, MonitorEvents
from tests._helpers import make_step
from tests._models import Lambda
from tests._oracle import LARGEST, SMALLEST, Oracle, Rule, function, mean_std, robust, static
from tests.stress._profile import examples

SPECIAL = [0.0, 5e-324, 1e-310, 1e-45, 1e-38, 1.0, 1e38, math.inf, math.nan]
DTYPES = {torch.float32: [*SPECIAL, 3e38], torch.float64: [*SPECIAL, 1e60, 1e120, 1e160, 1e300]}


RATES = st.sampled_from([0.5, 1.0, 3.0, 10.0])
WARMUPS = st.integers(2, 6)
DECAYS = st.sampled_from([None, 0.5, 0.9, 0.99])
RULES = st.one_of(
    st.builds(mean_std, RATES, WARMUPS, DECAYS),
    st.builds(static, st.sampled_from([1e-40, 0.5, 1.0, 1e30, 1e200])),
    st.builds(robust, RATES, WARMUPS, DECAYS, st.sampled_from([0.5, 1.0, 2.0])),
    st.builds(function, st.sampled_from([0.5, 1.0, 4.0])),
)


@st.composite
def sequences(draw: Any, dtype: torch.dtype) -> list[float]:
    """Norms in stretches: of anything, of one number, of two in turn, and of a level with noise."""
    number = st.sampled_from(DTYPES[dtype]) | st.floats(0, 1e4, width=32)
    norms: list[float] = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 12))
        kind = draw(st.sampled_from(["any", "constant", "alternating", "level"]))
        if kind == "any":
            norms += draw(st.lists(number, min_size=length, max_size=length))
        elif kind == "level":
            level = draw(st.sampled_from([1e-42, 1e-10, 1.0, 1e30]))
            noise = draw(st.lists(st.floats(0.5, 2), min_size=length, max_size=length))
            norms += [level * item for item in noise]
        else:
            pair = [draw(number), draw(number)] if kind == "alternating" else [draw(number)]
            norms += (pair * length)[:length]
    return norms


@dataclasses.dataclass
class Run:
    """Generated run."""

    dtype: torch.dtype
    norms: list[float]
    rule: Rule
    reaction: str  # to a spike: "step", "skip", or the train step returns before the optimizer's
    max_consecutive: int
    with_optimizer: bool
    scaled: bool
    resume_at: int


@st.composite
def runs(draw: Any) -> Run:
    dtype = draw(st.sampled_from([*DTYPES]))
    norms = draw(sequences(dtype))
    reaction = draw(st.sampled_from(["step", "skip", "return"]))
    return Run(
        dtype,
        norms,
        draw(RULES),
        reaction,
        draw(st.integers(1, 4)),
        reaction == "skip" or draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, len(norms))),
    )


def make_weights(dtype: torch.dtype) -> Lambda:
    """Weights of which a train step chooses the gradient: the derivative of their product with it."""
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    return Lambda(lambda self, gradient: (self.weight * gradient).sum(), weight=weight)


class Observed:
    """A training whose gradients have the norms that are drawn, and what its monitor says of each."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = make_weights(run.dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scaler = GradScaler("cpu", init_scale=1.0) if run.scaled else None
        self.scales: list[float] = []
        self.truth: list[float] = []
        self.values: list[dict[str, float]] = []
        self.flags: list[bool] = []
        self.moved: list[bool] = []
        self.spikes: list[float] = []

    def monitor(self) -> GradMonitor:
        return GradMonitor(
            self.model,
            self.optimizer if self.run.with_optimizer else None,
            scaler=self.scaler,
            threshold=self.run.rule.make(),
            on_spike="skip" if self.run.reaction == "skip" else None,
            max_consecutive_spikes=self.run.max_consecutive,
        )

    def train(self, monitor: GradMonitor, norms: list[float]) -> None:
        directions = torch.tensor([0.6, 0.0, -0.8], dtype=torch.float64)
        # Not a product of inf and 0, which is NaN.
        batches = [torch.full((3,), n) if not math.isfinite(n) else n * directions for n in norms]
        step = make_step(
            self.model,
            self.optimizer,
            loss_of=self._loss,
            scaler=self.scaler,
            after_backward=self._after_backward,
            leave_out=lambda engine: self.flags[-1] and self.run.reaction == "return",
        )
        self.engine = engine = Engine(step)
        monitor.attach(engine)
        engine.add_event_handler(MonitorEvents.SPIKE_DETECTED, lambda e: self.spikes.append(e.state.grad_norm))
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._note)
        if batches:
            engine.run(batches, max_epochs=1)
        monitor.detach()

    def _loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert self.engine.state.unhealthy_spike is False
        assert self.engine.state.grad_norm is None
        with torch.no_grad():
            self.model.weight.fill_(0.0)
        return model(batch.to(self.run.dtype))

    def _after_backward(self, engine: Engine) -> None:
        self.scales.append(1.0 if self.scaler is None else self.scaler.get_scale())
        gradient = self.model.weight.grad.tolist()
        norm = math.hypot(*(item / self.scales[-1] for item in gradient))
        self.truth.append(math.nan if any(map(math.isnan, gradient)) else norm)
        self.flags.append(bool(engine.state.unhealthy_spike))

    def _note(self, engine: Engine) -> None:
        self.moved.append(bool(self.model.weight.any()))
        self.values.append({name: float(value) for name, value in engine.state.metrics.items()})
        assert bool(engine.state.unhealthy_spike) is self.flags[-1]


@given(runs())
@examples(60)
def test_values_of_any_sequence_of_norms(run):
    observed = Observed(run)
    monitor = observed.monitor()
    observed.train(monitor, run.norms[: run.resume_at])
    file = io.BytesIO()
    torch.save(dict(monitor.state_dict()), file)
    file.seek(0)
    resumed = observed.monitor()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    observed.train(resumed, run.norms[run.resume_at :])

    oracle = Oracle(run.rule, run.max_consecutive, overflow_is_spike=not run.scaled)
    skipped = 0
    tolerance = 1e-12 if run.dtype == torch.float64 else 1e-6
    for place, (truth, reported, flag) in enumerate(zip(observed.truth, observed.values, observed.flags, strict=True)):
        norm = reported["grad/norm"]
        # Subnormal numbers have few digits, and scaled ones fewer.
        least = 1e-305 if run.scaled else 1e-321 if truth > 1e-315 else 0.0
        assert norm == pytest.approx(truth, rel=tolerance, abs=least, nan_ok=True), place
        detection = oracle.detect(norm, flag)
        overflow = run.scaled and not math.isfinite(norm)
        stepped = not overflow and not (detection.spike and run.reaction == "return")
        if stepped or not run.with_optimizer or detection.spike or overflow:
            oracle.observe(detection)
        skipped += detection.spike and stepped and run.reaction == "skip"
        counts = {
            "spike_count": oracle.spike_count,
            "skipped_count": skipped,
            "nonfinite_count": oracle.nonfinite_count,
            "stepped": float(stepped and not (detection.spike and run.reaction == "skip")),
        } | ({"scale": observed.scales[place]} if run.scaled else {})
        expected = {f"grad/{name}": value for name, value in (detection.statistics() | counts).items()}
        # Of equal norms the mean is rounded, and the deviation from it is of that size.
        rounding = 1e-9 * max((item for item in observed.truth[:place] if item <= LARGEST), default=0.0)
        assert reported == pytest.approx(expected, rel=1e-9, abs=SMALLEST + rounding, nan_ok=True), place
        assert flag == bool(reported["grad/spike"])
        if math.isfinite(norm) and norm > 0:
            assert observed.moved[place] is not (flag and run.reaction != "step"), place
        if oracle.unsure:
            return
    spiked = [norm["grad/norm"] for norm, flag in zip(observed.values, observed.flags, strict=True) if flag]
    assert observed.spikes == pytest.approx(spiked, rel=0, abs=0, nan_ok=True)

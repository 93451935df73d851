"""Any sequence of norms through a real GradMonitor, beside the contract's rules over the whole history in Python.

``HARD_USE_EXAMPLES=50`` tries 50 times as many sequences, see :mod:`tests.hard_use._profile`.
"""

from __future__ import annotations

import dataclasses
import io
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ignite.engine import Engine, Events
from torch import nn
from torch.amp import GradScaler

from ignite_monitor import GradMonitor, MeanStdThreshold, RobustThreshold, StaticThreshold
from tests.hard_use._profile import examples

# Squares and cubes of deviations this small, or of norms this large, leave float64's range.
SMALLEST, LARGEST = 1e-100, 1e92

SPECIAL = [0.0, 5e-324, 1e-310, 1e-45, 1e-38, 1.0, 1e38, math.inf, math.nan]
DTYPES = {torch.float32: [*SPECIAL, 3e38], torch.float64: [*SPECIAL, 1e60, 1e120, 1e160, 1e300]}


@dataclasses.dataclass
class Rule:
    """A threshold rule of the package, and what it is defined as, over the norms that have entered."""

    make: Callable[[], Any]
    limit: Callable[[list[float], float, float], float]
    warmup: int
    decay: float = 1.0
    halves: bool = False  # whether a spike enters halfway between mean and threshold


def mean_std(k: float, warmup: int, decay: float | None) -> Rule:
    return Rule(
        lambda: MeanStdThreshold(k=k, warmup=warmup, decay=decay),
        lambda history, mean, std: mean + k * std,
        warmup,
        decay or 1.0,
    )


def static(value: float) -> Rule:
    return Rule(lambda: StaticThreshold(value), lambda history, mean, std: value, 0)


def function(factor: float) -> Rule:
    def limit(mean: Any, std: Any, count: Any) -> Any:
        return factor * mean + std

    return Rule(lambda: limit, lambda history, mean, std: limit(mean, std, len(history)), 2)


def robust(k: float, warmup: int, decay: float | None, least: float) -> Rule:
    def upper(history: list[float]) -> float:
        """The cube root of the upper partial moment, each norm measured from the mean of those before it."""
        d = decay or 1.0
        excess = [max(x - mean_of(history[:i], d), 0.0) ** 3 if i else 0.0 for i, x in enumerate(history)]
        return weighted(excess, d) ** (1 / 3)

    def limit(history: list[float], mean: float, std: float) -> float:
        value = max(mean + k * upper(history), least * mean)
        return value if value > 0 else math.inf

    make = lambda: RobustThreshold(k=k, warmup=warmup, decay=decay, least=least)  # noqa: E731
    return Rule(make, limit, warmup, decay or 1.0, halves=True)


def weighted(values: list[float], decay: float) -> float:
    weights = [decay ** (len(values) - 1 - i) for i in range(len(values))]
    return math.fsum(w * x for w, x in zip(weights, values, strict=True)) / math.fsum(weights)


def mean_of(history: list[float], decay: float) -> float:
    return weighted(history, decay) if history else math.nan


def std_of(history: list[float], decay: float) -> float:
    if len(history) < 2:
        return math.nan
    if decay == 1.0:
        return statistics.stdev(history)
    weights = [decay ** (len(history) - 1 - i) for i in range(len(history))]
    mean, total = weighted(history, decay), math.fsum(weights)
    spread = math.fsum(w * (x - mean) ** 2 for w, x in zip(weights, history, strict=True))
    return math.sqrt(spread / (total - math.fsum(w * w for w in weights) / total))


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
            norms += [level * each for each in noise]
        else:
            pair = [draw(number), draw(number)] if kind == "alternating" else [draw(number)]
            norms += (pair * length)[:length]
    return norms


@dataclasses.dataclass
class Run:
    """What is drawn."""

    dtype: torch.dtype
    norms: list[float]
    rule: Rule
    reaction: str  # to a spike: "step", "skip_step", or the train step itself "leaves out" the optimizer's
    max_consecutive: int
    with_optimizer: bool
    scaled: bool
    resume_at: int


@st.composite
def runs(draw: Any) -> Run:
    dtype = draw(st.sampled_from([*DTYPES]))
    norms = draw(sequences(dtype))
    reaction = draw(st.sampled_from(["step", "skip_step", "leaves out"]))
    return Run(
        dtype,
        norms,
        draw(RULES),
        reaction,
        draw(st.integers(1, 4)),
        reaction == "skip_step" or draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, len(norms))),
    )


class Weights(nn.Module):
    """Weights of which a train step chooses the gradient: the derivative of their product with it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


class Observed:
    """A training whose gradients have the norms that are drawn, and what its monitor says of each."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = Weights(run.dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scaler = GradScaler("cpu", init_scale=1.0) if run.scaled else None
        self.truth: list[float] = []
        self.said: list[dict[str, float]] = []
        self.flags: list[bool] = []
        self.moved: list[bool] = []
        self.spikes: list[float] = []

    def monitor(self) -> GradMonitor:
        return GradMonitor(
            self.model,
            self.optimizer if self.run.with_optimizer else None,
            scaler=self.scaler,
            threshold=self.run.rule.make(),
            skip_step=self.run.reaction == "skip_step",
            on_spike=lambda engine, norm: self.spikes.append(float(norm)),
            max_consecutive_spikes=self.run.max_consecutive,
        )

    def train(self, monitor: GradMonitor, norms: list[float]) -> None:
        directions = torch.tensor([0.6, 0.0, -0.8], dtype=torch.float64)
        # Not a product of inf and 0, which is NaN.
        batches = [torch.full((3,), n) if not math.isfinite(n) else n * directions for n in norms]
        engine = Engine(self._step)
        monitor.attach(engine)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._note)
        if batches:
            engine.run(batches, max_epochs=1)
        monitor.detach()

    def _step(self, engine: Engine, batch: torch.Tensor) -> None:
        assert engine.state.unhealthy_spike is False
        assert engine.state.grad_norm is None
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.model.weight.fill_(0.0)
        loss = self.model(batch.to(self.run.dtype))
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.truth.append(math.hypot(*(each / scale for each in self.model.weight.grad.tolist())))
        if any(map(math.isnan, self.model.weight.grad.tolist())):
            self.truth[-1] = math.nan
        flag = bool(engine.state.unhealthy_spike)
        self.flags.append(flag)
        if not (flag and self.run.reaction == "leaves out"):
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        self.moved.append(bool(self.model.weight.any()))

    def _note(self, engine: Engine) -> None:
        self.said.append({name: float(value) for name, value in engine.state.metrics.items()})
        assert bool(engine.state.unhealthy_spike) is self.flags[-1]


class Judge:
    """The contract, in Python."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.history: list[float] = []
        self.consecutive = self.spike_count = self.skipped_count = self.nonfinite_count = 0
        self.suspended = self.unsure = False

    def expect(self, norm: float, said_spike: bool) -> dict[str, float]:
        """What is to be published of a norm, which then enters.

        Where norm and threshold are equal but for rounding, either verdict is right, and the monitor's is taken.
        """
        rule, values = self.run.rule, {"norm": norm}
        mean, std = mean_of(self.history, rule.decay), std_of(self.history, rule.decay)
        limit = rule.limit(self.history, mean, std) if len(self.history) >= rule.warmup else math.inf
        limit = math.inf if math.isnan(limit) else limit
        threshold = math.inf if self.suspended else limit
        values |= {"mean": mean, "std": std, "threshold": threshold}
        nonfinite = not math.isfinite(norm)
        spike = norm > threshold or (nonfinite and not self.run.scaled)
        if math.isclose(norm, threshold, rel_tol=1e-9, abs_tol=SMALLEST):
            spike = said_spike
        spike &= not (nonfinite and self.run.scaled)
        values["spike"] = float(spike)
        stepped = not (spike and self.run.reaction == "leaves out") and not (nonfinite and self.run.scaled)
        if stepped or not self.run.with_optimizer or spike or nonfinite:
            self.observe(norm, mean, limit, threshold, spike)
        self.skipped_count += spike and self.run.reaction == "skip_step" and stepped
        counts = {name: float(getattr(self, name)) for name in ("spike_count", "skipped_count", "nonfinite_count")}
        return {f"grad/{name}": value for name, value in (values | counts).items() if name == "norm" or is_known(value)}

    def observe(self, norm: float, mean: float, limit: float, threshold: float, spike: bool) -> None:
        self.spike_count += spike
        if not math.isfinite(norm):
            self.nonfinite_count += 1
            return
        if norm <= limit < math.inf:
            self.suspended = False
        self.consecutive = self.consecutive + 1 if spike else 0
        entering = min(norm, threshold) if spike else norm
        if self.run.rule.halves and spike:
            entering = (mean + entering) / 2
        elif self.run.rule.halves and self.history:
            # What equals the rule's limit to the last bit counts as clipped to it.
            limit = self.run.rule.limit(self.history, mean, math.nan)
            self.unsure = math.isclose(norm, limit, abs_tol=SMALLEST) and not math.isclose(norm, mean)
        if self.consecutive >= self.run.max_consecutive:
            self.history, self.consecutive, self.suspended = [], 0, True
            entering = norm
        if entering <= LARGEST:
            self.history.append(entering)


def is_known(value: float) -> bool:
    return math.isfinite(value)


@given(runs())
@examples(120)
def test_what_is_said_of_any_sequence_of_norms(run):
    observed = Observed(run)
    monitor = observed.monitor()
    observed.train(monitor, run.norms[: run.resume_at])
    file = io.BytesIO()
    torch.save(dict(monitor.state_dict()), file)
    file.seek(0)
    resumed = observed.monitor()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    observed.train(resumed, run.norms[run.resume_at :])

    judge = Judge(run)
    tolerance = 1e-12 if run.dtype == torch.float64 else 1e-6
    for place, (truth, said, flag) in enumerate(zip(observed.truth, observed.said, observed.flags, strict=True)):
        norm = said["grad/norm"]
        assert norm == pytest.approx(truth, rel=tolerance, abs=0, nan_ok=True), place
        expected = judge.expect(norm, flag)
        # Of equal norms the mean is rounded, and the deviation from it is of that size.
        rounding = 1e-9 * max((each for each in observed.truth[:place] if each <= LARGEST), default=0.0)
        assert said == pytest.approx(expected, rel=1e-9, abs=SMALLEST + rounding, nan_ok=True), place
        assert flag == bool(said["grad/spike"])
        if judge.unsure:
            return
        if math.isfinite(norm) and norm > 0:
            assert observed.moved[place] is not (flag and run.reaction != "step"), place
    spiked = [norm["grad/norm"] for norm, flag in zip(observed.said, observed.flags, strict=True) if flag]
    assert observed.spikes == pytest.approx(spiked, rel=0, abs=0, nan_ok=True)

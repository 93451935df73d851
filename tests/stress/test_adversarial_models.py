"""Any module tree under every handler: right numbers and an untouched training, or a refusal that names the argument.

``HARD_USE_EXAMPLES=50`` tries 50 times as many models, see :mod:`tests.stress._profile`.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    RCCHandler,
    SpectralNormHandler,
    StepStatsHandler,
    WeightUpdateHandler,
)
from ignite_monitor.scaling import AlignmentHandler
from tests._helpers import assert_same, footprint, hooks_only
from tests._oracle import WindowTruth, mean_std
from tests._truth import (
    Iteration,
    Recorder,
    Values,
    activations,
    copies,
    dense,
    spectral,
    statistics_of_step,
    updates,
)
from tests.stress._models import BLOCKS, ROWS, WIDTH, Plan, plans
from tests.stress._profile import examples

HANDLERS = {
    "grad": lambda model, optimizer: GradMonitor(model, optimizer),
    "update": lambda model, optimizer: WeightUpdateHandler(model, optimizer, sample_size=None, top_k=0),
    "activation": lambda model, optimizer: ActivationHandler(
        model,
        activations=True,
        parameters=True,
        gradients=True,
        attention=True,
    ),
    "rcc": lambda model, optimizer: RCCHandler(model),
    "spectral": lambda model, optimizer: SpectralNormHandler(model, updates=True, per_parameter=True, top_k=0),
    "alignment": lambda model, optimizer: AlignmentHandler(model),
    "stats": StepStatsHandler,
}
# What clocks and the operating system say, how "power" has got there, and what tests of their own compare.
UNCHECKED = r"step/(?!lr|parameter_norm)|^spectral/(\w+_)?error_max|^(rcc|alignment)/|^attention_|/head_0/"
ITERATIONS = 3


class Training:
    """A model, and a trainer that counts on nothing but a loss."""

    def __init__(self, plan: Plan) -> None:
        self.model = plan.build()
        self.optimizer = plan.make_optimizer(self.model)
        self.engine = Engine(self._step)
        self.states: list[Any] = []

    def _step(self, engine: Engine, x: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.after_backward()
        self.optimizer.step()
        return loss.item()

    def after_backward(self) -> None: ...

    def run(self) -> None:
        generator = torch.Generator().manual_seed(3)
        torch.manual_seed(5)
        batches = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(ITERATIONS)]
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda _: self.states.append(self._state()))
        self.engine.run(batches, max_epochs=1)

    def footprint(self) -> dict[str, Any]:
        return hooks_only(footprint(self.engine, self.model, self.optimizer))

    def _state(self) -> dict[str, Any]:
        gradients = [item.grad for item in self.model.parameters()]
        return {
            "model": {name: item.clone() for name, item in self.model.state_dict().items()},
            "gradients": [None if item is None else dense(item).clone() for item in gradients],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "output": self.engine.state.output,
            "random": torch.get_rng_state(),
        }


class Recorded(Training):
    """The same without monitors, recorded."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        # What can't be copied has no reference either.
        self.initial = self.model if any(map(is_lazy, self.model.buffers())) else copy.deepcopy(self.model)
        self.iterations: list[Iteration] = []
        self.held = {name for name, item in self.model.named_parameters() if item.requires_grad}

    def _step(self, engine: Engine, x: Tensor) -> float:
        recorder = Recorder(self.model)
        self.iterations.append(Iteration(torch.get_rng_state(), x.clone(), copies(self.model), recorder.calls))
        loss = super()._step(engine, x)
        recorder.close()
        self.iterations[-1].after = copies(self.model)
        return loss

    def after_backward(self) -> None:
        named = self.model.named_parameters()
        self.iterations[-1].gradients = {name: item.grad.clone() for name, item in named if item.grad is not None}


def is_refused(kind: str, plan: Plan, model: nn.Module) -> bool:
    """Check whether a handler has to refuse a model."""
    parameters = list(model.parameters())
    if any(map(is_lazy, parameters)):
        return True
    if any(map(is_lazy, model.buffers())):
        return kind in ("rcc", "alignment")  # it can't be copied
    if kind == "spectral":
        return not any(item.ndim > 1 and item.numel() and item.is_floating_point() for item in parameters)
    return False


def expected(kinds: list[str], recorded: Recorded) -> list[Values]:
    events = [event for iteration in recorded.iterations for event in iteration.events()]
    window = WindowTruth(mean_std(6.0, 20, 0.99), recorded.held, lambda place: True).follow(events)
    own = {name for name in recorded.held if recorded.iterations[0].weights[name].numel()}
    moved, rate = updates(recorded.iterations, own), recorded.optimizer.param_groups[0]["lr"]
    every = []
    for place, iteration in enumerate(recorded.iterations):
        before, after, has_step = iteration.weights, iteration.after, bool(own & {*iteration.gradients})
        truths = {
            "grad": lambda place=place: {f"grad/{name}": x for name, x in window.published[place].items()},
            "update": lambda place=place: moved[place],
            "activation": lambda iteration=iteration: activations(recorded.initial, iteration, recorded.held),
            "spectral": lambda step=has_step, a=before, b=after: spectral(recorded.initial, a, b, recorded.held, step),
            "stats": lambda after=after: statistics_of_step(after.values(), rate),
        }
        values: Values = {}
        for kind in truths.keys() & {*kinds}:
            values |= truths[kind]()
        every.append(values)
    return every


def tolerance(name: str) -> tuple[float, float]:
    """Relative and absolute, of a value."""
    if name.startswith("spectral/"):
        return 1e-3, 1e-6  # what power iteration is content with
    if name in ("grad/std", "grad/threshold"):
        return 1e-5, 1e-6
    if name.endswith("/mean"):
        return 1e-5, 1e-7  # the rounding of float32 numbers around 1, which cancel
    return 1e-5, 1e-8


def assert_close(reported: dict[str, float], truth: dict[str, float], where: str) -> None:
    # The truth has units of layers alone.
    reported = {name: x for name, x in reported.items() if name in truth or not name.endswith("/dead_fraction")}
    assert reported.keys() == truth.keys(), where
    for name, value in truth.items():
        rel, least = tolerance(name)
        if name == "grad/std":  # of norms that are rounded to float32
            least += torch.finfo(torch.float32).eps * truth["grad/mean"]
        assert reported[name] == pytest.approx(value, rel=rel, abs=least), f"{where}: {name}"


def published_by(training: Training) -> list[dict[str, float]]:
    """Runs a training; what stands in its metrics after each iteration."""
    published: list[dict[str, float]] = []

    @training.engine.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        values = {name: float(value) for name, value in engine.state.metrics.items()}
        assert all(math.isfinite(x) for name, x in values.items() if re.search(UNCHECKED, name)), values
        published.append({name: value for name, value in values.items() if not re.search(UNCHECKED, name)})

    before = training.footprint()
    training.run()
    assert training.footprint() | of_modules(training) == before | of_modules(training)
    return published


def of_modules(training: Training) -> dict[str, Any]:
    """Return the hooks of a model's modules; lazy modules remove hooks of their own in their first pass."""
    return {key: value for key, value in training.footprint().items() if key in ("hooks", "module")}


def recorded_like(training: Training, plan: Plan) -> Recorded:
    """The same without monitors, which has to be the same to the last bit."""
    recorded = Recorded(plan)
    recorded.run()
    assert of_modules(training) == of_modules(recorded)
    assume(all(bool(item.isfinite().all()) for item in recorded.iterations[-1].after.values()))
    for place, (actual, references) in enumerate(zip(training.states, recorded.states, strict=True)):
        assert_same(actual, references, f"iteration {place + 1}")
    return recorded


def check(plan: Plan, kinds: Iterable[str]) -> None:
    training = Training(plan)
    attached = []
    for kind in kinds:
        if is_refused(kind, plan, training.model):
            with pytest.raises(ValueError, match="model"):
                HANDLERS[kind](training.model, training.optimizer)
        else:
            attached.append(kind)
            HANDLERS[kind](training.model, training.optimizer).attach(training.engine)
    if not attached:
        return
    published = published_by(training)
    truths = expected(attached, recorded_like(training, plan))
    for place, (values, truth) in enumerate(zip(published, truths, strict=True)):
        assert_close(values, truth, f"iteration {place + 1}")


def every_block(test: Callable[..., None]) -> Callable[..., None]:
    """Examples with every block under all handlers, with tied linear layers, the first block called twice."""
    for first in range(0, len(BLOCKS), 3):
        blocks = [*BLOCKS][first : first + 3]
        plan = Plan((*blocks, "linear", "two and tanh"), 0, True, None, False, True, "momentum")
        test = example(plan, [*HANDLERS], len(HANDLERS))(test)
    return test


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
@given(plans(), st.permutations([*HANDLERS]), st.integers(1, len(HANDLERS)))
@every_block
@examples(15)
def test_any_model(plan, order, count):
    check(plan, order[:count])

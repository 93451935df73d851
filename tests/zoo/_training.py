"""A training of a model of the zoo, with all monitors or with what records the truth."""

from __future__ import annotations

import copy
from typing import Any

import torch
from ignite.engine import Engine, Events

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    RCCHandler,
    SpectralNormHandler,
    StepStatsHandler,
    WeightUpdateHandler,
)
from ignite_monitor.scaling import AlignmentHandler
from tests.hard_use._truth import copies
from tests.zoo._cases import Case
from tests.zoo._truth import Calls, Iteration, call

ITERATIONS = 4
RATE = 3e-3


class Training:
    """Four iterations of a model."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = case.make().train()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=RATE)
        self.engine = Engine(self._step)
        torch.manual_seed(1)
        self.batches = [case.batch() for _ in range(ITERATIONS)]

    def _step(self, engine: Engine, batch: dict[str, Any]) -> float:
        self.optimizer.zero_grad()
        loss = self.case.loss(call(self.model, batch))
        loss.backward()
        self.after_backward()
        self.optimizer.step()
        return loss.item()

    def after_backward(self) -> None: ...

    def run(self) -> dict[str, Any]:
        """All that monitors must not touch."""
        torch.manual_seed(2)
        losses: list[float] = []
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
        self.engine.run(self.batches)
        return {
            "losses": losses,
            "model": dict(self.model.state_dict()),
            "gradients": [each.grad for each in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }


class Recorded(Training):
    """Without monitors, and recorded."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.initial = copy.deepcopy(self.model)
        self.held = {name for name, each in self.model.named_parameters() if each.requires_grad}
        self.iterations: list[Iteration] = []

    def _step(self, engine: Engine, batch: dict[str, Any]) -> float:
        self.iterations.append(Iteration(torch.get_rng_state(), batch, copies(self.model)))
        calls = Calls(self.model)
        loss = super()._step(engine, batch)
        self.iterations[-1].calls = calls.close()
        self.iterations[-1].after = copies(self.model)
        return loss

    def after_backward(self) -> None:
        named = self.model.named_parameters()
        self.iterations[-1].gradients = {name: each.grad.clone() for name, each in named if each.grad is not None}


class Monitored(Training):
    """With all monitors; what they publish in each iteration."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        of, optimizer = self.model, self.optimizer
        everything = dict.fromkeys(
            ("activations", "parameters", "gradients", "activation_differences", "parameter_differences"), True
        )
        for monitor in (
            GradMonitor(of, optimizer),
            WeightUpdateHandler(of, optimizer, sample_size=None),
            ActivationHandler(of, **everything, reference="init", attention=True),
            RCCHandler(of),
            SpectralNormHandler(of, updates=True, per_parameter=True, method="svd"),
            StepStatsHandler(of, optimizer),
            AlignmentHandler(of, sample_size=10**6),
        ):
            monitor.attach(self.engine)
        self.published: list[dict[str, float]] = []
        self.engine.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda engine: self.published.append({name: float(each) for name, each in engine.state.metrics.items()}),
        )

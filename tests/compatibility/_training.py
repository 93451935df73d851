"""A training run of a model of other packages, with all monitors or recorded without them."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_monitor import (
    ActivationHandler,
    CurvatureHandler,
    DriftMonitor,
    GradientNoiseScaleHandler,
    GradMonitor,
    HealthyCheckpoint,
    HistogramHandler,
    MeanStdThreshold,
    OptimizerStateHandler,
    RCCHandler,
    ReplayCheckHandler,
    ReplicaCheckHandler,
    RollbackHandler,
    RoutingHandler,
    SetupCheck,
    SpectralNormHandler,
    SpikeMonitor,
    SpikeRecorder,
    StepStatsHandler,
    WeightUpdateHandler,
)
from ignite_monitor.scaling import AlignmentHandler
from tests._truth import Iteration, copies
from tests.compatibility._cases import Case

ITERATIONS = 4
CURVED = 3
"""Iteration in which the curvature is measured: Adam has second moments by then."""
RATE = 3e-3
MICRO_BATCHES = 2


class Training:
    """Four iterations of a model, each step of two micro-batches.

    ``make_step`` divides one batch, and these are lists of dictionaries that are divided already.
    """

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = case.make().train()
        for name, buffer in self.model.named_buffers():
            if name.endswith("correction_bias"):  # 0 until trained: a router adds it to its logits to choose experts
                torch.nn.init.normal_(buffer, std=0.3)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=RATE)
        self.engine = Engine(self._step)
        torch.manual_seed(1)
        self.batches = [[case.batch() for _ in range(MICRO_BATCHES)] for _ in range(ITERATIONS)]

    def _step(self, engine: Engine, batch: list[dict[str, Any]]) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for part in batch:
            loss = self.case.loss(call(self.model, part)) / len(batch)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total

    def run(self) -> dict[str, Any]:
        """Train; return all that monitors must not change."""
        torch.manual_seed(2)
        losses: list[float] = []
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
        self.engine.run(self.batches)
        return {
            "losses": losses,
            "model": dict(self.model.state_dict()),
            "gradients": [item.grad for item in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }


class Recorded(Training):
    """Without monitors, and recorded."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.held = {name for name, item in self.model.named_parameters() if item.requires_grad}
        self.iterations: list[Iteration] = []
        self.tokens: list[dict[str, Tensor]] = []  # of an iteration: path of the router -> number of tokens per expert
        modules = dict(self.model.named_modules())
        for name, module in modules.items() if self.case.has_routers else ():
            if name.endswith(".experts"):
                place = name.removesuffix("experts")
                router = f"{place}gate" if f"{place}gate" in modules else f"{place}router"
                module.register_forward_pre_hook(functools.partial(self._count, router), with_kwargs=True)

    def _count(self, router: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
        counts = torch.bincount(chosen.flatten(), minlength=module.num_experts)
        self.tokens[-1][router] = self.tokens[-1].get(router, 0) + counts

    def _step(self, engine: Engine, batch: list[dict[str, Any]]) -> float:
        iteration = Iteration(torch.get_rng_state(), batch, copies(self.model))
        self.iterations.append(iteration)
        self.tokens.append({})
        loss = super()._step(engine, batch)
        named = self.model.named_parameters()
        iteration.gradients = {name: item.grad.clone() for name, item in named if item.grad is not None}
        iteration.after = copies(self.model)
        return loss


class Monitored(Training):
    """Train with all monitors, and record the metrics of each iteration."""

    def __init__(self, case: Case, directory: Path) -> None:
        super().__init__(case)
        of, optimizer = self.model, self.optimizer
        state = {"model": of, "optimizer": optimizer}
        everything = dict.fromkeys(("activations", "parameters", "gradients"), True)
        losses = SpikeMonitor(
            lambda engine: engine.state.output, threshold=MeanStdThreshold(k=3.0, warmup=2), prefix="loss"
        )
        loss = functools.partial(loss_of_first_part, case)
        curvature = CurvatureHandler(of, optimizer, loss=loss)
        self.setup_check = SetupCheck(of, optimizer)
        self.checkpoint = HealthyCheckpoint(state, directory / "checkpoints", n_saved=None)
        for monitor in (
            self.setup_check,
            GradMonitor(of, optimizer),
            losses,
            DriftMonitor(lambda engine: engine.state.output),
            SpikeRecorder(losses, directory),
            RollbackHandler(state, every=1),
            GradientNoiseScaleHandler(of, optimizer, micro_batches=MICRO_BATCHES, items=count_items),
            WeightUpdateHandler(of, optimizer, sample_size=None),
            OptimizerStateHandler(of, optimizer, sample_size=None),
            ReplicaCheckHandler(of, optimizer),
            ReplayCheckHandler(of, loss=loss),
            HistogramHandler(of),
            ActivationHandler(of, **everything, attention=True),
            SpectralNormHandler(of, updates=True, per_parameter=True),
            StepStatsHandler(of, optimizer),
        ):
            monitor.attach(self.engine)
        if case.library != "torch_geometric":  # whose linear layers are not torch's
            RCCHandler(of).attach(self.engine)
            AlignmentHandler(of, sample_size=10**6).attach(self.engine)
        if case.has_routers:
            RoutingHandler(of).attach(self.engine)
        curvature.attach(self.engine, Events.ITERATION_STARTED(once=CURVED))
        # Without monitors: spikes of so few losses do not count. Its iteration is always 1, so all states are saved.
        evaluator = Engine(lambda *_: None)
        evaluator.add_event_handler(Events.COMPLETED, self.checkpoint)
        self.engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: evaluator.run([0]))
        self.published: list[dict[str, float]] = []
        self.engine.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda engine: self.published.append({name: float(item) for name, item in engine.state.metrics.items()}),
        )


def count_items(batch: list[dict[str, Any]]) -> int:
    return sum(len(next(iter(part.values()))) for part in batch)


def loss_of_first_part(case: Case, model: nn.Module, batch: list[dict[str, Any]]) -> Tensor:
    return case.loss(call(model, batch[0]))


def call(model: nn.Module, batch: dict[str, Any]) -> Any:
    """A model's output: what is named by numbers is given by position."""
    batch = copy.deepcopy(batch)
    return model(
        *(value for key, value in batch.items() if key.isdigit()),
        **{key: value for key, value in batch.items() if not key.isdigit()},
    )

"""A training run whose loss falls at first and is constant then, so that a test decides when it diverges."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_monitor import GradMonitor, RollbackHandler
from tests import _helpers as helpers
from tests._helpers import Batch
from tests._models import make_model


def count_step(module: nn.Module, args: Any) -> None:
    if module.training:
        module.steps += 1


def make_net() -> nn.Module:
    """Model with dropout, running statistics, a buffer outside of state_dict, and a buffer that is not finite."""
    model = make_model()
    model.register_buffer("steps", torch.zeros(()), persistent=False)
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    model.register_forward_pre_hook(count_step)
    return model


make_batches = functools.partial(helpers.make_batches, factor=300.0, size=16)  # targets of spikes are so much larger


class Training:
    """A trainer, what it trains, and what there was after each iteration."""

    def __init__(
        self,
        optimizer: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        *,
        scaler: bool = False,
        accumulate: int = 1,
        monitor: dict[str, Any] | None = None,
        handler: bool = True,
        names: Iterable[str] = ("model", "optimizer", "scaler", "ema"),
        **kwargs: Any,
    ) -> None:
        self.model = make_net()
        self.ema = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.optimizer = optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=7) if scaler else None
        self.metrics: dict[int, dict[str, float]] = {}
        self.accumulate = accumulate
        self.step = helpers.make_step(
            self.model, self.optimizer, every=accumulate, loss_of=self.loss_of, scaler=self.scaler, zero_at="end"
        )
        self.trainer = Engine(self.train_step)
        self.objects = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        self.monitor = None
        if monitor is not None:
            self.monitor = GradMonitor(self.model, self.optimizer, scaler=self.scaler, **monitor)
            self.monitor.attach(self.trainer)
        self.rollback = RollbackHandler(self.objects, **{"every": 10} | kwargs)
        if handler:
            self.rollback.attach(self.trainer)
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, self._note_after)

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.scaler is not None):
            return F.mse_loss(model(batch[0]).float(), batch[1])

    def train_step(self, engine: Engine, batch: Batch) -> float:
        engine.state.loss = self.step(engine, batch) * (1.0 + 2.0 * 0.8**engine.state.iteration)
        if engine.state.iteration % self.accumulate == 0 and "ema" in self.objects:
            self.ema.update_parameters(self.model)
        return engine.state.loss.item()

    def state(self) -> dict[str, Any]:
        """All there is, copied, and buffers that no state_dict holds."""
        state = {name: item.state_dict() for name, item in self.objects.items()}
        return copy.deepcopy(state | {"steps": self.model.steps})

    def states(self) -> dict[int, Any]:
        """States by the iteration that they are after, noted from here on."""
        noted: dict[int, Any] = {}
        self.trainer.add_event_handler(
            Events.ITERATION_STARTED, lambda engine: noted.update({engine.state.iteration - 1: self.state()})
        )
        return noted

    def _note_after(self, engine: Engine) -> None:
        self.metrics[engine.state.iteration] = dict(engine.state.metrics)

    def at(self, iteration: int, function: Callable[[], Any]) -> None:
        """Call a function as an iteration starts."""
        self.trainer.add_event_handler(Events.ITERATION_STARTED(once=iteration), lambda _: function())

    def after_step(self, function: Callable[[Engine], Any]) -> None:
        """Call a function after each train step; if it returns a number, that is the output."""

        def train_step(engine: Engine, batch: Batch) -> Any:
            output = self.train_step(engine, batch)
            changed = function(engine)
            return output if changed is None else changed

        self.trainer._process_function = train_step

    def run(self, batches: Iterable[Batch], request: Iterable[int] = ()) -> None:
        """Train; a rollback is requested in the named iterations."""
        batches = list(batches)

        def ask(engine: Engine) -> None:
            if engine.state.iteration in request:
                self.rollback.request("asked to")

        with self.trainer.add_event_handler(Events.ITERATION_STARTED, ask):
            self.trainer.run(batches, max_epochs=1)

    def of(self, name: str) -> dict[int, float]:
        """One of the handler's values, by iteration."""
        key = f"rollback/{name}"
        return {iteration: values[key] for iteration, values in self.metrics.items() if key in values}

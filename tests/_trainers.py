"""Small training runs, independent references for them, and values that a monitor published."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_monitor import GradMonitor
from tests._helpers import assert_same as assert_same
from tests._oracle import Oracle as Oracle
from tests._oracle import mean_of as mean_of
from tests._oracle import mean_std as mean_std

Batch = tuple[Tensor, Tensor]


def make_model(seed: int = 0, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8, bias=bias), nn.Tanh(), nn.Linear(8, 2, bias=bias))


def make_batches(count: int, spikes: Iterable[int] = (), factor: float = 1e3, seed: int = 0) -> list[Batch]:
    """Batches of noise; in those of ``spikes`` (counted from 1, as iterations are) the targets are ``factor`` apart."""
    generator = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(count)]
    for iteration in spikes:
        inputs, targets = batches[iteration - 1]
        batches[iteration - 1] = (inputs, targets * factor)
    return batches


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def norm_of(tensors: Iterable[Tensor | None], norm_type: float = 2.0) -> float:
    """The norm in float64, in pure arithmetic."""
    values = [abs(value) for tensor in tensors if tensor is not None for value in _numbers(tensor)]
    if norm_type == math.inf:
        return max(values)
    return math.fsum(value**norm_type for value in values) ** (1 / norm_type)


def _numbers(tensor: Tensor) -> list[Any]:
    tensor = tensor.detach().to_dense()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).flatten().tolist()


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> float:
    """The norm of the gradients that lie at a model's parameters."""
    return norm_of((parameter.grad for parameter in model.parameters()), norm_type)


def true_norm(model: nn.Module, batches: Iterable[Batch]) -> float:
    """The norm of the gradient of the sum of the batches' losses, by a float64 copy of the model."""
    model = copy.deepcopy(model).double()
    model.zero_grad()
    for inputs, targets in batches:
        loss_of(model, (inputs.double(), targets.double())).backward()
    return grad_norm(model)


class Recorder:
    """What an engine's state holds at the end of every iteration."""

    def __init__(self, engine: Engine, flag: str = "unhealthy_spike", norm: str = "grad_norm") -> None:
        self.metrics: list[dict[str, float]] = []
        self.flags: list[bool] = []
        self.norms: list[float | None] = []
        self._names = flag, norm
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._record)

    def _record(self, engine: Engine) -> None:
        self.metrics.append({name: float(value) for name, value in engine.state.metrics.items()})
        flag, norm = (getattr(engine.state, name, None) for name in self._names)
        self.flags.append(bool(flag))
        self.norms.append(None if norm is None else float(norm))

    def of(self, name: str) -> list[float | None]:
        """One metric over the iterations, None where it was not reported."""
        return [values.get(name) for values in self.metrics]


def train(
    train_step: Callable[[Engine, Any], Any], batches: Sequence[Any], *monitors: GradMonitor, event: Any = None
) -> Recorder:
    """Run a train step over batches once, with monitors attached."""
    engine = Engine(train_step)
    for monitor in monitors:
        monitor.attach(engine, event or Events.ITERATION_STARTED)
    recorder = Recorder(engine, *_names(monitors))
    engine.run(batches, max_epochs=1)
    return recorder


def _names(monitors: Sequence[GradMonitor]) -> tuple[str, str]:
    return (monitors[0].flag, f"{monitors[0].prefix}_norm") if monitors else ("unhealthy_spike", "grad_norm")


def training_state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters, buffers, gradients and optimizer states, copied."""
    return copy.deepcopy(
        {
            "model": dict(model.state_dict()),
            "grads": [parameter.grad for parameter in model.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
    )

"""Helpers shared by tests: a small problem, trainers for it, and a record of everything that a monitor may change."""

from __future__ import annotations

import copy
import functools
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers.base_logger import BaseLogger, BaseOutputHandler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from tests._models import make_model
from tests._truth import copies, norm

Batch = tuple[Tensor, Tensor]

torch.set_num_threads(1)  # of so little work each, more of them wait for each other

# What clocks and operating systems say is not the same twice.
UNSTEADY = {f"step/{name}" for name in ("time_ms", "items_per_s", "resident_memory_mb")}
UNSTEADY |= {"step/data_wait_ms", "step/data_wait_share"}

LONG = pytest.mark.skipif(os.environ.get("FULL_MATRIX", "0") == "0", reason="FULL_MATRIX is not set")


def make_batches(
    count: int,
    spikes: Iterable[int] = (),
    factor: float = 1e3,
    *,
    seed: int = 1,
    size: int = 8,
    features: int = 6,
    outputs: int = 3,
) -> list[Batch]:
    """Batches of inputs and targets; those at the 1-based places ``spikes`` have targets ``factor`` as large."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for place in range(1, count + 1):
        x, y = torch.randn(size, features, generator=generator), torch.randn(size, outputs, generator=generator)
        batches.append((x, y * factor if place in spikes else y))
    return batches


mlp_batches = functools.partial(make_batches, seed=0, features=4, outputs=2)


def split(batch: Any, parts: int) -> Iterable[Any]:
    """A batch in micro-batches: of two ranks with half a batch each, those of the whole batch."""
    if isinstance(batch, Tensor):
        return [batch[part::parts] for part in range(parts)]
    return zip(*(split(item, parts) for item in batch), strict=True)


def mse_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def make_step(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    parts: int = 1,
    *,
    every: int = 1,
    reduce_last: bool = False,
    loss_of: Callable[[nn.Module, Any], Tensor] = mse_loss,
    factor: Callable[[Engine], float] | None = None,
    scaler: Any = None,
    clip: float | None = None,
    closure: bool = False,
    by_hand: bool = False,
    zero_at: str = "start",
    set_to_none: bool = True,
    after_backward: Callable[[Engine], Any] = lambda engine: None,
    before_step: Callable[[Engine], Any] = lambda engine: None,
    after_step: Callable[[Engine], Any] = lambda engine: None,
    leave_out: Callable[[Engine], bool] = lambda engine: False,
) -> Callable[[Engine, Any], Tensor]:
    """The train step of most tests.

    Args:
        optimizer: one, or several that make their steps in order.
        parts: number of micro-batches; 1 hands the batch to ``loss_of`` as it is.
        every: iterations to an optimizer step.
        reduce_last: whether only the last backward before a step is reduced over ranks.
        loss_of: loss of the model and a batch.
        factor: what the loss of an iteration is multiplied by.
        scaler: GradScaler; gradients are unscaled before they are clipped.
        clip: largest norm of the gradients.
        closure: whether the optimizer's step evaluates the gradients.
        by_hand: whether gradients are computed without a backward, and then set.
        zero_at: whether gradients are cleared at the "start" of an iteration, at its "end", or "never".
        after_backward: called with the engine after each backward.
        before_step: called with the engine before the optimizer's step.
        after_step: called with the engine after it, before gradients are cleared.
        leave_out: whether no step is made.
    """

    optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]

    def zero_grad() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none)

    def backward(engine: Engine, batch: Any) -> Tensor:
        for place, part in enumerate(split(batch, parts) if parts > 1 else [batch], 1):
            is_last = place == parts and engine.state.iteration % every == 0
            with reduced_over_ranks(model, is_last or not reduce_last):
                loss = loss_of(model, part) * (1 if factor is None else factor(engine))
                scaled = loss if scaler is None else scaler.scale(loss)
                if by_hand:
                    set_gradients(model, scaled)
                else:
                    scaled.backward()
            after_backward(engine)
        return loss.detach()

    def train_step(engine: Engine, batch: Any) -> Tensor:
        if closure:
            before_step(engine)
            loss = optimizers[0].step(lambda: (zero_grad(), backward(engine, batch))[1])
            after_step(engine)
            return loss
        if zero_at == "start" and (every == 1 or engine.state.iteration % every == 1):
            zero_grad()
        loss = backward(engine, batch)
        if every > 1 and engine.state.iteration % every:
            return loss
        if scaler is not None and clip is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before_step(engine)
        if not leave_out(engine):
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
        after_step(engine)
        if zero_at == "end":
            zero_grad()
        return loss

    return train_step


def replaced_out_of_place(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.clone()


def given_as_data(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad.data = gradient.clone()


PUT: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "=": replaced_out_of_place,
    "copy_": torch.no_grad()(lambda parameter, gradient: parameter.grad.copy_(gradient)),
    "data.copy_": lambda parameter, gradient: parameter.grad.data.copy_(gradient),
    "data=": given_as_data,
    "numpy": lambda parameter, gradient: np.copyto(parameter.grad.detach().numpy(), gradient.numpy()),
}


def set_gradients(model: nn.Module, loss: Tensor) -> None:
    """Set the gradients of all parameters without a backward."""
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def in_turn(*steps: Callable[[Engine, Any], Any]) -> Callable[[Engine, Any], Any]:
    """A train step that makes several in order, as those of a GAN's models."""
    return lambda engine, batch: [step(engine, batch) for step in steps][-1]


def moves_of(model: nn.Module, step: Callable[[Engine, Any], Any]) -> tuple[Callable[[Engine, Any], Any], list[Any]]:
    """Return the train step, and a list of how far each of its calls moves every parameter of the model."""
    moves: list[dict[str, float]] = []

    def train_step(engine: Engine, batch: Any) -> Any:
        before = copies(model)
        output = step(engine, batch)
        moves.append({name: norm(item - before[name]) for name, item in model.named_parameters()})
        return output

    return train_step, moves


@contextmanager
def reduced_over_ranks(model: Any, reduced: bool) -> Iterator[None]:
    """Whether a wrapped model's gradients are reduced over ranks in a backward."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(reduced)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with nullcontext() if reduced or not hasattr(model, "no_sync") else model.no_sync():
            yield


class Recorder:
    """Record the attributes of an engine's state at the end of every iteration."""

    def __init__(self, engine: Engine, *monitors: Any) -> None:
        self.metrics: list[dict[str, float]] = []
        self.flags: list[bool] = []
        self.norms: list[float | None] = []
        first = monitors[0] if monitors else None
        self._names = getattr(first, "flag", "unhealthy_spike"), f"{getattr(first, 'prefix', 'grad')}_norm"
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
    train_step: Callable[[Engine, Any], Any], batches: Iterable[Any], *monitors: Any, event: Any = None
) -> Recorder:
    """Run a train step once over batches, with monitors attached."""
    engine = Engine(train_step)
    for monitor in monitors:
        monitor.attach(engine, event or Events.ITERATION_STARTED)
    recorder = Recorder(engine, *monitors)
    engine.run(batches, max_epochs=1)
    return recorder


def run_monitored(*args: Any, **kwargs: Any) -> list[dict[str, float]]:
    """The metrics of every iteration, as floats; arguments are those of :func:`train`."""
    return train(*args, **kwargs).metrics


def training_state(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    """Parameters, buffers, gradients and optimizer states, copied."""
    return copy.deepcopy(
        {
            "model": dict(model.state_dict()),
            "grads": [parameter.grad for parameter in model.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
    )


def make_trainer(lr: float = 0.05, parts: int = 1) -> tuple[nn.Module, Optimizer, Engine]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, optimizer, Engine(make_step(model, optimizer, parts))


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> float:
    """The norm of the gradients that a model's parameters have."""
    return norm((parameter.grad for parameter in model.parameters()), norm_type)


def footprint(engine: Engine, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Everything that detaching has to restore, as plain comparable values."""
    hooks = {
        f"{name}.{kind}": len(getattr(module, kind))
        for name, module in model.named_modules()
        for kind in vars(module)
        if kind.endswith(("_hooks", "_hooks_with_kwargs"))
    }
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks[f"{name}.{kind}"] = len(getattr(parameter, kind) or ())
        hooks[f"{name}.requires_grad"] = parameter.requires_grad
    return {
        "handlers": {event: list(handlers) for event, handlers in engine._event_handlers.items() if handlers},
        "process_function": engine._process_function,
        "state": sorted(vars(engine.state)),
        "metrics": dict(engine.state.metrics),
        "module": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": hooks,
        "optimizer": {kind: len(value) for kind, value in vars(optimizer).items() if kind.endswith("_hooks")},
        "optimizer attributes": sorted(vars(optimizer)),
        "step": getattr(optimizer.step, "__func__", optimizer.step),
        **{
            kind: len(getattr(torch_optimizer, kind))
            for kind in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
        },
    }


def hooks_only(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Everything to restore when a run ends, with the monitor still attached."""
    return {key: value for key, value in snapshot.items() if key not in {"handlers", "state", "metrics"}}


def same(one: Any, other: Any) -> bool:
    """Compare two nested values bitwise: dtypes, shapes, NaN payloads and signs of zeros included."""
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


def assert_same(one: Any, other: Any, where: str = "value") -> None:
    """Assert that two nested values are bitwise equal, and name the place where they are not."""
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor), where
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert bits(one) == bits(other), f"{where}: {one} {other}"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}[{i}]")
    elif isinstance(one, float):
        assert isinstance(other, float), where
        assert struct.pack("d", one) == struct.pack("d", other), f"{where}: {one} {other}"
    else:
        assert one == other or (one != one and other != other), f"{where}: {one} {other}"


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor's values; of a DTensor those of this rank."""
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def unset_default_device() -> None:
    """Work around torch 2.6, where None counts as a default device that can't be read."""
    torch.set_default_device(None)
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars in a folder of event files: tag -> (step, value), in the order of writing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class ListHandler(BaseOutputHandler):
    def __call__(self, engine, logger, event_name):
        named = self._setup_output_metrics_state_attrs(engine, key_tuple=False)
        logger.written.append((self.global_step_transform(engine, event_name), named))


class ListLogger(BaseLogger):
    """The smallest logger that Ignite's base class allows."""

    def __init__(self):
        self.written = []

    def _create_output_handler(self, *args, **kwargs):
        return ListHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args, **kwargs):
        raise NotImplementedError

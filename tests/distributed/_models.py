"""Models, the ways to share them among ranks, and one training of any of them."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed._launch import WORLD

Rows = list[dict[str, float]]


class Net(nn.Module):
    """Sizes that two ranks can't share evenly, one of them so small that a rank holds nothing of it."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(1))
        if unused:
            self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale


def net(make: Callable[..., Any] = Net, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return make(**kwargs)


def mesh(shape: tuple[int, ...] = (WORLD,)) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def fsdp(model: Any, shape: tuple[int, ...] = (WORLD,), inner: Iterable[str] = ("first",)) -> Any:
    """Shared out by ``fully_shard``, those of its modules by themselves that ``inner`` names."""
    from torch.distributed.fsdp import fully_shard

    for name in inner:
        fully_shard(model.get_submodule(name), mesh=mesh(shape))
    return fully_shard(model, mesh=mesh(shape))


def ddp(model: nn.Module, **kwargs: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **kwargs)


def whole(value: Any) -> Tensor:
    """A copy of all ranks' parts."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


def share(batch: Any, rank: int | None, at: int = 4) -> Any:
    """The rows of the first rank, or the others; without a rank all."""
    if isinstance(batch, Tensor):
        return batch if rank is None else batch[:at] if rank == 0 else batch[at:]
    return tuple(share(part, rank, at) for part in batch)


def words(count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of two words each, and targets."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 11, (8, 2), generator=generator), torch.randn(8, 3, generator=generator))
        for _ in range(count)
    ]


def run(train_step: Callable[[Engine, Any], Any], batches: Any, *monitors: Any, at: Any = None) -> Rows:
    """Train with monitors attached to an event; what is published in each iteration, and what a GradMonitor flags."""
    engine = Engine(train_step)
    for monitor in monitors:
        monitor.attach(engine, at or Events.ITERATION_STARTED)
    published: Rows = []

    @engine.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        flag = {"flag": float(engine.state.unhealthy_spike)} if hasattr(engine.state, "unhealthy_spike") else {}
        published.append({name: float(value) for name, value in engine.state.metrics.items()} | flag)

    engine.run(batches, max_epochs=1)
    return published


@contextmanager
def synchronised(model: Any, whether: bool = True) -> Iterator[None]:
    """Check whether the gradients of a backward are reduced over ranks."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(whether)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with nullcontext() if whether or not hasattr(model, "no_sync") else model.no_sync():
            yield


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int | None = None,
    at: int = 4,
    *,
    every: int = 1,
    micro: int = 1,
    quiet: bool = False,
    set_to_none: bool = True,
    skips_spikes: bool = False,
    after_backward: Callable[[Engine], None] = lambda engine: None,
) -> Callable[[Engine, Any], None]:
    """The train step of most scenarios, on a rank's rows of each batch.

    Args:
        every: iterations to an optimizer step.
        micro: micro-batches to an iteration.
        quiet: whether only the last backward before a step is reduced over ranks.
    """

    def train_step(engine: Engine, batch: Any) -> None:
        iteration = engine.state.iteration
        if (iteration - 1) % every == 0:
            optimizer.zero_grad(set_to_none)
        x, y = share(batch, rank, at)
        for part in range(micro):
            is_last = iteration % every == 0 and part == micro - 1
            with synchronised(model, is_last or not quiet):
                F.mse_loss(model(x[part::micro]), y[part::micro]).backward()
            after_backward(engine)
        if iteration % every == 0 and not (skips_spikes and engine.state.unhealthy_spike):
            optimizer.step()

    return train_step


@contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """One entry for each all_reduce that is called meanwhile."""
    calls: list[int] = []
    original = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    with unittest.mock.patch.object(dist, "all_reduce", counting):
        yield calls

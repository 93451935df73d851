"""Two ranks in processes of their own: a test starts them, a worker module runs its scenarios and saves the results.

:func:`train` is the training run of all scenarios.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import time
import traceback
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests._helpers import Recorder, make_step

ROOT = Path(__file__).resolve().parents[1]
WORLD = 2
SHARDS = hasattr(torch.cpu.Stream, "record_event")
"""Whether fully_shard works on the CPU, which it does not in torch 2.6."""
NEEDS_SHARDS = "fully_shard on the CPU needs torch 2.7"
NEEDS_EXPORT = None if SHARDS else "is not supported, but 2.7 or newer"
"""What parametrize() raises with torch 2.6."""
PATIENCE = 600.0
"""How many seconds anything may take: what never ends is to fail, and not what a busy machine delays."""


def launch(worker: str, folder: Path, names: Iterable[str]) -> list[tuple[int, str]]:
    """Run a worker's scenarios on both ranks, as scripts; their exit codes and what they wrote to stderr."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.distributed.{worker}", str(folder), str(rank), *names],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        errors = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
        return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()


@functools.cache
def imported() -> Any:
    """Fork processes from one that has imported all modules, because the import takes longer than most scenarios."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "ignite.distributed", "ignite.handlers"])
    with unittest.mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()
    return context


def _run_rank(module: str, folder: Path, rank: int, names: list[str], environment: dict[str, str]) -> None:
    with (folder / f"stderr.{rank}").open("wb") as error:
        os.dup2(error.fileno(), 2)
    faulthandler.enable()
    os.environ.update(environment)
    sys.argv[1:] = [str(folder), str(rank), *names]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def launched(
    worker: str,
    folder: Path,
    names: Iterable[str],
    timeout: float = PATIENCE,
    package: str = "tests.distributed",
    world: int = WORLD,
) -> Callable[[str], list[Any]]:
    """Run a worker's scenarios; name -> what it came to on each rank, where an error fails the test that asks.

    Whether processes end cleanly has a test of its own: these end without tearing the interpreter down.
    """
    folder.mkdir(exist_ok=True)
    names, environment = list(names), {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        imported().Process(target=_run_rank, args=(f"{package}.{worker}", folder, rank, names, environment))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + timeout
    for rank in ranks:
        rank.join(max(0, end - time.monotonic()))
        rank.kill()
        rank.join()
    errors = [(folder / f"stderr.{rank}").read_text() for rank in range(world)]
    assert all(rank.exitcode == 0 for rank in ranks), errors

    def load(name: str) -> list[Any]:
        paths = [folder / f"{name}.{rank}.pt" for rank in range(world)]
        both = [torch.load(path, weights_only=True) for path in paths if path.exists()]
        for result in both:
            if _is_unsupported(result):
                pytest.skip("this torch is too old")
            if "error" in result:
                pytest.fail(f"{name}: {result['error']}")
        assert len(both) == world, f"{name} was not run, since a scenario before it failed: {errors}"
        return both

    return load


def _is_unsupported(result: dict[str, Any]) -> bool:
    return NEEDS_EXPORT is not None and any(text in str(result) for text in (NEEDS_SHARDS, NEEDS_EXPORT))


def run_scenarios(
    scenarios: dict[str, Callable[[int], dict[str, Any]]],
    left_standing: Iterable[str] = (),
    stays: Iterable[str] = (),
    world: int = WORLD,
) -> None:
    """Run the scenarios of a worker: ``python -m tests.distributed.WORKER FOLDER RANK NAME …``.

    A rank whose scenario raises ends: the other one does not wait for it, and fails too.

    Args:
        scenarios: by name.
        left_standing: those after which the process group is not torn down.
        stays: those whose last rank waits for the result of the first.
        world: number of ranks.
    """
    folder, rank, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    gc.freeze()
    store, limit = f"file://{folder / 'store'}", datetime.timedelta(seconds=PATIENCE / 5)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    for name in names:
        try:
            result = scenarios[name](rank)
        except Exception:  # noqa: BLE001
            result = {"error": traceback.format_exc()}
        while name in stays and rank and not (folder / f"{name}.0.pt").exists():
            time.sleep(0.05)
        torch.save(result, folder / f"{name}.{rank}.pt")
        if "error" in result and not _is_unsupported(result):
            return
    if dist.is_initialized() and not set(left_standing) & set(names):
        dist.destroy_process_group()


# Training


def mesh(shape: tuple[int, ...] = (WORLD,)) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def fsdp(model: Any, inner: Iterable[str] = (), shape: tuple[int, ...] = (WORLD,)) -> Any:
    """Shard a model by ``fully_shard``, the modules that ``inner`` names by themselves."""
    from torch.distributed.fsdp import fully_shard

    if not SHARDS:  # it would fail on one rank while the other one waits
        raise RuntimeError(NEEDS_SHARDS)
    for name in inner:
        fully_shard(model.get_submodule(name), mesh=mesh(shape))
    return fully_shard(model, mesh=mesh(shape))


def ddp(model: nn.Module, **kwargs: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **kwargs)


def unwrapped(model: nn.Module) -> nn.Module:
    """No wrapper: each rank has a model of its own."""
    return model


def inner_of(model: nn.Module) -> Any:
    return getattr(model, "module", model)


def whole(value: Any) -> Tensor:
    """A copy of all ranks' parts."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


def share(batch: Any, rank: int | None, rows: int = 4) -> Any:
    """The first rows for the first rank, and the others for the second one; without a rank all."""
    if isinstance(batch, (list, tuple)):
        return tuple(share(part, rank, rows) for part in batch)
    return batch if rank is None else batch[:rows] if rank == 0 else batch[rows:]


class Trained(NamedTuple):
    """A training run that has ended."""

    engine: Engine
    model: Any
    optimizer: Optimizer
    monitors: list[Any]
    rows: list[dict[str, float]]
    all_reduces: int


def train(
    make: Callable[[], nn.Module],
    wrap: Callable[[Any], Any],
    rank: int | None,
    batches: Iterable[Any],
    monitors: Callable[[Any, Any], list[Any]] = lambda model, optimizer: [],
    *,
    optimizer: Callable[[Any], Optimizer] = lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    step: Callable[[Any, Any], Callable[[Engine, Any], Any]] = make_step,
    event: Any = Events.ITERATION_STARTED,
    rows: int = 4,
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Trained:
    """Train a model that ranks share, each on its rows of the batches.

    Args:
        make: makes the model, from the same seed on all ranks.
        wrap: shares it among ranks.
        rank: this rank; None in one process, which trains the model without a wrapper on all rows.
        monitors: makes monitors of model and optimizer; a function among them is called with the engine in its turn.
        optimizer: makes it of the model.
        step: makes the train step of model and optimizer.
        event: when the monitors measure.
        rows: number of rows of the first rank.
        around: makes a context for the run, of the model.
    """
    torch.manual_seed(0)
    model = make() if rank is None else wrap(make())
    used = optimizer(model)
    attached = monitors(model, used)
    engine = Engine(step(model, used))
    for monitor in attached:
        monitor.attach(engine, event) if hasattr(monitor, "attach") else monitor(engine)
    recorder = Recorder(engine)
    with counted_collectives() as calls, around(model):
        engine.run([share(batch, rank, rows) for batch in batches], max_epochs=1)
    flagged = hasattr(engine.state, "unhealthy_spike")
    flags = [{"flag": float(flag)} if flagged else {} for flag in recorder.flags]
    published = [row | flag for row, flag in zip(recorder.metrics, flags, strict=True)]
    return Trained(engine, model, used, attached, published, len(calls))


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """One entry for each all_reduce that is called meanwhile."""
    calls: list[int] = []
    original = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    with unittest.mock.patch.object(dist, "all_reduce", counting):
        yield calls

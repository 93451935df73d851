"""Two ranks in processes of their own: a test starts them, a worker module runs its scenarios and saves the results."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
PATIENCE = 600.0
"""How many seconds anything may take: what never ends is to fail, and not what a busy machine delays."""


def launch(
    worker: str, folder: Path, names: Iterable[str], timeout: float = PATIENCE, package: str = "tests.distributed"
) -> list[tuple[int, str]]:
    """Run a worker's scenarios on both ranks; their exit codes and what they wrote to stderr."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"{package}.{worker}", str(folder), str(rank), *names],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        errors = [rank.communicate(timeout=timeout)[1] for rank in ranks]
        return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()


def launched(worker: str, folder: Path, names: Collection[str], **kwargs: Any) -> Callable[[str], list[Any]]:
    """Run a worker's scenarios; name -> what it came to on each rank, where an error fails the test that asks.

    Torch's own threads abort a process now and then while the interpreter is torn down, without monitors too. All
    results are saved by then, and whether processes end cleanly has a test of its own.
    """
    ends = launch(worker, folder, names, **kwargs)
    assert all(code in (0, -signal.SIGABRT) for code, _ in ends), ends
    assert all((folder / f"{name}.{rank}.pt").exists() for name in names for rank in range(WORLD)), ends

    def load(name: str) -> list[Any]:
        both = [torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in range(WORLD)]
        for rank, result in enumerate(both):
            if "error" in result:
                pytest.fail(f"rank {rank}: {result['error']}")
        return both

    return load


def run_scenarios(scenarios: dict[str, Callable[[int], dict[str, Any]]], left_standing: Iterable[str] = ()) -> None:
    """What a worker does as ``python -m tests.distributed.WORKER FOLDER RANK NAME …``.

    After a scenario that is left standing the process group is not torn down.
    """
    folder, rank, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group(
        os.environ.get("TEST_BACKEND", "gloo"),
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=PATIENCE / 2),
    )
    for name in names:
        try:
            result = scenarios[name](rank)
        except Exception:  # noqa: BLE001
            result = {"error": traceback.format_exc()}
        torch.save(result, folder / f"{name}.{rank}.pt")
    if dist.is_initialized() and not set(left_standing) & set(names):
        dist.destroy_process_group()

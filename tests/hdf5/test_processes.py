"""Several processes: one that is killed, one that reads while another writes, two ranks, forked ones."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import h5py
import pytest
import torch

from ignite_monitor import HDF5Logger, read_hdf5
from tests.hdf5._writer import write_forever

ROOT = Path(__file__).resolve().parents[2]

# Its processes have imported everything, and are ready in milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.hdf5._writer"])


@contextmanager
def writing(path: Path, mode: str, start: int = 0):
    """A process that writes until it is killed, and the number of iterations it has completed."""
    completed = PROCESSES.Value("q", -1, lock=False)
    process = PROCESSES.Process(target=write_forever, args=(path, mode, start, completed))
    process.start()
    try:
        yield process, completed
    finally:
        process.kill()
        process.join()
        process.close()


def check(path: Path, completed: int) -> int:
    """The last step; all values are right and none is missing but the last 50 iterations."""
    with h5py.File(path, "r") as file:
        assert len(file["rows"]) >= 0
    read = read_hdf5(path)
    last = int(read["m0"].steps[-1]) if "m0" in read else 0
    assert completed - last <= 50
    for i in range(20) if last else ():
        steps, values = read[f"m{i}"]
        assert steps.tolist() == list(range(1, last + 1))
        assert values.tolist() == [step + i / 10 for step in range(1, last + 1)]
    if last >= 3:
        assert read["rare"].steps.tolist() == list(range(3, last + 1, 3))
    tops = [step for name, series in read.items() if name.startswith("top/") for step in series.steps.tolist()]
    assert sorted(tops) == list(range(101, last + 1))
    return last


def test_killed_at_twenty_random_moments_and_resumed(tmp_path):
    chance, path, last = random.Random(0), tmp_path / "run.h5", 0
    for turn in range(20):
        if turn % 5 == 0:
            path.unlink(missing_ok=True)
            last = 0
        start = max(0, last - chance.randrange(30))
        with writing(path, "a", start) as (process, completed):
            wanted = start + chance.randrange(1, 400)
            while completed.value < wanted:
                assert process.is_alive()
            time.sleep(chance.random() / 200)
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
            last = check(path, completed.value)


def test_killed_while_the_file_is_made(tmp_path):
    chance, made = random.Random(1), []
    for turn in range(20):
        path = tmp_path / f"{turn}.h5"
        with writing(path, "x") as (process, completed):
            while not list(tmp_path.glob(f".{turn}.h5*")) and not path.exists():
                assert process.is_alive()
            time.sleep(chance.random() / 100)
            process.kill()
            process.join()
            made.append(path.exists())
            if path.exists():
                check(path, completed.value)
    assert any(made)


def test_read_while_it_is_written(tmp_path):
    path, seen = tmp_path / "run.h5", [0]
    with writing(path, "x") as (process, completed):
        while completed.value < 0:
            assert process.is_alive()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            seen.append(check(path, completed.value))
    assert seen == sorted(seen)
    assert len(set(seen)) > 5


RANK = """
import sys
import ignite.distributed as idist
import torch.distributed as dist
from ignite.engine import Engine, Events
from ignite.metrics import Average
from ignite_monitor import HDF5Logger, read_hdf5

path, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=2)
engine = Engine(lambda engine, batch: float(batch + 10 * rank))
Average().attach(engine, "average")
with HDF5Logger(path) as logger:
    logger.attach_output_handler(engine, Events.ITERATION_COMPLETED, tag="train", output_transform=lambda x: x)
    logger.attach_output_handler(engine, Events.EPOCH_COMPLETED, tag="train", metric_names=["average"])
    engine.run(range(4))
dist.barrier()
assert read_hdf5(path)["train/output"].values.tolist() == [0, 1, 2, 3]
assert read_hdf5(path)["train/average"].values.tolist() == [6.5]
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_rank_zero_writes(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(tmp_path / "run.h5"), str(rank)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_does_not_write(tmp_path):
    """As those of a DataLoader are: they hold a copy of what waits to be written."""
    from ignite.engine import Engine

    engine, logger = Engine(lambda engine, batch: None), HDF5Logger(tmp_path / "run.h5")
    engine.state.iteration = 1
    logger.write(engine, 1, {"a": 1.0})
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        logger.close()
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    assert read_hdf5(tmp_path / "run.h5") == {}
    with pytest.raises(BlockingIOError):
        HDF5Logger(tmp_path / "run.h5", "a")
    logger.close()
    assert read_hdf5(tmp_path / "run.h5")["a"].values.tolist() == [1.0]
    HDF5Logger(tmp_path / "run.h5", "a").close()  # the forked process, still there, does not hold it
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0

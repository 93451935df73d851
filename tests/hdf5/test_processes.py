"""Several processes: one that is killed, one that reads while another writes, two ranks, forked ones."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import h5py
import pytest
import torch
from ignite.engine import Engine

from ignite_monitor import HDF5Logger, read_hdf5
from ignite_monitor.hdf5.layout import TABLES
from tests.hdf5._writer import fail, log_on_rank, write_forever

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
        assert set(file) == {"state", *TABLES}
    read = read_hdf5(path)
    last = int(read["m0"].steps[-1]) if "m0" in read else 0
    assert completed - last <= 50
    for i in range(20) if last else ():
        steps, values = read[f"m{i}"]
        assert steps.tolist() == list(range(1, last + 1))
        assert values.tolist() == [step + i / 16 for step in range(1, last + 1)]
    if last >= 3:
        assert read["rare"].steps.tolist() == list(range(3, last + 1, 3))
    tops = [step for name, series in read.items() if name.startswith("top/") for step in series.steps.tolist()]
    assert sorted(tops) == list(range(101, last + 1))
    return last


def test_killed_at_ten_random_moments_and_resumed(tmp_path):
    chance, path, last = random.Random(0), tmp_path / "run.h5", 0
    for turn in range(10):
        if turn % 5 == 0:
            path.unlink(missing_ok=True)
            last = 0
        start = max(0, last - chance.randrange(30))
        with writing(path, "a", start) as (process, completed):
            wanted = start + chance.randrange(1, 400)
            while completed.value < wanted:
                assert process.is_alive()
                time.sleep(1e-4)
            time.sleep(chance.random() / 200)
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
            last = check(path, completed.value)
    with HDF5Logger(path, "a"):
        pass
    assert [item.name for item in tmp_path.iterdir()] == ["run.h5"]


def test_a_program_that_ends_with_an_error_and_forgets_to_close(tmp_path):
    process = PROCESSES.Process(target=fail, args=(tmp_path / "run.h5",))
    process.start()
    process.join()
    assert read_hdf5(tmp_path / "run.h5")["output"].steps.tolist() == list(range(1, 31))


def test_read_while_it_is_written(tmp_path):
    path, seen = tmp_path / "run.h5", [0]
    with writing(path, "x") as (process, completed):
        while completed.value < 0:
            assert process.is_alive()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            seen.append(check(path, completed.value))
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_rank_zero_writes(tmp_path):
    started = [PROCESSES.Process(target=log_on_rank, args=(tmp_path / "run.h5", rank)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=100)
    assert [process.exitcode for process in started] == [0, 0]
    assert sorted(item.name for item in tmp_path.iterdir() if "store" not in item.name) == ["run.h5"]
    read = read_hdf5(tmp_path / "run.h5")
    values = {"train/output": [0, 1, 2, 3], "train/average": [6.5], "spike/value": [0] * 4}
    assert {name: read[name].values.tolist() for name in values} == values
    assert read.iterations("spike/value").tolist() == [1, 2, 3, 4]
    assert [it.text for it in read.reports] == ["rank 0", "all ranks"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_does_not_write(tmp_path):
    """Workers of a DataLoader are forked with a copy of the pending rows."""
    engine, logger = Engine(lambda engine, batch: None), HDF5Logger(tmp_path / "run.h5")
    for step in (1, 2):  # the second value waits in memory
        logger.flush()
        logger._write(engine, step, {"a": 1.0})
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        logger.close()
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    assert read_hdf5(tmp_path / "run.h5")["a"].steps.tolist() == [1]
    with pytest.raises(BlockingIOError):
        HDF5Logger(tmp_path / "run.h5", "a")
    logger.close()
    assert read_hdf5(tmp_path / "run.h5")["a"].steps.tolist() == [1, 2]
    HDF5Logger(tmp_path / "run.h5", "a").close()  # the forked process, still there, does not hold it
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0

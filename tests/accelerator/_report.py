"""Run the tests marked ``cuda`` and the benchmarks on a GPU, and print them and the cost of every monitor as a table.

The output of tests and benchmarks goes to files in FOLDER. The exit status is 1 if one of them fails, and 2 without a
GPU, unless the simulated device is given, on which times mean nothing.

    python -m tests.accelerator._report [--folder build/gpu] [--device cuda] [--no-benchmarks]
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from ignite.engine import Events

from tests.accelerator import simulated
from tests.accelerator._device import VARIABLE, Device
from tests.accelerator._operations import CLIP, MONITORS, Make, added
from tests.accelerator._trainings import Training, Transformer, batches

ROOT = Path(__file__).resolve().parents[2]


def milliseconds(device: Device, make: Make | None, rounds: int, clip: bool = False) -> tuple[float, float]:
    """Return the median time of an iteration, and the peak memory in MiB."""
    training = Training(device, model=Transformer(6, 256, records=False), clip=clip)
    if make is not None:
        make(training.model, training.optimizer).attach(training.trainer)
    synchronize = torch.get_device_module(device.name).synchronize
    times: list[float] = []

    @training.trainer.on(Events.ITERATION_COMPLETED)
    def end() -> None:
        synchronize()
        times.append(time.perf_counter())
        if len(times) == 3 and device.name == "cuda":
            torch.cuda.reset_peak_memory_stats()

    training.trainer.run(batches(rounds + 4, device.name), max_epochs=1)
    memory = torch.cuda.max_memory_allocated() / 2**20 if device.name == "cuda" else float("nan")
    return 1e3 * median(b - a for a, b in itertools.pairwise(times[3:])), memory


def run(folder: Path, name: str, command: list[str]) -> tuple[str, bool]:
    """Run a command; return its row, and whether it succeeded."""
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / f"{name}.txt").open("w") as file:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    reported = (folder / f"{name}.txt").read_text().strip().splitlines()[-1:] if name == "tests" else []
    result = " ".join(reported).strip("= ") or ("passed" if done.returncode == 0 else f"failed ({done.returncode})")
    return f"| {name} | {result} | {time.perf_counter() - start:.0f} s | | |", done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests and benchmarks on a GPU.")
    parser.add_argument("--folder", type=Path, default=Path("build/gpu"))
    parser.add_argument("--device", choices=["cuda", simulated.NAME], default="cuda")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--no-benchmarks", action="store_true")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here, or torch was installed without CUDA.", file=sys.stderr)
        return 2
    if args.device == simulated.NAME:
        simulated.load()
    args.folder.mkdir(parents=True, exist_ok=True)
    device = Device(args.device)
    os.environ[VARIABLE] = device.name
    commands = {"tests": ["-m", "pytest", "-q", "-m", "cuda", "tests/accelerator"]}
    if not args.no_benchmarks:
        commands["bench_cost.py"] = ["benchmarks/bench_cost.py", "--device", "cuda"]
    results = [run(args.folder, name, command) for name, command in commands.items()]
    named = torch.cuda.get_device_name() if device.name == "cuda" else "simulated device"
    print(f"{named}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| | result, or operations added | time, or added to an iteration | of it | memory added |")
    print("|---|---|---|---|---|")
    print(*(row for row, _ in results), sep="\n")
    step, memory = milliseconds(device, None, args.rounds)
    print(f"| a train step, 6 blocks of width 256 | | {step:.2f} ms | | {memory:.0f} MiB |")
    for name in (CLIP, *MONITORS):
        make = MONITORS[name][-1] if name in MONITORS else None
        count = added(device, make).seen
        own, most = milliseconds(device, make, args.rounds, clip=make is None)
        cells = f"{count} | {own - step:+.2f} ms | {(own - step) / step:+.0%} | {most - memory:+.0f} MiB"
        print(f"| {name} | {cells} |", flush=True)
    return 0 if all(passed for _, passed in results) else 1


if __name__ == "__main__":
    sys.exit(main())

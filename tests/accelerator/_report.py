"""Print what every monitor costs on a GPU as a table; on the simulated device, times mean nothing.

python -m tests.accelerator._report [--device cuda] [--rounds 50]
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
import time
from statistics import median

import torch
from ignite.engine import Events

from tests.accelerator import simulated
from tests.accelerator._device import Device
from tests.accelerator._operations import CLIP, LIMITS, Make, added
from tests.accelerator._trainings import Training, batches, transformer


def milliseconds(device: Device, make: Make | None, rounds: int, clip: bool = False) -> tuple[float, float]:
    """Return the median time of an iteration, and the peak memory in MiB."""
    training = Training(device, model=transformer(6, 256, records=False), clip=clip)
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what every monitor costs on a GPU.")
    parser.add_argument("--device", choices=["cuda", simulated.NAME], default="cuda")
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU, or torch was installed without CUDA.", file=sys.stderr)
        return 2
    if args.device == simulated.NAME:
        simulated.load()
    device = Device(args.device)
    named = torch.cuda.get_device_name() if device.name == "cuda" else "simulated device"
    print(f"{named}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| | operations added | time added to an iteration | of it | memory added |")
    print("|---|---|---|---|---|")
    step, memory = milliseconds(device, None, args.rounds)
    print(f"| a train step, 6 blocks of width 256 | | {step:.2f} ms | | {memory:.0f} MiB |")
    for name in (CLIP, *LIMITS):
        make = LIMITS[name][-1] if name in LIMITS else None
        count = added(device, make).seen
        own, most = milliseconds(device, make, args.rounds, clip=make is None)
        cells = f"{count} | {own - step:+.2f} ms | {(own - step) / step:+.0%} | {most - memory:+.0f} MiB"
        print(f"| {name} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How many operations each monitor adds to an iteration on an accelerator, beside ``clip_grad_norm_``.

Counted on a GPU where there is one, else on the simulated device of tests/accelerator, which is built with a C++
compiler: there the last column has all that runs, also in hooks on modules, where no dispatch mode is on and the others
see nothing. On a GPU each takes about 5 microseconds of the host's time. Counts are the same in every run.

    PYTHONPATH=. python benchmarks/device_operations.py [--blocks 6 24] [--width 32]
"""

from __future__ import annotations

import argparse

import torch

from tests.accelerator import simulated
from tests.accelerator._device import Device
from tests.accelerator._operations import CLIP, MONITORS, added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()
    device = Device("cuda" if torch.cuda.is_available() else simulated.NAME)
    if device.name == simulated.NAME:
        simulated.load()
    print(f"device {device.name}, width {args.width}\n")
    columns = [f"{blocks} blocks | run by the device" for blocks in args.blocks]
    print(f"| adds | {' | '.join(columns)} | may be, of 6 blocks |\n|---|{'---|' * (2 * len(columns) + 1)}")
    for name in (CLIP, *MONITORS):
        limit, make = MONITORS.get(name, ("", None))
        counts = [added(device, make, blocks=blocks, width=args.width) for blocks in args.blocks]
        cells = [f"{each.seen} | {each.launched or '-'}" for each in counts]
        print(f"| {name} | {' | '.join(cells)} | {limit} |", flush=True)


if __name__ == "__main__":
    main()

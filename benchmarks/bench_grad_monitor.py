"""What GradMonitor costs on a model of 24 blocks and 292 parameters, beside ``clip_grad_norm_`` on the same model.

All variants take turns in one run, and their fastest iterations are compared. On CUDA every monitored iteration runs
under ``torch.cuda.set_sync_debug_mode("error")``.

    python benchmarks/bench_grad_monitor.py [--rounds 60] [--width 32 64]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from statistics import quantiles

import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import GradMonitor, RobustThreshold

ITERATIONS = 12
STEP_MS = 7.0


def make_model(width: int, device: str, blocks: int = 24, rows: int = 50) -> nn.Module:
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
    head = nn.Linear(width, 10, bias=False)
    return nn.Sequential(nn.Embedding(rows, width), encoder, nn.LayerNorm(width), head).to(device)


def iteration_times(trainer: Engine, device: str) -> list[float]:
    """Seconds from one iteration's start to the next one's, without the first few."""
    stamps: list[float] = []
    clock = time.perf_counter if device == "cuda" else time.thread_time  # what others run does not count

    def stamp() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        stamps.append(clock())

    handle = trainer.add_event_handler(Events.GET_BATCH_STARTED, stamp)
    trainer.state.max_epochs = None
    trainer.run(range(ITERATIONS), max_epochs=1)
    handle.remove()
    return [after - before for before, after in itertools.pairwise(stamps[3:])]


def make_trainers(width: int, device: str) -> dict[str, Engine]:
    """A trainer per variant; all but "clip" leave the gradients as they are."""
    torch.manual_seed(0)
    model = make_model(width, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = torch.randint(0, 50, (4, 8), device=device)

    def step(clip: bool) -> Callable[[Engine, int], None]:
        def train_step(engine: Engine, batch: int) -> None:
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()

        return train_step

    trainers = {name: Engine(step(name == "clip_grad_norm_")) for name in VARIANTS}
    GradMonitor(model, optimizer).attach(trainers["GradMonitor"])
    GradMonitor(model, optimizer, threshold=RobustThreshold()).attach(trainers["GradMonitor, RobustThreshold"])
    never = Events.ITERATION_STARTED(once=10**9)
    GradMonitor(model, optimizer).attach(trainers["GradMonitor, iteration not monitored"], never)
    return trainers


VARIANTS = (
    "nothing",
    "clip_grad_norm_",
    "GradMonitor",
    "GradMonitor, RobustThreshold",
    "GradMonitor, iteration not monitored",
)


def measure(width: int, device: str, rounds: int) -> dict[str, float]:
    """Seconds that every variant adds to an iteration: at the 2 % quantile of all iterations, which noise raises."""
    trainers = make_trainers(width, device)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(rounds):
        for name in VARIANTS[turn % len(VARIANTS) :] + VARIANTS[: turn % len(VARIANTS)]:
            times[name] += iteration_times(trainers[name], device)
    fast = {name: quantiles(each, n=50)[0] for name, each in times.items()}
    return {name: fast[name] - fast["nothing"] for name in VARIANTS[1:]}


def check_synchronisation(width: int) -> None:
    """Fail if a monitored iteration waits for the device."""
    model = make_model(width, "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 50, (4, 8), device="cuda")

    def train_step(engine: Engine, batch: int) -> None:
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    trainer = Engine(train_step)
    GradMonitor(model, optimizer, on_spike="skip").attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: torch.cuda.set_sync_debug_mode("error"))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=20), lambda: torch.cuda.set_sync_debug_mode("default"))
    trainer.run(range(20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--width", type=int, nargs="+", default=[32, 64])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| device | width | variant | added per iteration | of clip_grad_norm_ | of a 7 ms step |")
    print("|---|---|---|---|---|---|")
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        for width in args.width:
            if device == "cuda":
                check_synchronisation(width)
            measured = measure(width, device, args.rounds)
            clip = measured["clip_grad_norm_"]
            for name, added in measured.items():
                share = 100 * added / (STEP_MS / 1e3)
                print(f"| {device} | {width} | {name} | {added * 1e6:.0f} us | {added / clip:.2f} | {share:.1f} % |")


if __name__ == "__main__":
    main()

"""What a look of CurvatureHandler costs, in train steps, and what its default of one in two thousand adds.

Looked-at iterations and others take turns in one process; medians of the thread's own time. Attention runs under the
kernel that has a second derivative, or the monitor runs the loss again under it (``loss=``).

    PYTHONPATH=. python benchmarks/bench_curvature.py
"""

from __future__ import annotations

import itertools
import time
from statistics import median

import torch
from ignite.engine import Engine, Events
from record_harm import make_model
from record_norms import Training, batches
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ignite_monitor import CurvatureHandler

EVERY = 6
MODELS = {
    "GPT, 4 blocks of width 64": Training("gpt", 64, 4, 16, "AdamW", 1e-3),
    "CNN of width 16": Training("cnn", 16, 2, 64, "AdamW", 1e-3),
}


def steps_of_a_look(training: Training, kind: type[torch.optim.Optimizer], apart: bool) -> float:
    torch.manual_seed(0)
    model, draw = make_model(training), batches(training, torch.Generator().manual_seed(0))
    optimizer = kind(model.parameters(), lr=1e-3)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    def step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        with sdpa_kernel([SDPBackend.MATH, *([SDPBackend.FLASH_ATTENTION] if apart else [])]):
            loss(model, batch).backward()
        optimizer.step()

    trainer, stamps = Engine(step), []
    monitor = CurvatureHandler(model, optimizer, loss=loss)
    monitor.attach(trainer, Events.ITERATION_STARTED(every=EVERY))
    trainer.add_event_handler(Events.GET_BATCH_STARTED, lambda: stamps.append(time.thread_time()))
    trainer.run([draw() for _ in range(5 * EVERY + 1)])
    times = [after - before for before, after in itertools.pairwise(stamps)][EVERY:]  # the first are to warm up
    looked = [each for i, each in enumerate(times, EVERY + 1) if i % EVERY == 0]
    others = [each for i, each in enumerate(times, EVERY + 1) if i % EVERY]
    return median(looked) / median(others) - 1


def main() -> None:
    torch.set_num_threads(1)
    print("| model | optimizer | loss | a look, in train steps | one in 2,000 adds |\n|---|---|---|---|---|")
    for name, training in MODELS.items():
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            for apart in (False, True):
                cost = steps_of_a_look(training, kind, apart)
                how = "run again" if apart else "of the train step"
                print(f"| {name} | {kind.__name__} | {how} | {cost:.0f} | {cost / 20:.1f} % |", flush=True)


if __name__ == "__main__":
    main()

"""What RollbackHandler costs where nothing goes wrong: an iteration with it over one without, and its memory.

Processor time of this process, the median of several pairs of runs, so that a busy machine matters little.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F
from ignite.engine import Engine
from torch import nn

from ignite_monitor import RollbackHandler

ITERATIONS, PAIRS = 100, 3


def make(width: int, handler: bool) -> tuple[Engine, RollbackHandler, nn.Module]:
    torch.manual_seed(0)
    layers = [each for _ in range(4) for each in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train_step(engine, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(train_step)
    rollback = RollbackHandler({"model": model, "optimizer": optimizer})
    if handler:
        rollback.attach(trainer)
    return trainer, rollback, model


def seconds(width: int, batches: list, handler: bool) -> float:
    trainer, *_ = make(width, handler)
    begin = time.process_time()
    trainer.run(batches, max_epochs=1)
    return time.process_time() - begin


def bytes_in(state: object) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(bytes_in, values))


def main() -> None:
    torch.set_num_threads(1)
    print("width  without (ms)  ratio  snapshots  memory / weights")
    for width in (64, 512, 1024):
        x, y = torch.randn(128, width), torch.randint(10, (128,))
        batches = [(x, y)] * ITERATIONS
        pairs = [[seconds(width, batches, handler) for handler in (False, True)] for _ in range(PAIRS)]
        bare = statistics.median(without for without, _ in pairs)
        ratio = statistics.median(both / without for without, both in pairs)
        trainer, rollback, model = make(width, handler=True)
        trainer.run(batches, max_epochs=1)
        held = rollback._snapshots.all
        memory = sum(bytes_in(each.state) for each in held)
        weights = sum(each.nbytes for each in model.parameters())
        print(f"{width:5}  {1e3 * bare / ITERATIONS:12.2f}  {ratio:5.3f}  {len(held):9}  {memory / weights:.2f}")


if __name__ == "__main__":
    main()

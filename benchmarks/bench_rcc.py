"""What RCCHandler costs in a monitored iteration, beside forward passes of the same model.

Prints milliseconds of processor time that the handler adds, medians over one run in which all take turns. And
memory, counted tensor by
tensor: the most that is alive at once in a monitored forward pass, as a share of what one forward pass keeps for its
backward, without the reference's weights. With ``offload`` what goes to the host's memory is not counted; on a CPU that
is the same memory, so this says what would be left on a device. Exits with 1 where the handler adds more than twice the
time of two forward passes at width 128, or memory beyond 1.2 (offloaded: 0.5) of the activations.

    PYTHONPATH=. python benchmarks/bench_rcc.py [--rounds 60]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from ignite.engine import Engine
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ignite_monitor import RCCHandler
from ignite_monitor.reference.passes import KeptPass

TIME_LIMIT, MEMORY_LIMIT, OFFLOADED_LIMIT = 2.0, 1.2, 0.5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


class Alive(TorchDispatchMode):
    """Bytes of the tensors that are alive of those made while it lasts, and the most there ever were.

    What is offloaded counts as the host's, which on a CPU is no other memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.elsewhere = False
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not self.elsewhere:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def most_alive(model: nn.Module, tokens: torch.Tensor, handler: RCCHandler | None) -> int:
    """Bytes alive at the peak of one forward pass, in an iteration that the handler watches."""
    original = KeptPass._offloaded

    def offloaded(self: KeptPass, tensor: torch.Tensor) -> torch.Tensor:
        alive.elsewhere = True
        try:
            return original(self, tensor)
        finally:
            alive.elsewhere = False

    KeptPass._offloaded = offloaded
    try:
        with Alive() as alive, nullcontext() if handler is None else handler._passes.watched():
            model(tokens)
        return alive.most
    finally:
        KeptPass._offloaded = original
        if handler is not None:
            handler._changes.clear()


def seconds(function: Any) -> float:
    # Of the processor, all threads together: others who want it don't count.
    before = time.process_time()
    function()
    return time.process_time() - before


def measure(width: int, rounds: int) -> dict[str, float]:
    """Seconds of a forward pass, of a train step without its update, and of the latter with the handler."""
    torch.manual_seed(0)
    model = Transformer(width)
    tokens = torch.randint(0, 256, (8, 64))

    def train_step(*_: Any) -> None:
        model(tokens).square().mean().backward()
        model.zero_grad()

    plain, watched = Engine(train_step), Engine(train_step)
    RCCHandler(model).attach(watched)
    variants = {
        "forward": lambda: model(tokens),
        "step": lambda: plain.run([0]),
        "watched": lambda: watched.run([0]),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            times[name].append(seconds(variant))
    return {name: statistics.median(each[rounds // 5 :]) for name, each in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    failed = []
    print("| width | forward pass | added by the handler | of two forward passes |\n|---|---|---|---|")
    for width in (128, 256):
        times = measure(width, args.rounds)
        added = times["watched"] - times["step"]
        ratio = added / (2 * times["forward"])
        print(f"| {width} | {1e3 * times['forward']:.1f} ms | {1e3 * added:.1f} ms | {ratio:.2f} |", flush=True)
        if width == 128 and ratio > TIME_LIMIT:
            failed.append(f"{ratio:.2f} of the time of two forward passes is more than {TIME_LIMIT}")
    torch.manual_seed(0)
    model, tokens = Transformer(128), torch.randint(0, 256, (8, 64))
    activations = most_alive(model, tokens, None)
    print(f"\nactivations of a forward pass: {activations / 2**20:.1f} MiB\n")
    print("| | most alive, of the activations | beyond what a forward pass needs itself |\n|---|---|---|")
    for offload, limit in ((False, MEMORY_LIMIT), (True, OFFLOADED_LIMIT)):
        most = most_alive(model, tokens, RCCHandler(model, offload=offload))
        extra = (most - activations) / activations
        print(f"| offload={offload} | {most / activations:.2f} | {extra:.2f} |")
        if extra > limit:
            failed.append(f"{extra:.2f} of the activations is more than {limit}")
    for each in failed:
        print(each, file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

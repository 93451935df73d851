"""What ActivationHandler costs on a model of 24 blocks, beside a forward hook per module with closures and ``.item()``.

All variants take turns in one run, and what each adds is compared within a turn, so that the ratios hold on a busy
machine too. Every variant has its numbers on the host at the end of an iteration. "Copies and sums alone" is about
the least that a handler can cost: hooks that copy each output to where its place was known beforehand, and the fewest
operations that take the same sums in float64, with no name, no look at whether an output is what was expected, and no
statistic made of the sums.

    python benchmarks/bench_activations.py [--rounds 30] [--width 32 64]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from bench_grad_monitor import iteration_times, make_model
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_monitor import ActivationHandler

CLOSURES = {
    "mean": lambda x: x.mean().item(),
    "std": lambda x: x.std().item(),
    "l2_norm": lambda x: x.norm(dim=-1).mean().item(),
}
VARIANTS = (
    "nothing",
    "hooks, three closures with .item() each",
    "copies and sums alone",
    "ActivationHandler, built-in set",
    "ActivationHandler, built-in set and attention",
    "ActivationHandler, iteration not monitored",
)


class ClosureHooks:
    """What a loop without a monitor would do."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, float] = {}
        self.handles = [module.register_forward_hook(self.hook(name)) for name, module in model.named_modules()]

    def hook(self, name: str) -> Callable[..., None]:
        def observe(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
            tensor = _first(output).detach()
            for metric, closure in CLOSURES.items():
                self.values[f"activation/{name}/{metric}"] = closure(tensor)

        return observe


class CopiesAndSums:
    """The least that a built-in set can be made with, on a model that never changes."""

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.sums: list[list[float]] = []
        seen: list[Tensor] = []
        handles = [
            module.register_forward_hook(lambda *call: seen.append(_first(call[2]))) for module in model.modules()
        ]
        model(tokens)
        for handle in handles:
            handle.remove()
        alike = {each.shape: [other for other in seen if other.shape == each.shape] for each in seen}
        self.stacks = [
            torch.empty(len(own), *shape, dtype=torch.float64, device=own[0].device) for shape, own in alike.items()
        ]
        rows = {stack.shape[1:]: iter(stack.unbind()) for stack in self.stacks}
        self.copies = [next(rows[each.shape]).copy_ for each in seen]
        self.next = 0
        for module in model.modules():
            module.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        copy = self.copies[self.next]
        self.next += 1
        torch._C._set_grad_enabled(False)
        copy(_first(output))
        torch._C._set_grad_enabled(True)

    @torch.no_grad()
    def pass_ended(self) -> None:
        self.next = 0
        sums = []
        for stack in self.stacks:
            vectors = stack.view(len(stack), -1, stack.shape[-1])
            norms = torch.linalg.vector_norm(vectors, dim=-1)
            largest = torch.maximum(vectors.amax(1), vectors.amin(1).neg_())
            squares = torch.linalg.vector_norm(norms, dim=1)
            dead = (largest == 0).sum(1).double()
            sums.append(torch.stack([vectors.sum((1, 2)), squares, norms.mean(1), largest.amax(1), dead], 1))
        self.sums = torch.cat(sums).tolist()


def _first(output: Tensor | tuple) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def make_trainers(width: int, device: str) -> dict[str, Engine]:
    """A trainer per variant, each with a model of its own, since hooks stay on."""
    trainers = {}
    for name in VARIANTS:
        torch.manual_seed(0)
        model = make_model(width, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        tokens = torch.randint(0, 50, (4, 8), device=device)

        def train_step(engine: Engine, batch: int, model=model, optimizer=optimizer, tokens=tokens) -> None:
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()

        trainer = trainers[name] = Engine(train_step)
        if name.startswith("hooks"):
            trainer.state.hooks = ClosureHooks(model)
        elif name.startswith("copies"):
            hooks = trainer.state.hooks = CopiesAndSums(model, tokens)
            model.register_forward_hook(lambda *_, hooks=hooks: hooks.pass_ended())
        elif name.startswith("ActivationHandler"):
            handler = ActivationHandler(model, activations=True, attention=name.endswith("attention"))
            never = Events.ITERATION_STARTED(once=10**9)
            handler.attach(trainer, never if name.endswith("not monitored") else Events.ITERATION_STARTED)
            trainer.add_event_handler(Events.ITERATION_COMPLETED, handler.on_host)
    return trainers


def measure(width: int, device: str, rounds: int) -> dict[str, float]:
    """Seconds that every variant adds to an iteration: the median over rounds, each of which takes the fastest."""
    trainers = make_trainers(width, device)
    added: dict[str, list[float]] = {name: [] for name in VARIANTS[1:]}
    for turn in range(rounds):
        order = VARIANTS[turn % len(VARIANTS) :] + VARIANTS[: turn % len(VARIANTS)]
        fastest = {name: min(iteration_times(trainers[name], device)) for name in order}
        for name in added:
            added[name].append(fastest[name] - fastest["nothing"])
    return {name: median(values) for name, values in added.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, nargs="+", default=[32, 64])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| device | width | variant | added per iteration | of the hooks |")
    print("|---|---|---|---|---|")
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        for width in args.width:
            measured = measure(width, device, args.rounds)
            hooks = measured[VARIANTS[1]]
            for name, added in measured.items():
                print(f"| {device} | {width} | {name} | {added * 1e3:.2f} ms | {added / hooks:.2f} |")


if __name__ == "__main__":
    main()

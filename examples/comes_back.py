"""Compare the recovery of a training run with the same run without handlers.

A small GPT learns English from Python's own reference, the text behind ``help("for")``, which comes with every Python.
Forty batches in a row are from a shard with another vocabulary; later the learning rate is a hundred times too large
for three steps. The same batches are used in three runs: with handlers, without, and undisturbed.

    python examples/comes_back.py                          about a minute, and a table
    python examples/comes_back.py --plot comes_back.png    and a picture (needs matplotlib)
"""

import argparse
import math
import pydoc_data.topics
from dataclasses import dataclass, field

import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.functional import cross_entropy

from ignite_monitor import GradMonitor, MonitorEvents, RollbackHandler, SpikeRecorder

CHARACTERS, LENGTH, WIDTH, BATCH = 128, 64, 64, 16
SPIKES = "runs/comes_back/spikes"


class GPT(nn.Module):
    """Predicts the next character."""

    def __init__(self):
        super().__init__()
        self.characters, self.positions = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text):
        return self.head(self.blocks(self.characters(text) + self.positions.weight, self.mask, is_causal=True))


def loss_of(model, batch):
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def read_text():
    """Numbers of characters, those of the last tenth apart."""
    text = "".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    numbers = torch.tensor(list(text.encode("ascii", "replace")))
    return numbers[: -len(numbers) // 10], numbers[-len(numbers) // 10 :]


def make_batches(text, count, seed, from_elsewhere=()):
    generator = torch.Generator().manual_seed(seed)
    other_vocabulary = torch.randperm(CHARACTERS, generator=generator)
    for iteration in range(1, count + 1):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=generator)
        batch = text[starts + torch.arange(LENGTH + 1)]
        yield other_vocabulary[batch] if iteration in from_elsewhere else batch


def faults(iterations):
    """In which iterations the data are from elsewhere, and in which the learning rate is too large."""
    data, rate = 3 * iterations // 10, 6 * iterations // 10
    return range(data, data + 40), range(rate, rate + 3)


@dataclass
class Run:
    losses: dict = field(default_factory=dict)  # iteration -> loss on unseen text
    spikes: list = field(default_factory=list)  # iterations
    rollbacks: list = field(default_factory=list)  # from which iteration back to which


def train(iterations, seed, disturbed=True, helped=True):
    torch.manual_seed(seed)
    text, unseen = read_text()
    exam = torch.cat(list(make_batches(unseen, 4, seed)))
    bad_data, bad_rate = faults(iterations) if disturbed else ((), ())
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def factor(step):  # warm-up and cosine
        return min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / iterations))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def train_step(engine, batch):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if engine.state.iteration in bad_rate:  # the scheduler, which a rollback restores, sets the next rate
            optimizer.param_groups[0]["lr"] *= 100
        optimizer.step()
        scheduler.step()
        return loss.item()

    trainer, run = Engine(train_step), Run()
    if helped:
        monitor = GradMonitor(model, optimizer, on_spike="skip")
        monitor.attach(trainer)
        RollbackHandler({"model": model, "optimizer": optimizer, "scheduler": scheduler}).attach(trainer)
        SpikeRecorder(monitor, SPIKES).attach(trainer)

        @trainer.on(MonitorEvents.SPIKE_DETECTED)
        def note_spike(engine):
            run.spikes.append(engine.state.iteration)

        @trainer.on(MonitorEvents.ROLLED_BACK)
        def note_rollback(engine):
            run.rollbacks.append((engine.state.iteration, int(engine.state.metrics["rollback/restored_iteration"])))

    @trainer.on(Events.ITERATION_COMPLETED(every=10))
    def examine(engine):
        with torch.no_grad():
            run.losses[engine.state.iteration] = loss_of(model, exam).item()

    trainer.run(make_batches(text, iterations, seed, bad_data), epoch_length=iterations)
    return run


HEAD = f"{'loss on unseen text':20}{'before':>8}{'worst':>8}{'at the end':>12}{'spikes':>8}{'rollbacks':>11}"


def row(iterations, name, run):
    start = faults(iterations)[0].start
    before = run.losses[max(iteration for iteration in run.losses if iteration < start)]
    worst = max(loss for iteration, loss in run.losses.items() if iteration >= start)
    losses = f"{before:8.2f}{worst:8.2f}{run.losses[max(run.losses)]:12.2f}"
    return f"{name:20}{losses}{len(run.spikes):8}{len(run.rollbacks):11}"


def plot(iterations, runs, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.9), dpi=140, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_title("Loss of a small GPT on unseen text, with and without handlers", loc="left", weight="bold")
    styles = {"undisturbed": ("#6e7781", ":"), "without handlers": ("#c0362c", "-"), "with handlers": ("#0b5fa5", "-")}
    for name, (color, style) in styles.items():
        curve = {at: loss for at, loss in runs[name].losses.items() if at >= 50}
        axes.plot(curve.keys(), curve.values(), style, color=color, label=f"{name}: {curve[max(curve)]:.2f} at the end")
    words = "40 batches with\nanother vocabulary", "learning rate × 100\nfor 3 steps"
    for where, text in zip(faults(iterations), words, strict=True):
        axes.axvspan(where.start, where.stop, color="#f5b82e", alpha=0.28, linewidth=0)
        axes.text(where.stop + 8, 0.97, text, va="top", fontsize=10, transform=axes.get_xaxis_transform())
    run, bottom = runs["with handlers"], axes.get_ylim()[0]
    axes.plot(run.spikes, [bottom] * len(run.spikes), "|", color="#c0362c", label="spikes: steps skipped")
    for at, back_to in run.rollbacks:
        arrow = {"arrowstyle": "-|>", "color": "#0b5fa5", "connectionstyle": "arc3,rad=0.35"}
        axes.annotate("", (back_to, bottom), (at, bottom), arrowprops=arrow)
        axes.text(back_to, bottom, f"back to {back_to} ", ha="right", va="center", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=1000, help="of each training (default: 1000, at least 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="draw the losses")
    arguments = parser.parse_args()
    if arguments.iterations < 500:
        parser.error("--iterations should be at least 500")
    torch.set_num_threads(1)  # threads that wait for each other cost such a small model more than they add
    kinds = {"undisturbed": (False, False), "without handlers": (True, False), "with handlers": (True, True)}
    runs = {}
    print(HEAD)
    for name, (disturbed, helped) in kinds.items():
        runs[name] = train(arguments.iterations, arguments.seed, disturbed, helped)
        print(row(arguments.iterations, name, runs[name]), flush=True)
    print(f"\nWhat was in the bad batches:\n    ignite-monitor spike {SPIKES}")
    if arguments.plot:
        plot(arguments.iterations, runs, arguments.plot)


if __name__ == "__main__":
    main()

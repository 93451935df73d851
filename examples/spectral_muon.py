"""Train with Muon on hidden matrices and AdamW on the rest, and monitor the spectral norms of both.

Muon makes all singular values of an update nearly equal, so each of its steps moves a weight by about the learning rate
in the spectral norm, whatever the gradient. A learning rate that is ten times too large shows in the norms of the
hidden weights long before it shows in the accuracy. The data are scikit-learn's handwritten digits, without a download.

    python examples/spectral_muon.py                 muon and adamw, at learning rates that suit them
    python examples/spectral_muon.py --muon-lr 0.2   ten times as much
"""

import argparse

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ignite_monitor import SpectralNormHandler

HIDDEN = r"^hidden\.\d+\.weight$"


class MLP(nn.Module):
    def __init__(self, width: int = 256, depth: int = 3) -> None:
        super().__init__()
        self.inputs = nn.Linear(64, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.outputs = nn.Linear(width, 10)

    def forward(self, x):
        x = self.inputs(x).relu()
        for layer in self.hidden:
            x = x + layer(x).relu()
        return self.outputs(x)


def load_data() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train, test = random_split(dataset, [1437, 360], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=32, shuffle=True, drop_last=True), DataLoader(test, batch_size=360)


def main() -> None:
    parser = argparse.ArgumentParser(description="Spectral norms of weights and updates under Muon and AdamW.")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="Muon's learning rate (default: 0.02)")
    parser.add_argument("--epochs", type=int, default=5, help="how often to go through the data (default: 5)")
    args = parser.parse_args()

    torch.manual_seed(0)
    train_loader, test_loader = load_data()
    model = MLP()
    hidden = [layer.weight for layer in model.hidden]
    rest = [parameter for parameter in model.parameters() if all(parameter is not weight for weight in hidden)]
    muon = torch.optim.Muon(hidden, lr=args.muon_lr, weight_decay=0.0)
    adamw = torch.optim.AdamW(rest, lr=3e-3)

    def train_step(engine, batch):
        images, targets = batch
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    trainer = Engine(train_step)
    muons = SpectralNormHandler(model, include=HIDDEN, updates=True, prefix="muon")
    others = SpectralNormHandler(model, exclude=HIDDEN, updates=True, prefix="adamw")
    for monitor in (muons, others):
        monitor.attach(trainer, Events.ITERATION_STARTED(every=11))

    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})

    @trainer.on(Events.EPOCH_COMPLETED)
    def report(engine):
        accuracy = evaluator.run(test_loader).metrics["accuracy"]
        values = engine.state.metrics
        print(f"epoch {engine.state.epoch}: test accuracy {accuracy:.3f}")
        for name in ("muon", "adamw"):
            norm, update, rank = (values[f"{name}/{key}"] for key in ("norm_max", "update_norm_max", "stable_rank_min"))
            print(f"  {name:5}  largest norm {norm:6.2f}, of an update {update:.4f}, smallest stable rank {rank:.1f}")

    trainer.run(train_loader, max_epochs=args.epochs)


if __name__ == "__main__":
    main()

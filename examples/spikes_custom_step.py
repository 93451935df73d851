"""See a gradient spike before the optimizer's step, in a train step of your own.

A small convolutional network learns handwritten digits (scikit-learn's, nothing is downloaded). One batch arrives
damaged, as from a broken sensor. GradMonitor sets ``engine.state.unhealthy_spike`` as soon as ``loss.backward()``
returns, and the train step leaves that batch out.

    python examples/spikes_custom_step.py                    the damaged batch is skipped
    python examples/spikes_custom_step.py --ignore-spikes    what it does otherwise
"""

import argparse

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers.tensorboard_logger import TensorboardLogger
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ignite_monitor import GradMonitor, MonitorEvents, RobustThreshold

DAMAGED_ITERATION = 120
DIRECTORY = "runs/spikes_custom_step"


def load_data() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(dataset, [1437, 360], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=32, shuffle=True, drop_last=True), DataLoader(test, batch_size=360)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits with a damaged batch in between.")
    parser.add_argument("--ignore-spikes", action="store_true", help="make the step all the same")
    parser.add_argument("--epochs", type=int, default=5, help="how often to go through the data (default: 5)")
    args = parser.parse_args()
    run = "spike_ignored" if args.ignore_spikes else "spike_skipped"

    torch.manual_seed(0)
    train_loader, test_loader = load_data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def train_step(engine, batch):
        images, targets = batch
        if engine.state.iteration == DAMAGED_ITERATION:
            images = 500 * torch.randn_like(images)
        model.train()
        optimizer.zero_grad()
        loss = criterion(model(images), targets)
        loss.backward()
        if engine.state.unhealthy_spike and not args.ignore_spikes:
            return {"loss": loss.item()}  # optimizer.step() is skipped
        optimizer.step()
        return {"loss": loss.item()}

    trainer = Engine(train_step)
    monitor = GradMonitor(model, optimizer, threshold=RobustThreshold())
    monitor.attach(trainer)
    logger = TensorboardLogger(log_dir=f"{DIRECTORY}/{run}")
    monitor.log_to(logger, trainer)

    @trainer.on(MonitorEvents.SPIKE_DETECTED)
    def report_spike(engine):
        norm, threshold = engine.state.grad_norm, engine.state.metrics["grad/threshold"]
        print(f"iteration {engine.state.iteration}: spike, gradient norm {norm:.3g} exceeds {threshold:.3g}")

    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        accuracy = evaluator.run(test_loader).metrics["accuracy"]
        logger.writer.add_scalar("test/accuracy", accuracy, engine.state.iteration)
        print(f"epoch {engine.state.epoch}: test accuracy {accuracy:.3f}")

    trainer.run(train_loader, max_epochs=args.epochs)
    logger.close()
    print(f"Norm, threshold and spikes are in TensorBoard: tensorboard --logdir {DIRECTORY}")


if __name__ == "__main__":
    main()

"""Let the handler skip the step at a spike: ``create_supervised_trainer``, and not a line in the train step.

An MLP learns handwritten digits (scikit-learn's, nothing is downloaded) with AdamW. Some batches are damaged;
``on_spike="skip"`` makes ``optimizer.step()`` do nothing at those, weight decay and momentum included.

    python examples/spikes_skipped.py              damaged batches are skipped
    python examples/spikes_skipped.py --no-skip    what they do otherwise
"""

import argparse

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ignite_monitor import GradMonitor, RobustThreshold

DAMAGED_ITERATIONS = range(100, 220, 20)


def load_data() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train, test = random_split(dataset, [1437, 360], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=32, shuffle=True, drop_last=True), DataLoader(test, batch_size=360)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits with damaged batches that the handler skips.")
    parser.add_argument("--no-skip", action="store_true", help="make the step all the same")
    parser.add_argument("--epochs", type=int, default=5, help="how often to go through the data (default: 5)")
    args = parser.parse_args()

    torch.manual_seed(0)
    train_loader, test_loader = load_data()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())

    @trainer.on(Events.ITERATION_STARTED(event_filter=lambda _, iteration: iteration in DAMAGED_ITERATIONS))
    def damage(engine):
        images, targets = engine.state.batch
        engine.state.batch = 1000 * torch.randn_like(images), targets

    def report(engine, norm):
        what = "the step is made all the same" if args.no_skip else "the step is skipped"
        print(f"iteration {engine.state.iteration}: spike, gradient norm {norm:.3g}: {what}")

    monitor = GradMonitor(model, optimizer, threshold=RobustThreshold(), on_spike=None if args.no_skip else "skip")
    monitor.attach(trainer)

    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        print(f"epoch {engine.state.epoch}: test accuracy {evaluator.run(test_loader).metrics['accuracy']:.3f}")

    trainer.run(train_loader, max_epochs=args.epochs)
    skipped, iterations = int(monitor.metrics["grad/skipped_count"]), trainer.state.iteration
    print(f"Steps skipped: {skipped} of {iterations}.")


if __name__ == "__main__":
    main()

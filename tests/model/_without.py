"""Every feature with a private name of torch or Ignite gone: a process per name, forked from one that has both.

Gone it is for this package alone: torch and Ignite themselves can't do without theirs.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import h5py  # noqa: F401
import torch
from ignite.engine import Engine, Events
from torch import nn

_getattr = builtins.getattr


def take_away(name):
    def without(owner, attribute, *otherwise):
        if attribute == name and sys._getframe(1).f_globals.get("__name__", "").startswith("ignite_monitor"):
            if otherwise:
                return otherwise[0]
            raise AttributeError(attribute)
        return _getattr(owner, attribute, *otherwise)

    builtins.getattr = without


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=True)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.transposed = nn.ConvTranspose1d(8, 8, 3, padding=1)
        self.projection = nn.Linear(8, 24)
        self.readout = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embedding(x).transpose(1, 2)
        x = self.transposed(self.norm(self.convolution(x)).relu()).transpose(1, 2)
        q, k, v = self.projection(x).view(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.readout(x)


def features():
    import ignite_monitor as im

    def on(make):
        return lambda model, optimizer, trainer: make(model, optimizer).attach(trainer)

    def logged(model, optimizer, trainer):
        logger = im.HDF5Logger(Path(tempfile.mkdtemp()) / "run.h5")
        monitor = im.SpectralNormHandler(model)
        monitor.log_to(logger, trainer)
        monitor.attach(trainer)

    return {
        "nothing": lambda model, optimizer, trainer: None,
        "GradMonitor": on(lambda model, optimizer: im.GradMonitor(model, optimizer)),
        "WeightUpdateHandler": on(im.WeightUpdateHandler),
        "ActivationHandler": on(lambda model, _: im.ActivationHandler(model, activations=True, parameters=True)),
        "gradients": on(lambda model, _: im.ActivationHandler(model, gradients=True)),
        "attention": on(lambda model, _: im.ActivationHandler(model, activations=True, attention=True)),
        "reference": on(
            lambda model, _: im.ActivationHandler(
                model, activation_differences={"d": lambda a, b: (a - b).norm()}, reference="init"
            )
        ),
        "HistogramHandler": on(lambda model, _: im.HistogramHandler(model)),
        "OptimizerStateHandler": on(lambda model, optimizer: im.OptimizerStateHandler(model, optimizer)),
        "ReplicaCheckHandler": on(im.ReplicaCheckHandler),
        "RCCHandler": on(lambda model, _: im.RCCHandler(model)),
        "SpectralNormHandler": on(lambda model, _: im.SpectralNormHandler(model)),
        "StepStatsHandler": on(im.StepStatsHandler),
        "log_to": logged,
    }


def train(attach):
    """The metrics of all iterations, the weights afterwards, and the norms of gradients in float64."""
    torch.manual_seed(0)
    model = Net()
    embedding, *others = model.parameters()
    optimizer = torch.optim.SGD([embedding, *others], 0.1, momentum=0.5)
    norms, metrics = [], []

    def step(engine, x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        dense = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in model.parameters()]
        norms.append(float(sum(each.double().square().sum() for each in dense).sqrt()))
        optimizer.step()

    trainer = Engine(step)
    trainer.logger.disabled = True
    attach(model, optimizer, trainer)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine: metrics.append(
            {
                key: float(value)
                for key, value in engine.state.metrics.items()
                if not key.endswith(("_ms", "_mb", "_per_s", "_wait_share", "/mfu"))
            }
        ),
    )
    generator = torch.Generator().manual_seed(1)
    trainer.run([torch.randint(11, (4, 5), generator=generator) for _ in range(3)])
    return {"metrics": metrics, "weights": [each.tolist() for each in model.parameters()], "norms": norms}


def all_features(name):
    if name:
        take_away(name)
    found = {}
    for feature, attach in features().items():
        try:
            found[feature] = train(attach)
        except RuntimeError as error:
            found[feature] = {"refused": str(error)}
    return found


def main(names):
    found = {}
    for name in names:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                warnings.simplefilter("ignore")
                answer = all_features(name)
            except Exception:  # noqa: BLE001
                answer = {"error": traceback.format_exc()}
            with os.fdopen(writing, "w") as file:
                json.dump(answer, file)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            found[name] = json.load(file)
        os.waitpid(child, 0)
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)  # which imports what takes most of the time
    with tempfile.TemporaryDirectory() as folder:  # the package is compiled once, not for each name
        sys.dont_write_bytecode, sys.pycache_prefix = False, folder
        main(sys.argv[1:])

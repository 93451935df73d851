"""Histograms as TensorBoard reads them, compared with NumPy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers.tensorboard_logger import TensorboardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from ignite_monitor import HistogramHandler
from tests._helpers import in_turn, make_batches, make_step


def read(folder):
    """Tag -> step -> histogram, as TensorBoard reads the files in a folder."""
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    events.Reload()
    return {
        tag: {event.step: event.histogram_value for event in events.Histograms(tag)}
        for tag in events.Tags()["histograms"]
    }


def bins():
    edges, edge = [], 1e-12
    while edge < 1e20:
        edges.append(edge)
        edge *= 1.1
    return np.array([*(-edge for edge in reversed(edges)), 0.0, *edges])


def counts_by_limit(limits, counts):
    """Right limit of a bucket -> number of its elements, without empty buckets."""
    return {limit: number for limit, number in zip(limits, counts, strict=True) if number}


def collect(trainer, handler):
    """Attach a handler; its histograms of all iterations, the latest of each name."""
    histograms = {}
    handler.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: histograms.update(handler.histograms))
    return histograms


def counts_by_numpy(*tensors):
    """The same by numpy, for all tensors together."""
    values = np.concatenate([tensor.detach().double().numpy().ravel() for tensor in tensors])
    counts, edges = np.histogram(values[np.isfinite(values)], bins())
    return counts_by_limit(edges[1:], counts)


def check(histogram, *tensors):
    assert counts_by_limit(histogram.bucket_limit, histogram.bucket) == counts_by_numpy(*tensors)
    values = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    values = values[values.isfinite()]
    assert (histogram.min, histogram.max, histogram.num) == (values.min(), values.max(), len(values))
    assert histogram.sum == pytest.approx(float(values.sum()), rel=1e-9, abs=1e-12)
    assert histogram.sum_squares == pytest.approx(float(values.square().sum()), rel=1e-9)


def test_histograms_of_what_the_optimizer_step_uses(tmp_path):
    """Micro-batches, a scaler, clipping, gradients that are gone at the end, one iteration in two."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[1].register_forward_hook(lambda *_: outputs.append(_[2].detach().clone()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    outputs, truth = [], {}

    def keep(engine):
        truth[engine.state.iteration] = [model[0].weight.grad.clone()]

    def evaluate(engine, batch):
        truth[engine.state.iteration] += [model[0].weight.detach().clone(), *outputs]
        with torch.no_grad():
            model.eval()(batch[0] * 100)
            model.train()
        outputs.clear()

    step = make_step(model, optimizer, parts=2, scaler=scaler, clip=1e-3, zero_at="end", before_step=keep)
    trainer = Engine(in_turn(step, evaluate))
    handler = HistogramHandler(model)
    with TensorboardLogger(log_dir=tmp_path) as logger:
        handler.log_to(logger, trainer, tag="mine")
        handler.attach(trainer, Events.ITERATION_STARTED(every=2))
        trainer.run(make_batches(4))
    result = read(tmp_path)
    names = [name for name, _ in model.named_parameters()]
    assert {*result} == {
        *(f"mine/histograms/{kind}/{name}" for kind in ("weights", "gradients") for name in names),
        *(f"mine/histograms/activations/{name}" for name in ("_root_", "0", "1", "2")),
    }
    assert all([*steps] == [2, 4] for steps in result.values())
    for step in (2, 4):
        gradient, weight, *activations = truth[step]
        check(result["mine/histograms/gradients/0.weight"][step], gradient)
        check(result["mine/histograms/weights/0.weight"][step], weight)
        check(result["mine/histograms/activations/1"][step], activations[-1])
    assert trainer.state.metrics["histograms/activations_count"] == 4


class Several(nn.Module):
    """Returns a tuple, numbers of all sizes and none, in bfloat16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16))
        self.table = nn.Embedding(5, 2, sparse=True)

    def forward(self, x):
        extreme = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-13, -1e25, 1e25])
        hidden = x @ self.weight.float() + self.table(torch.tensor([1, 3, 3]))
        return hidden, {"extreme": extreme, "none": torch.full((2,), math.nan), "empty": torch.zeros(0)}


def test_tensors_of_all_kinds():
    model = Several()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {}

    def train_step(engine, _):
        hidden, _ = model(torch.randn(3, 4))
        hidden.square().sum().backward()
        seen.update(hidden=hidden, dense=model.table.weight.grad.to_dense(), narrow=model.weight.grad.clone())
        optimizer.step()
        model.weight.grad.zero_()
        optimizer.step()  # the second one

    trainer = Engine(train_step)
    result = collect(trainer, HistogramHandler(model))
    trainer.run([None])

    def of(name):
        histogram = result[f"histograms/{name}"]
        return counts_by_limit(histogram["bucket_limits"], histogram["bucket_counts"])

    assert of("activations/_root_/0") == counts_by_numpy(seen["hidden"])
    assert of("gradients/table.weight") == counts_by_numpy(seen["dense"])
    assert of("gradients/weight") == counts_by_numpy(seen["narrow"].float())
    edges = bins()
    assert of("activations/_root_/1/extreme") == {edges[1]: 1, edges[len(edges) // 2 + 1]: 3, edges[-1]: 1}
    assert not any("none" in name or "empty" in name for name in result)
    assert trainer.state.metrics["histograms/activations_count"] == 3


@pytest.mark.parametrize(
    ("chosen", "modules", "parameters"),
    [
        ({"max_histograms": 1}, ["_root_"], ["0.weight"]),
        ({"max_histograms": 4}, ["2.0", "4.1", "7", "_root_"], ["0.weight", "2.0.weight", "4.0.weight", "7.weight"]),
        ({"include": r"^7"}, ["7"], ["7.bias", "7.weight"]),
        ({"exclude": r"[0-6]"}, ["7", "_root_"], ["7.bias", "7.weight"]),
    ],
)
def test_selection_of_modules_and_parameters(chosen, modules, parameters):
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6))
    model = nn.Sequential(nn.Linear(6, 4), *blocks, nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
    result = collect(trainer, HistogramHandler(model, **chosen))
    trainer.run(make_batches(1))
    for kind, names in (("activations", modules), ("weights", parameters), ("gradients", parameters)):
        assert sorted(name.split("/")[2] for name in result if f"/{kind}/" in name) == names


def test_a_gan_has_the_gradients_of_each_own_step():
    """A gradient of the generator's loss is not reported for the discriminator; a fused step gets scaled gradients."""
    models = generator, discriminator = nn.Linear(6, 6), nn.Linear(6, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, fused=True) for model in models]
    truth, scaler = [], torch.amp.GradScaler("cpu", init_scale=64.0)

    losses = {
        discriminator: lambda _, batch: discriminator(generator(batch[0]).detach()).mean(),
        generator: lambda _, batch: discriminator(generator(batch[0])).square().mean(),
    }
    keep = lambda model: lambda engine: truth.append(model.weight.grad / 64)  # noqa: E731
    steps = [
        make_step(model, optimizers[models.index(model)], loss_of=loss_of, scaler=scaler, before_step=keep(model))
        for model, loss_of in losses.items()
    ]
    trainer = Engine(in_turn(*steps))
    handlers = [HistogramHandler(model, prefix=name) for model, name in zip(models, "gd", strict=True)]
    result = []
    for handler in handlers:
        handler.attach(trainer)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda _: result.extend(handlers[i].histograms[f"{'gd'[i]}/gradients/weight"]["sum"] for i in (1, 0)),
    )
    trainer.run(make_batches(2))
    assert result == pytest.approx([float(gradient.double().sum()) for gradient in truth])

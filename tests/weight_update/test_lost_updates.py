"""The share of updates that rounding takes, against whole copies of weights and gradients."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import GradMonitor, StaticThreshold, WeightUpdateHandler
from tests._helpers import in_turn, make_step
from tests._truth import lost_update_fraction

KEY = "monitor/lost_update_fraction"


def make_model(dtype=torch.bfloat16, width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)).to(
        dtype
    )


def step_of(model, optimizer, true, **options):
    """Return a train step that appends the true fraction after each step of the optimizer."""
    kept = []

    def keep(_):
        kept[:] = [(item.detach().clone(), item.grad.clone()) for item in model.parameters()]

    def compare(_):
        steps = zip(kept, model.parameters(), strict=True)
        true.append(lost_update_fraction((before, after, gradient) for (before, gradient), after in steps))

    return make_step(model, optimizer, before_step=keep, after_step=compare, **options)


def squares(model, x):
    return model(x).float().square().mean()


class Run:
    """A training, and what was published and is true in each iteration."""

    def __init__(self, model, optimizer, iterations=6, accumulate=1, make=WeightUpdateHandler, others=(), **kwargs):
        self.published, self.true = [], []
        dtype = next(model.parameters()).dtype
        generator = torch.Generator().manual_seed(1)
        self.engine = Engine(step_of(model, optimizer, self.true, parts=accumulate, loss_of=squares, zero_at="end"))
        handler = make(model, optimizer, **{"sample_size": None, **kwargs})
        handler.attach(self.engine)
        for item in others:
            item.attach(self.engine)
        self.engine.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: self.published.append(engine.state.metrics.get(KEY))
        )
        self.engine.run([torch.randn(8, 8, generator=generator).to(dtype) for _ in range(iterations)])


@pytest.mark.parametrize(
    ("dtype", "make", "lr"),
    [
        (torch.bfloat16, torch.optim.AdamW, 1e-3),
        (torch.bfloat16, torch.optim.SGD, 1e-3),
        (torch.bfloat16, torch.optim.Adagrad, 1e-3),
        (torch.float16, torch.optim.SGD, 1e-2),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_what_whole_copies_say(dtype, make, lr, accumulate):
    model = make_model(dtype)
    run = Run(model, make(model.parameters(), lr=lr), accumulate=accumulate)
    assert run.published == pytest.approx(run.true, abs=1e-12)
    assert 0 < run.true[-1] < 1


def test_weights_of_full_precision_lose_nothing_and_say_nothing():
    model = make_model(torch.float32)
    assert Run(model, torch.optim.SGD(model.parameters(), lr=1e-12)).published == [None] * 6


def test_only_the_narrow_weights_count():
    model = make_model(torch.float32)
    model[2].to(torch.bfloat16)
    model[2].register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    model[4].register_forward_pre_hook(lambda _, args: (args[0].float(),))
    run = Run(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    assert run.published == pytest.approx(run.true, abs=1e-12)


class OwnSGD(torch.optim.SGD):
    """Of the user's own: it may keep float32 copies of the weights, or compensate for rounding."""


def test_without_a_step_there_is_no_share():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e-9), on_spike="skip")
    assert Run(model, optimizer, others=[monitor]).published == [None] * 6
    optimizer.param_groups[0]["lr"] = 0.0
    assert Run(model, optimizer).published == [None] * 6


def test_what_reaches_a_model_after_its_own_step_is_another_model_s():
    """A generator's backward goes through its discriminator once that has made its step."""
    torch.manual_seed(0)
    discriminator, generator = make_model(), nn.Linear(8, 8).bfloat16()
    optimizers = [torch.optim.SGD(item.parameters(), lr=1e-3) for item in (discriminator, generator)]
    true = []

    one_row = lambda model, x: model(x).float()[:, :1].sum()  # noqa: E731
    first = step_of(discriminator, optimizers[0], true, loss_of=one_row)
    second = make_step(generator, optimizers[1], loss_of=lambda _, x: squares(discriminator, generator(x)))
    engine, published = Engine(in_turn(first, second)), []
    WeightUpdateHandler(discriminator, optimizers[0], sample_size=None).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda _: published.append(engine.state.metrics[KEY]))
    engine.run([torch.randn(8, 8).bfloat16() for _ in range(3)])
    assert published == pytest.approx(true, abs=1e-12)


def test_of_other_optimizers_than_torch_s_it_is_not_known():
    model = make_model()
    run = Run(model, OwnSGD(model.parameters(), lr=1e-4))
    assert run.published == [None] * 6
    assert run.true[-1] > 0

"""on_spike="clip": at a spike the step uses the gradient times threshold / norm, and else just what it would use."""

from __future__ import annotations

import math

import pytest
import torch
from ignite.engine import Engine
from torch import nn
from torch.amp import GradScaler

from ignite_monitor import GradMonitor, StaticThreshold, ThresholdRule
from ignite_monitor.events.step_owner import scale
from tests._helpers import assert_same, grad_norm, make_step, mlp_batches, moves_of, train
from tests._models import make_mlp
from tests._optimizers import EVERY_FOREIGN, FEW, OPTIMIZERS, build

LIMIT = 50.0


def scaled_by_hand(model, limit, factors):
    """Compute by the contract, in float64: the gradient times threshold / norm if the norm exceeds the threshold."""
    norm = grad_norm(model)
    factors.append(min(1.0, limit / norm))
    for parameter in model.parameters():
        if parameter.grad is not None and factors[-1] < 1:
            parameter.grad.copy_(parameter.grad.double() * factors[-1])


def run(name, spikes, *, by_hand=False, every=1, scaler=False, count=12, closure=False, on_spike="clip"):
    """Parameters and optimizer state after a training in which monitor or oracle clips; recorder, and factors."""
    model, optimizer = build(name)
    factors, grad_scaler = [], GradScaler("cpu", init_scale=2.0**10) if scaler and not by_hand else None

    step = make_step(
        model,
        optimizer,
        every=every,
        closure=closure,
        scaler=grad_scaler,
        after_backward=lambda engine: (
            scaled_by_hand(model, LIMIT, factors) if by_hand and engine.state.iteration % every == 0 else None
        ),
    )
    monitors = []
    if not by_hand:
        monitors = [
            GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike=on_spike, scaler=grad_scaler)
        ]
    recorder = train(step, mlp_batches(count, spikes), *monitors)
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"]}, recorder, factors


def assert_close(one, other):
    for (_, ours), (_, theirs) in zip(leaves(one), leaves(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)


def leaves(tree, name=""):
    if isinstance(tree, dict):
        for key in tree:
            yield from leaves(tree[key], f"{name}/{key}")
    else:
        yield name, torch.as_tensor(0.0 if tree is None else tree)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *EVERY_FOREIGN])
def test_a_spike_is_scaled_down_to_its_threshold(name):
    ours, recorder, _ = run(name, spikes=(4, 9))
    theirs, _, factors = run(name, spikes=(4, 9), by_hand=True)
    assert_close(ours, theirs)
    assert [i for i, factor in enumerate(factors, 1) if factor < 1] == [4, 9]
    assert recorder.of("grad/clipped_count") == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert recorder.of("grad/skipped_count") == [0] * 12
    assert recorder.of("grad/stepped") == [1] * 12


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("options", [{"every": 3}, {"scaler": True}, {"every": 2, "scaler": True}, {"closure": True}])
def test_with_accumulation_scaler_and_closures(name, options):
    ours, recorder, _ = run(name, spikes=(5,), **options)
    theirs, _, factors = run(name, spikes=(5,), by_hand=True, **options)
    assert_close(ours, theirs)
    assert sum(factor < 1 for factor in factors) == 1 == recorder.of("grad/clipped_count")[-1]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "fused AdamW"])
@pytest.mark.parametrize("own", [4.0, 200.0])
@pytest.mark.parametrize("in_hook", [False, True])
def test_beside_the_users_own_clipping_the_smaller_norm_is_used(name, own, in_hook):
    """The user clips before the step, or in a hook of the optimizer."""
    model, optimizer = build(name)
    used = []

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), own)

    if in_hook:
        optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: used.append(grad_norm(model)))
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="clip")
    train(make_step(model, optimizer, clip=None if in_hook else own), mlp_batches(4, [3], 1e5), monitor)
    assert used[2] == pytest.approx(min(own, LIMIT), rel=1e-4)


class NineBelow(ThresholdRule):
    def __call__(self, mean, std, count):
        return mean - 9 * std


@pytest.mark.parametrize("threshold", [lambda mean, std, count: mean - 9 * std, NineBelow(warmup=2)])
def test_a_threshold_that_is_not_positive_is_none_and_reverses_no_gradient(threshold):
    model, factors = make_mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    before = []
    optimizer.register_step_post_hook(lambda *_: factors.append(float(model[0].weight.grad.sum() / before[-1])))
    monitor = GradMonitor(model, optimizer, threshold=threshold, on_spike="clip")
    step = make_step(model, optimizer, after_backward=lambda _: before.append(float(model[0].weight.grad.sum())))
    recorder = train(step, mlp_batches(20, [5, 12], 50), monitor)
    assert min(factors) > 0
    refused = [row for row in recorder.metrics if row.get("grad/mean", torch.nan) <= 9 * row.get("grad/std", torch.nan)]
    assert len(refused) > 10
    assert all("grad/threshold" not in row and row["grad/spike"] == 0 for row in refused)
    for number in (-1.0, 0.0, math.nan):
        with pytest.raises(ValueError, match="threshold"):
            GradMonitor(model, optimizer, threshold=number)


@pytest.mark.parametrize("name", [*FEW, "Adafactor", *({"Muon"} & OPTIMIZERS.keys())])
def test_without_a_spike_training_is_bitwise_the_same(name):
    for options in ({}, {"scaler": True}, {"every": 3}):
        clipped, recorder, _ = run(name, spikes=(), **options)
        alone, _, _ = run(name, spikes=(), on_spike=None, **options)
        assert_same(clipped, alone)
        assert recorder.of("grad/clipped_count")[-1] == 0


class Halved(torch.optim.Optimizer):
    """Optimizer of an unknown class: it moves by half the gradient, and takes a closure."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.5)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("factor", [1e3, math.nan])
def test_any_optimizer(closure, factor):
    model = make_mlp()
    optimizer, norms = Halved(model.parameters()), []
    step = make_step(model, optimizer, closure=closure, after_backward=lambda engine: norms.append(grad_norm(model)))
    step, moves = moves_of(model, step)
    recorder = train(
        step,
        mlp_batches(5, [5], factor),
        GradMonitor(model, optimizer, threshold=StaticThreshold(5.0), on_spike="clip"),
    )
    moved = [math.hypot(*item.values()) for item in moves]
    assert moved[:4] == pytest.approx([min(norm, 5.0) / 2 for norm in norms[:4]], rel=1e-4)
    if math.isfinite(factor):
        assert moved[4] == pytest.approx(2.5, rel=1e-4)
    else:  # its step cannot be skipped without reading the norm
        assert math.isnan(moved[4])
        assert recorder.of("grad/stepped")[-1] == 1


def test_lbfgs_has_the_first_gradient_of_its_step_clipped():
    model, used = make_mlp(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-6, max_iter=1)
    optimizer.register_step_post_hook(lambda *_: used.append(grad_norm(model)))

    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="clip")
    train(make_step(model, optimizer, closure=True), mlp_batches(3, [2]), monitor)
    assert used[1] == pytest.approx(LIMIT, rel=1e-5)
    assert max(used[0], used[2]) < LIMIT


def test_a_second_step_with_the_same_gradient_does_not_scale_it_again():
    model, norms = make_mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    optimizer.register_step_post_hook(lambda *_: norms.append(grad_norm(model)))
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="clip")
    recorder = train(make_step(model, [optimizer] * 2), mlp_batches(2, [2]), monitor)
    assert norms[2:] == pytest.approx([LIMIT, LIMIT], rel=1e-5)
    assert recorder.of("grad/clipped_count")[-1] == 1


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["strided", "sparse", "uncoalesced", "complex", "half", "transposed", "csr"])
def test_every_kind_of_gradient_is_scaled_in_place(kind):
    torch.manual_seed(0)
    plain = torch.randn(4, 3)
    gradient = {
        "strided": plain.clone,
        "sparse": lambda: plain.to_sparse(),
        "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0, 2]], torch.randn(3, 3), (4, 3), check_invariants=True),
        "complex": lambda: torch.randn(4, 3, dtype=torch.complex64),
        "half": plain.half,
        "transposed": plain.t().clone().t,
        "csr": plain.to_sparse_csr,
    }[kind]()
    before = gradient.to_dense().clone()
    scale([gradient], torch.tensor(1.0, dtype=torch.float64))
    assert_same(gradient.to_dense(), before)
    scale([gradient], torch.tensor(0.25, dtype=torch.float64))
    assert gradient.dtype == before.dtype
    assert_same(gradient.to_dense(), before * 0.25)


def test_a_gradient_that_two_parameters_share_is_scaled_once():
    """As in code that keeps one buffer for both, into which both backwards accumulate."""
    torch.manual_seed(3)
    model = nn.ModuleList(nn.Bilinear(3, 3, 2, bias=False) for _ in range(2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.0)
    buffer = torch.zeros(2, 3, 3)

    def step(engine, batch):
        buffer.zero_()
        for layer in model:
            layer.weight.grad = buffer
        sum(layer(batch, batch).square().sum() for layer in model).backward()
        optimizer.step()

    engine = Engine(step)
    GradMonitor(model, optimizer, on_spike="clip", threshold=StaticThreshold(0.3)).attach(engine)
    engine.run([torch.ones(4, 3)])
    assert 2**0.5 * float(buffer.norm()) == pytest.approx(0.3, rel=1e-6)

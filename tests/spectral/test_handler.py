"""SpectralNormHandler: the norms of what each train step leaves, and of what it did."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from sklearn.datasets import load_digits
from torch import nn

from ignite_monitor import GradMonitor, SpectralNormHandler, StaticThreshold
from tests._helpers import assert_same, make_step, run_monitored
from tests._truth import copies, spectral, spectral_norm

KEYS = {"norm_max", "norm_mean", "stable_rank_min", "stable_rank_median", "error_max"}
KEYS |= {"weight_spectral_scale_max", "weight_spectral_scale_median"}


def matrices_of(model):
    return {name: p for name, p in model.named_parameters() if p.ndim >= 2}


class Net(nn.Module):
    """Weights on both sides of the size where known vectors are needed, a convolution and an embedding."""

    def __init__(self, width=300):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.first = nn.Linear(256, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)
        self.classes = nn.Embedding(10, 6)

    def forward(self, x):
        x = self.conv(x.unsqueeze(1)).flatten(1)
        return self.head(F.relu(self.hidden(F.relu(self.first(x))))) + self.classes.weight.sum()


@pytest.fixture(scope="module")
def batches():
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return list(zip(images.split(128), torch.tensor(digits.target).split(128), strict=True))[:14]


def make(batches, optimizer_of=None, model=None, **arguments):
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = (optimizer_of or (lambda p: torch.optim.Adam(p, lr=1e-3)))(model.parameters())

    step = make_step(model, optimizer, loss_of=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    return model, optimizer, Engine(step), SpectralNormHandler(model, **arguments)


def numbers(handler):
    return {name.removeprefix("spectral/"): float(value) for name, value in handler.metrics.items()}


def test_values_against_float64(batches):
    model, _, trainer, handler = make(batches, per_parameter=True, top_k=2)
    handler.attach(trainer)
    seen = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def check(_):
        weights, got = copies(model), numbers(handler)
        whole = spectral(model, weights, weights, (), has_step=False)
        expected = {name.removeprefix("spectral/"): value for name, value in whole.items()}
        norms = {name: expected.pop(f"norm/{name}") for name in matrices_of(model)}
        assert set(got) == KEYS | set(map("norm/{}".format, norms))
        for name, norm in norms.items():
            assert abs(got[f"norm/{name}"] / norm - 1) <= got["error_max"] <= 1.01e-3, name
        assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        host = handler.on_host()
        top = {name: value for name, value in host.items() if name.startswith("spectral/topk/")}
        assert list(top) == [f"spectral/topk/{name}" for name in sorted(norms, key=lambda name: -norms[name])[:2]]
        seen.append(got["error_max"])

    trainer.run(batches[:5])
    assert len(seen) == 5


@pytest.mark.parametrize("how", ["no step", "lr 0", "skipped spike", "frozen", "outside the optimizer"])
def test_no_step_no_update(batches, how):
    model, optimizer, trainer, handler = make(batches, updates=True)
    if how == "no step":
        trainer = Engine(lambda _, batch: F.cross_entropy(model(batch[0]), batch[1]).backward())
    elif how == "lr 0":
        optimizer.param_groups[0]["lr"] = 0.0
    elif how == "skipped spike":
        GradMonitor(model, optimizer, threshold=StaticThreshold(1e-9), on_spike="skip").attach(trainer)
    elif how == "frozen":
        for weight in matrices_of(model).values():
            weight.requires_grad_(False)
    elif how == "outside the optimizer":
        optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.ndim < 2]
    handler.attach(trainer)
    trainer.run(batches[:2])
    assert set(numbers(handler)) == KEYS


def test_which_parameters_are_measured(caplog):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 5)
            self.head = nn.Linear(5, 7)
            self.head.weight = self.embedding.weight  # once
            self.conv = nn.Conv2d(2, 3, (3, 2))
            self.norm = nn.LayerNorm(5)  # no matrix
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.frozen = nn.Parameter(torch.randn(1, 9), requires_grad=False)
            self.waves = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
            self.column = nn.Parameter(torch.randn(9, 1))
            self.narrow = nn.Parameter(torch.randn(6, 4).half())
            self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))

    model = Odd()
    got = {name: value for name, value in measured(torch.compile(model)).items() if name.startswith("norm/")}
    names = ("embedding.weight", "conv.weight", "frozen", "column", "narrow")
    weights = {name: dict(model.named_parameters())[name] for name in names}
    expected = {f"norm/{name}": spectral_norm(weight) for name, weight in weights.items()}
    assert got == pytest.approx(expected, rel=1e-4)
    normed = [f"normed.parametrizations.weight.original{i}" for i in range(2)]
    text = f"complex and computed weights are not measured: {', '.join(['waves', *normed])}"
    assert caplog.messages == [f"SpectralNormHandler (spectral): {text}"]


def test_weights_stored_by_input():
    """Transposed convolutions and Conv1D of transformers: their matrix goes from what goes in to what comes out."""
    transformers = pytest.importorskip("transformers")
    model = nn.ModuleDict(
        {
            "plain": nn.ConvTranspose1d(4, 6, 3),
            "grouped": nn.ConvTranspose2d(4, 6, (3, 2), groups=2),
            "gpt": transformers.pytorch_utils.Conv1D(12, 5),
        }
    )
    first, second = model["grouped"].weight.detach().split(2)  # of shape (2, 3, 3, 2) each
    matrices = {
        "plain.weight": model["plain"].weight.detach().transpose(0, 1).flatten(1),
        "grouped.weight": torch.cat([first.transpose(0, 1), second.transpose(0, 1)]).flatten(1),
        "gpt.weight": model["gpt"].weight.detach().T,
    }
    expected = {name: spectral_norm(matrix) for name, matrix in matrices.items()}
    conditions = sorted(expected[name] / (len(matrix) / matrix[0].numel()) ** 0.5 for name, matrix in matrices.items())
    got = measured(model)
    assert {name: got[f"norm/{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert got["weight_spectral_scale_max"] == pytest.approx(conditions[-1], rel=1e-4)
    assert got["weight_spectral_scale_median"] == pytest.approx(conditions[1], rel=1e-4)


def measured(model, **arguments):
    """The values of a run of two iterations that do nothing."""
    handler = SpectralNormHandler(model, per_parameter=True, updates=True, **arguments)
    run_monitored(lambda *_: None, [0, 0], handler)
    return numbers(handler)


def test_stacked_experts_are_measured_each_for_itself():
    model = nn.ParameterDict(
        {
            "up": torch.randn(3, 8, 2),
            "up_bias": torch.zeros(3, 2),
            "grid": torch.randn(2, 2, 4, 5),
        }
    )
    got = measured(model)
    expected = {
        f"norm/{name}/{i}": spectral_norm(matrix)
        for name in ("up", "grid")
        for i, matrix in enumerate(getattr(model, name).flatten(0, -3))
    }
    assert {name: value for name, value in got.items() if name.startswith("norm/")} == pytest.approx(expected, rel=1e-4)
    assert not any("spectral_scale" in name for name in got)  # (experts, out, in) or (experts, in, out)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_norms_of_float64_whose_squares_leave_the_range(scale):
    model = nn.ParameterDict({str(i): scale * torch.randn(4 + i, 5, dtype=torch.float64) for i in range(3)})
    norms = torch.tensor([spectral_norm(item / scale) for item in model.values()])
    got = measured(model)
    assert got["norm_mean"] / scale == pytest.approx(float(norms.mean()), rel=1e-5)
    assert got["norm_max"] / scale == pytest.approx(float(norms.max()), rel=1e-5)


def test_a_complex_model_is_refused_as_such(caplog):
    with pytest.raises(ValueError, match="should have real weights of two dimensions or more that are selected"):
        SpectralNormHandler(nn.ParameterDict({name: torch.ones(3, 4, dtype=torch.complex64) for name in "ab"}))
    assert "complex and computed weights are not measured: a, b" in caplog.text


def test_embeddings_have_no_spectral_scale():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(100 * torch.randn(1, 65, 16))
            self.embedding = nn.Embedding(30, 16)
            self.proj = nn.Linear(16, 4, bias=False)
            self.embed_proj = nn.Parameter(3 * torch.randn(16, 16))  # a matrix, whatever its name

    model = Patches()
    got = measured(model)
    expected = {
        "norm/positions/0": spectral_norm(model.positions[0]),
        "norm/embedding.weight": spectral_norm(model.embedding.weight),
        "norm/proj.weight": spectral_norm(model.proj.weight),
        "norm/embed_proj": spectral_norm(model.embed_proj),
    }
    assert {name: value for name, value in got.items() if name.startswith("norm/")} == pytest.approx(expected, rel=1e-4)
    largest = max(2 * spectral_norm(model.proj.weight), spectral_norm(model.embed_proj))
    assert got["weight_spectral_scale_max"] == pytest.approx(largest, rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore:.*spectral_norm.* is deprecated")
def test_weights_that_are_computed_are_not_measured(caplog):
    norms = torch.nn.utils.parametrizations
    made = {
        "normed": norms.weight_norm(nn.Linear(5, 4)),
        "turned": norms.spectral_norm(nn.ConvTranspose1d(4, 6, 1)),
        "table": norms.spectral_norm(nn.Embedding(9, 5)),
        "old_normed": torch.nn.utils.weight_norm(nn.Linear(5, 4)),
        "old_spectral": torch.nn.utils.spectral_norm(nn.Linear(6, 4)),
        "pruned": torch.nn.utils.prune.random_unstructured(nn.Linear(7, 6), "weight", 0.5),
    }
    model = nn.ModuleDict({**made, "plain": nn.Linear(3, 2)})
    before = copy.deepcopy(model.state_dict())
    got = measured(model)
    assert {name for name in got if name.startswith("norm/")} == {"norm/plain.weight"}
    assert got["norm_max"] == pytest.approx(spectral_norm(model["plain"].weight), rel=1e-4)
    assert_same([*before.values()], [*model.state_dict().values()])
    assert len(caplog.messages) == 1
    with pytest.raises(ValueError, match="not computed by their modules"):
        SpectralNormHandler(model, include="old_normed")
    assert "weights are not measured: old_normed.weight_g, old_normed.weight_v" in caplog.messages[-1]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_that_are_computed_from_an_iteration_on_are_absent_from_then_on(caplog):
    """The first ones are reported."""
    model = nn.ModuleDict({name: nn.Linear(3, 4) for name in ("pruned", "normed", "parametrized", "plain")})
    changes = {
        2: lambda: torch.nn.utils.prune.random_unstructured(model["pruned"], "weight", 0.5),
        3: lambda: torch.nn.utils.weight_norm(model["normed"]),
        5: lambda: torch.nn.utils.parametrizations.orthogonal(model["parametrized"]),
    }
    handler, measured_names = SpectralNormHandler(model, per_parameter=True), []
    trainer = Engine(lambda engine, _: changes.get(engine.state.iteration, lambda: None)())
    handler.attach(trainer)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda _: measured_names.append({name[5:-7] for name in numbers(handler) if name.startswith("norm/")}),
    )
    trainer.run(range(6))
    present = {*model}
    for iteration, seen in enumerate(measured_names, 1):
        present -= {[*model][[2, 3, 5].index(iteration)]} if iteration in changes else set()
        assert seen == present
    text = "complex and computed weights are not measured: pruned.weight_orig"
    assert caplog.messages == [f"SpectralNormHandler (spectral): iteration 2: {text}"]
    assert [report.names for report in handler.reports] == [("pruned.weight_orig",)]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_other_weights_of_a_module_that_computes_one_are_measured():
    model = torch.nn.utils.weight_norm(nn.LSTM(5, 4), "weight_hh_l0")
    got = measured(model)
    assert {name for name in got if name.startswith("norm/")} == {"norm/weight_ih_l0"}
    assert got["norm/weight_ih_l0"] == pytest.approx(spectral_norm(model.weight_ih_l0), rel=1e-4)


@pytest.mark.parametrize("method", ["power", "ns5-fast", "ns3-accurate"])
def test_weight_that_is_not_finite_is_skipped_with_one_warning(batches, method, caplog):
    model, *_, handler = make(batches, method=method, per_parameter=True, top_k=1)
    model.hidden.weight.requires_grad_(False)[3, 4] = math.nan
    with caplog.at_level(logging.WARNING):
        run_monitored(lambda *_: None, range(4), handler)
    assert len(caplog.records) == 1
    got = numbers(handler)
    assert "norm/hidden.weight" not in got
    assert "norm/first.weight" in got
    assert all(map(math.isfinite, got.values()))
    assert "spectral/topk/hidden.weight" not in handler.on_host()


def test_nothing_finite_publishes_no_norm(batches, caplog):
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, math.inf)
    handler = SpectralNormHandler(model)
    run_monitored(lambda *_: None, [0], handler)
    assert not any("norm" in name or "rank" in name for name in handler.on_host())


@pytest.mark.parametrize("method", ["ns5-fast", "ns3-accurate"])
def test_quick_methods_publish_no_bound(batches, method):
    model, _, trainer, handler = make(batches, method=method)
    handler.attach(trainer)
    trainer.run(batches[:2])
    got = numbers(handler)
    assert set(got) == KEYS - {"error_max"}
    assert got["norm_max"] == pytest.approx(max(map(spectral_norm, matrices_of(model).values())), rel=0.5)


def test_names_that_tags_cannot_hold_and_parameters_that_come_and_go(batches):
    model, _, trainer, handler = make(batches, updates=True, per_parameter=True)
    handler.attach(trainer)
    trainer.run(batches[:1])

    @trainer.on(Events.ITERATION_STARTED(once=2))
    def grow(_):
        model.extra = nn.Linear(4, 290)
        model.hidden.weight = nn.Parameter(model.hidden.weight.detach() * 2)
        model.classes = nn.Embedding(10, 7)  # the optimizer still steps the last weight of before

    trainer.run(batches[:3])
    got = numbers(handler)
    assert got["norm/extra.weight"] == pytest.approx(spectral_norm(model.extra.weight), rel=1e-4)
    assert got["norm/hidden.weight"] == pytest.approx(spectral_norm(model.hidden.weight), rel=1e-3)

"""Handlers beside scripted and traced modules, whose parameters are watched as any others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ignite_monitor import ActivationHandler, GradMonitor, RCCHandler, SpectralNormHandler, WeightUpdateHandler
from ignite_monitor.model.names import modules_by_name
from tests._helpers import make_step, run_monitored

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

COMPILE = {"script": torch.jit.script, "trace": lambda module: torch.jit.trace(module, torch.ones(2, 6))}
HANDLERS = {
    "ActivationHandler": lambda model, _: ActivationHandler(
        model, activations=True, parameters=True, gradients=True, attention=True
    ),
    "GradMonitor": GradMonitor,
    "SpectralNormHandler": lambda model, _: SpectralNormHandler(model, per_parameter=True),
    "WeightUpdateHandler": WeightUpdateHandler,
}


def build(how, whole):
    torch.manual_seed(0)
    inner = COMPILE[how](nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.0)))
    return inner if whole else nn.Sequential(nn.Linear(6, 6), inner)


def train(model, make=None, iterations=4):
    """The losses, and each iteration's values."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, generator = [], torch.Generator().manual_seed(1)
    step = make_step(model, optimizer)
    batches = [(torch.randn(4, 6, generator=generator), torch.ones(4, 6)) for _ in range(iterations)]
    monitors = [] if make is None else [make(model, optimizer)]
    values = run_monitored(lambda *given: losses.append(step(*given).item()), batches, *monitors)
    return losses, values


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
@pytest.mark.parametrize("how", COMPILE)
@pytest.mark.parametrize("handler", HANDLERS)
def test_training_goes_on_as_without_a_handler(handler, how, whole):
    losses, values = train(build(how, whole), HANDLERS[handler])
    assert losses == train(build(how, whole))[0]
    assert all(values)


@pytest.mark.parametrize("how", COMPILE)
def test_what_is_measured_is_that_of_the_same_model_unscripted(how):
    plain = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.0)))
    model = build(how, whole=False)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    expected = train(plain, HANDLERS["ActivationHandler"])[1]
    for ours, theirs in zip(train(model, HANDLERS["ActivationHandler"])[1], expected, strict=True):
        inside = {name for name in theirs if name.startswith("activation/1.")}
        units_unknown = {
            f"activation/{name}/dead_fraction" for name in ("1", "_root_")
        }  # of a scripted module's output
        assert set(ours) == set(theirs) - inside - units_unknown
        assert ours == pytest.approx({name: theirs[name] for name in ours}, rel=1e-5, abs=1e-7)


def test_what_is_inside_is_never_called():
    assert list(modules_by_name(build("script", whole=False))) == ["", "0", "1"]
    assert list(modules_by_name(build("script", whole=True))) == [""]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
@pytest.mark.parametrize("how", COMPILE)
def test_no_reference_is_run_beside_them(how, whole):
    model = build(how, whole)
    with pytest.raises(ValueError, match="Argument model has a scripted module"):
        RCCHandler(model)
    with pytest.raises(ValueError, match="Argument model has a scripted module"):
        ActivationHandler(model, activation_differences=True, reference="init")

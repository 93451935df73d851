"""A skipped step of an optimizer of other packages leaves no trace: weights, state, and attributes are compared."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from tests import _optimizers
from tests._helpers import make_step
from tests.gradient._skipped import compare

pytestmark = [pytest.mark.compatibility, pytest.mark.filterwarnings("ignore")]

# All of pytorch_optimizer that take parameters and a learning rate. Left out: those that need a model, a closure or a
# second backward pass; Kron, which draws from Python's own generator; AdaShift, whose state the test cannot compare.
NAMES = """
    A2Grad ADOPT APOLLO ASGD AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaFactor AdaGC AdaMax AdaMod AdaNorm AdaPNM
    AdaSmooth AdaTAM Adai Adalite Adam AdamC AdamG AdamP AdamS AdamW AdamWSN Adan AggMo Aida Alice Amos Ano ApolloDQN
    AvaGrad BCOS CAME DASH DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD DiffGrad DualAdam EXAdam EmoFact
    EmoLynx EmoNavi FAdam FOCUS FTRL Fira FlashAdamW Fromage GaLore Grams Gravity GrokFastAdamW Kate LARS LaProp Lamb
    Lion LoRARite MADGRAD MARS MSVAG Magma NAdam Nero NovoGrad PAdam PID PNM Prodigy QHAdam QHM RACS RAdam RMSprop ROSE
    Ranger SCION SCIONLight SGD SGDP SGDSaI SGDW SM3 SOAP SPAM SPlus SRMM SWATS SaRA ScheduleFreeAdamW
    ScheduleFreeRAdam ScheduleFreeSGD Shampoo SignSGD SimplifiedAdEMAMix SpectralSphere StableAdamW StableSPAM TAM Tiger
    VSGD Yogi
"""
WRAPPERS = ("Lookahead", "TRAC", "OrthoGrad", "ScheduleFreeWrapper")
EIGHT_BIT = """
    Adam AdamW SGD Lion RMSprop AdEMAMix LAMB LARS Adagrad Adam8bit AdamW8bit Lion8bit SGD8bit PagedAdamW
"""
CASES = [
    *(f"pytorch_optimizer.{name}" for name in (*NAMES.split(), *WRAPPERS)),
    *(f"bitsandbytes.{name}" for name in EIGHT_BIT.split()),
    *_optimizers.INSTALLED_FOR_COMPATIBILITY,
]


def build(package, name, parameters):
    if package == "bitsandbytes":
        momentum = {"momentum": 0.9} if name in ("SGD", "LARS", "SGD8bit") else {}
        return getattr(importlib.import_module("bitsandbytes.optim"), name)(parameters, lr=1e-3, **momentum)
    kind = getattr(pytest.importorskip(package), name)
    if name in WRAPPERS:
        return kind(torch.optim.AdamW(parameters, lr=1e-2))
    return kind(parameters, **({"lr": 1e-3} if "lr" in inspect.signature(kind).parameters else {}))


@pytest.mark.parametrize("name", CASES)
def test_a_skipped_step_leaves_no_trace(name, monkeypatch, record_property):
    package, _, kind = name.partition(".")
    pytest.importorskip(package)
    if name not in _optimizers.INSTALLED_FOR_COMPATIBILITY:
        monkeypatch.setitem(
            _optimizers.INSTALLED_FOR_COMPATIBILITY, name, lambda parameters: build(package, kind, parameters)
        )
    for spikes in ((7,), (1, 2, 6, 7, 8)):
        compare(name, spikes, lambda model, optimizer, _: make_step(model, optimizer))
    record_property("optimizer", name)

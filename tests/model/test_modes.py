"""Modes to compute in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ignite_monitor.model.linear_maps import is_builtin_layer
from ignite_monitor.model.modes import full_precision

SETTINGS = {
    "default": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "inherited": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "convolutions": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32"),
    "one backend": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
}
NEW = hasattr(torch.backends.cuda.matmul, "fp32_precision")
BACKENDS = [torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul] if NEW else []
BACKENDS += [torch.backends.cudnn.conv, torch.backends.cudnn.rnn] if NEW else []
DEFAULTS = [backend.fp32_precision for backend in BACKENDS]


def settings():
    return [backend.fp32_precision for backend in BACKENDS]


@pytest.mark.parametrize("name", SETTINGS)
def test_full_precision_leaves_the_users_settings(name):
    if not NEW and name in ("inherited", "one backend", "convolutions"):
        pytest.skip("torch has no fp32_precision")
    try:
        SETTINGS[name]()
        before = settings()
        with full_precision(torch.device("cpu")):
            assert all(value in ("none", "ieee") for value in settings()[1:])
            if name in ("default", "high", "medium", "allow_tf32"):
                assert torch.get_float32_matmul_precision() == "highest"
                assert not torch.backends.cuda.matmul.allow_tf32
        assert settings() == before
        if NEW and name == "inherited":
            torch.backends.fp32_precision = "ieee"  # a later change reaches the backends still
            assert settings()[:3] == ["ieee"] * 3
    finally:
        if NEW:
            torch.set_float32_matmul_precision("highest")
            for backend, value in zip(BACKENDS, DEFAULTS, strict=True):
                backend.fp32_precision = value
        else:
            torch.set_float32_matmul_precision("highest")


class Standardized(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Renamed(nn.Conv2d):
    def extra_repr(self):
        return "the same"


def test_a_layer_that_overrides_a_part_of_its_forward_is_not_built_in():
    assert is_builtin_layer(Renamed(1, 1, 1), nn.Conv2d)
    assert is_builtin_layer(nn.ConvTranspose2d(1, 1, 1), nn.ConvTranspose2d)
    assert not is_builtin_layer(Standardized(1, 1, 1), nn.Conv2d)
    patched = nn.Conv2d(1, 1, 1)
    patched._conv_forward = lambda x, weight, bias: x
    assert not is_builtin_layer(patched, nn.Conv2d)

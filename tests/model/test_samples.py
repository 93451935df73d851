"""Samples of parameters: their elements, norms, and what makes them useless."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ignite_monitor.model.samples import ParameterSamples, sample_indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("sample_size", [16, None])
def test_sampled_elements_and_estimated_norms(dtype, sample_size):
    model = nn.ParameterList([torch.randn(shape).to(dtype) for shape in ((40, 3), (4, 30), (16,), (), (5, 5, 2))])
    samples = ParameterSamples(model, sample_size)
    parts = [samples.take(index, parameter) for index, parameter in enumerate(model)]
    norms = samples.norms(parts) * samples.factors
    for index, (parameter, part) in enumerate(zip(model, parts, strict=True)):
        whole = parameter.detach().flatten().to(torch.complex128 if dtype.is_complex else torch.float64)
        indices = sample_indices(str(index), parameter.shape, sample_size)
        taken = whole if indices is None else whole[indices]
        elements = torch.view_as_real(taken).flatten() if dtype.is_complex else taken
        assert torch.equal(part.double(), elements)
        expected = taken.abs().square().sum() * len(whole) / len(taken)
        assert float(norms[index]) == pytest.approx(float(expected) ** 0.5, rel=1e-6)


def test_parameters_that_are_not_contiguous():
    weight = torch.randn(30, 20).T
    samples = ParameterSamples(nn.ParameterList([torch.zeros(20, 30)]), 25)
    assert torch.equal(samples.take(0, weight), weight.flatten()[sample_indices("0", (20, 30), 25)])


@pytest.mark.parametrize("change", ["none", "new parameter", "dtype", "replaced", "removed", "renamed"])
def test_fits(change):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    samples = ParameterSamples(model, None)
    if change == "new parameter":
        model[0].extra = nn.Parameter(torch.ones(1))
    elif change == "dtype":
        model.double()
    elif change == "replaced":
        model[0].weight = nn.Parameter(torch.ones(4, 3))
    elif change == "removed":
        model[1].bias = None
    elif change == "renamed":
        model.last = model[1]
        delattr(model, "1")
    assert samples.fits() == (change == "none")

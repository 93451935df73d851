"""Samples of parameters: known answers, unbiased elements and norms, and what makes them useless."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ignite_monitor.model.sampling import ParameterSamples, fnv1a_64, sample_indices


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0xCBF29CE484222325),
        ("a", 0xAF63DC4C8601EC8C),
        ("foobar", 0x85944171F73967E8),
        ("é", (((0xCBF29CE484222325 ^ 0xC3) * 0x100000001B3 % 2**64) ^ 0xA9) * 0x100000001B3 % 2**64),
    ],
)
def test_fnv1a_64_known_answers(text, value):
    assert fnv1a_64(text) == value


@pytest.mark.parametrize(
    ("shape", "count", "taken"),
    [
        ((100,), 100, None), ((101,), 100, 100), ((100,), None, None), ((), 1, None), ((0, 3), 1, None),
        ((3, 40), 100, 100), ((200, 4), 100, 200), ((200, 1), 100, None), ((200, 2, 2), 100, 100),
        ((10**6, 10**6), 9, 10**6),
    ],
)  # fmt: skip
def test_small_tensors_are_whole_and_large_ones_sampled(shape, count, taken):
    indices = sample_indices("name", shape, count)
    assert (None if indices is None else len(indices)) == taken
    if indices is not None:
        assert 0 <= indices.min() <= indices.max() < torch.Size(shape).numel()
        if len(shape) == 2 and shape[0] > count:  # one element of each row
            assert torch.equal(indices // shape[1], torch.arange(shape[0]))


def test_the_global_generator_is_untouched():
    before = torch.get_rng_state()
    sample_indices("name", (1000,), 10)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(150_000,), (1000, 150)])
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "low rank"])
def test_mean_square_of_a_sample_is_within_the_stated_error(kind, shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 300, generator=generator, dtype=torch.float64)
    if kind == "low rank":
        x = x[:, :2] @ x[:2]
    x = x.flatten() * (x.flatten().abs() if kind == "heavy-tailed" else 1)
    count = 256 if len(shape) == 1 else shape[0]
    kurtosis = x.pow(4).mean() / x.square().mean() ** 2
    errors = torch.stack([
        x[sample_indices(f"{kind} {name}", shape, 256)].square().mean() / x.square().mean() - 1 for name in range(400)
    ])  # fmt: skip
    stated = ((kurtosis - 1) / count).sqrt()
    # 400 errors show their root mean square to 1 / sqrt(800) = 4 % (more for heavy tails), their mean to stated / 20
    assert errors.square().mean().sqrt() < 1.15 * stated
    assert errors.mean().abs() < 4 * stated / 20

"""Spectral norms against LAPACK in float64, with bounds that hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ignite_monitor.spectral import norm
from ignite_monitor.spectral.norm import METHODS, TOLERANCE, measure

# One shape where WᵀW is looked at itself, and three where it is not.
SHAPES = [(40, 60), (300, 280), (270, 900), (900, 270)]


def exact(matrices):
    return torch.linalg.matrix_norm(matrices.double(), ord=2)


def with_spectrum(shape, values):
    """A matrix with these singular values."""
    size = min(shape)
    left, right = (torch.linalg.qr(torch.randn(n, size, dtype=torch.float64))[0] for n in shape)
    return (left * torch.as_tensor(values, dtype=torch.float64)) @ right.T


def spectrum(size, *largest, rest=0.5):
    return [*largest, *[rest] * (size - len(largest))]


KINDS = {
    "Gaussian": lambda shape: torch.randn(shape),
    "low rank": lambda shape: torch.randn(shape[0], 3) @ torch.randn(3, shape[1]),
    "rank 1": lambda shape: torch.randn(shape[0], 1) @ torch.randn(1, shape[1]),
    "nearly degenerate": lambda shape: with_spectrum(shape, spectrum(min(shape), 1.0, 0.9992)).float(),
    "repeated": lambda shape: with_spectrum(shape, spectrum(min(shape), 1.0, 1.0, 1.0, rest=0.99)).float(),
    "orthogonal": lambda shape: with_spectrum(shape, [1.0] * min(shape)).float(),
    "flat": lambda shape: with_spectrum(shape, torch.linspace(0.95, 1.0, min(shape))).float(),
    "heavy tails": lambda shape: torch.randn(shape) / torch.rand(shape),
    "one number": lambda shape: one_number(shape),
    "all the same": lambda shape: torch.ones(shape),
    "diagonal": lambda shape: torch.eye(*shape) * torch.rand(shape[0], 1),
    "1e-20": lambda shape: torch.randn(shape) * 1e-20,
    "1e20": lambda shape: torch.randn(shape) * 1e20,
    "subnormal": lambda shape: torch.randn(shape) * 1e-42,
    "as large as can be": lambda shape: torch.randn(shape).clamp(-3, 3) * 1e38,
    "rows of all scales": lambda shape: torch.randn(shape) * torch.logspace(-15, 15, shape[0])[:, None],
    "float64, 1e200": lambda shape: torch.randn(shape, dtype=torch.float64) * 1e200,
}  # fmt: skip


def one_number(shape):
    matrix = torch.zeros(shape)
    matrix[7, 11] = -3.0
    return matrix


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def check(result, matrices, tolerance=TOLERANCE):
    expected = exact(matrices)
    errors = torch.where(expected == 0, result.norms, (result.norms / expected - 1).abs())
    assert (errors <= result.errors).all(), (errors, result.errors)
    assert (result.errors <= 1.01 * tolerance).all(), result.errors


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_power_is_right_and_its_bound_holds(kind, shape):
    for number in range(2):
        matrix = KINDS[kind](shape)[None]
        result = measure(matrix, "power", number)
        check(result, matrix)
        largest = matrix.abs().max().double()
        frobenius = torch.linalg.matrix_norm(matrix.double() / largest) * largest
        torch.testing.assert_close(result.frobenius, frobenius, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(300, 280), (600, 700)])
@pytest.mark.parametrize("kind", KINDS)
def test_powers_of_larger_matrices_as_on_a_device(kind, shape, monkeypatch):
    monkeypatch.setattr(norm, "_SMALL", norm._SMALL_ON_DEVICE)
    matrix = KINDS[kind](shape)[None]
    result = measure(matrix, "power", 0)
    check(result, matrix)


@pytest.mark.parametrize(("shape", "times"), [((300, 300), 8), ((2000, 256), 2), ((600, 600), 1)])
def test_one_direction_a_little_above_a_dense_spectrum(shape, times):
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    for growth in (2e-4, 2e-3, 0.05):
        values[60] = values[0] * (1 + growth)
        matrix = ((left * values) @ right)[None]
        for number in range(times):
            check(measure(matrix, "power", number), matrix)


@pytest.mark.parametrize("steps", [4, 8, 24])
def test_bound_of_a_fixed_number_of_steps_is_honest(steps, monkeypatch):
    """On a device, reading the bound would synchronize."""
    monkeypatch.setattr(norm, "_MOST_STEPS", steps)
    matrix = torch.randn(1, 600, 500)
    result = measure(matrix, "power", 0)
    check(result, matrix, tolerance=math.inf)
    assert result.errors < {4: 0.2, 8: 0.05, 24: 1e-3}[steps]


@pytest.mark.parametrize("rank", [0, 1, 5, 25])
def test_steps_beyond_the_rank_do_no_harm(rank, monkeypatch):
    matrix = torch.randn(1, 400, rank) @ torch.randn(1, rank, 301)
    monkeypatch.setattr(norm, "TOLERANCE", -1.0)
    for steps in (5, 12, 17, 30):
        monkeypatch.setattr(norm, "_MOST_STEPS", steps)
        check(measure(matrix, "power", 0), matrix)


@pytest.mark.parametrize("method", METHODS)
def test_zero_is_zero_exactly(method):
    for shape in [*SHAPES, (1, 1), (5, 1)]:
        result = measure(torch.zeros(2, *shape), method, 0)
        assert result.norms.tolist() == [0.0, 0.0]
        assert result.frobenius.tolist() == [0.0, 0.0]
        assert result.errors.nan_to_num(0.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("number", [math.nan, -math.inf])
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("method", METHODS)
def test_matrix_that_is_not_finite_is_nan_and_the_others_are_right(method, shape, number):
    matrices = torch.randn(3, *shape)
    alone = measure(matrices[::2].contiguous(), "power", 0)
    matrices[1, 2, 3] = number
    result = measure(matrices, method, 0)
    assert result.norms.isnan().tolist() == [False, True, False]
    assert result.frobenius.isnan().tolist() == [False, True, False]
    check(alone, matrices[::2])


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_any_small_shape(shape, seed, scale):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    check(measure(matrices, "power", seed), matrices)


@pytest.mark.parametrize("shape", [(257, 257), (257, 1), (1, 5000), (300, 5000), (5000, 257)])
def test_extreme_shapes(shape):
    matrices = torch.randn(2, *shape)
    check(measure(matrices, "power", 0), matrices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_norm_is_that_of_the_rounded_weights(dtype):
    matrix = torch.randn(1, 300, 280).to(dtype)
    check(measure(matrix, "power", 0), matrix)


def test_precision_that_training_allows_does_not_matter():
    matrix = torch.randn(1, 300, 280)
    expected = measure(matrix, "power", 1)
    allowed = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            result = measure(matrix, "power", 1)
            product = matrix @ matrix.mT
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(allowed)
    assert product.dtype == torch.bfloat16
    assert torch.equal(result.norms, expected.norms)


# Newton-Schulz


def polar_factor(matrix, method):
    """A wide matrix and what the method makes of it, as it is written down, in float64."""
    wide = matrix.double() if len(matrix) <= matrix.shape[1] else matrix.double().T
    factor = wide / torch.linalg.matrix_norm(wide)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5 if method == "ns5-fast" else 8):
        gram = factor @ factor.T
        if method == "ns5-fast":
            factor = a * factor + (b * gram + c * gram @ gram) @ factor
        else:
            factor = factor @ (3 * torch.eye(factor.shape[1], dtype=torch.float64) - factor.T @ factor) / 2
    return wide, factor


@pytest.mark.parametrize("shape", [(64, 64), (30, 90), (90, 30)])
@pytest.mark.parametrize(("method", "iterations"), [("ns5-fast", 7), ("ns3-accurate", 10)])
def test_newton_schulz_is_the_formula(shape, method, iterations):
    matrix = torch.randn(shape)
    start = torch.randn(1, min(shape), generator=torch.Generator().manual_seed(3))[0]
    wide, factor = polar_factor(matrix, method)
    vector = start.double() / start.double().norm()
    for _ in range(iterations):
        image = wide @ (factor.T @ vector)
        vector = image / image.norm()
    expected = (vector @ (wide @ (factor.T @ vector))).clamp(torch.linalg.matrix_norm(wide) / len(wide) ** 0.5)
    result = measure(matrix[None], method, 3)
    torch.testing.assert_close(result.norms[0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["ns5-fast", "ns3-accurate"])
def test_newton_schulz_is_within_the_bounds_of_the_frobenius_norm(method):
    """An orthogonal matrix, and one of rank 1 of which the start hardly has a part."""
    orthogonal, one = torch.linalg.qr(torch.randn(50, 50))[0], torch.zeros(400, 400)
    one[17, 19] = 3.0
    assert measure(orthogonal[None], method, 0).norms.item() == pytest.approx(1.0, rel=1e-2)
    assert 3 / 20 <= measure(one[None], method, 0).norms.item() <= 3.01


@pytest.mark.parametrize(("method", "least", "most"), [("ns5-fast", -0.4, -0.2), ("ns3-accurate", -0.25, -0.03)])
def test_newton_schulz_is_biased_as_documented(method, least, most):
    matrices = torch.randn(4, 256, 256)
    result = measure(matrices, method, 0)
    bias = (result.norms / exact(matrices) - 1).mean()
    assert least < bias < most
    assert result.errors.isnan().all()

"""Spectral norms against LAPACK in float64, with bounds that hold."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ignite_monitor.spectral.block_lanczos import PROBES, WARM, WIDTH, BlockLanczos
from ignite_monitor.spectral.dominant import dominant
from ignite_monitor.spectral.matrices import Matrices
from ignite_monitor.spectral.norm import TOLERANCE, newton_schulz, power, svd

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


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def check(found, matrices, tolerance=TOLERANCE):
    expected = exact(matrices)
    errors = torch.where(expected == 0, found.norms, (found.norms / expected - 1).abs())
    assert (errors <= found.errors).all(), (errors, found.errors)
    assert (found.errors <= 1.01 * tolerance).all(), found.errors


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_power_is_right_and_its_bound_holds(kind, shape, generator):
    matrix = KINDS[kind](shape)[None]
    found = power(Matrices(matrix), None, generator, None)
    check(found, matrix)
    frobenius = torch.linalg.matrix_norm(matrix.double() / matrix.abs().max().double()) * matrix.abs().max().double()
    torch.testing.assert_close(found.frobenius, frobenius, rtol=1e-5, atol=0)
    check(svd(Matrices(matrix)), matrix)


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_power_from_vectors_that_know_nothing_of_the_matrix(shape, generator):
    """Each matrix is measured with the vectors of another kind: nothing that they have no part of is overlooked."""
    vectors = None
    for kind in [*KINDS, *reversed(KINDS)]:
        matrix = KINDS[kind](shape).to(torch.float64 if "64" in kind else torch.float32)[None]
        known = None if vectors is None else vectors.to(matrix.dtype)
        found = power(Matrices(matrix), known, generator, None)
        check(found, matrix)
        vectors = found.vectors.float()


@pytest.mark.parametrize("what", ["another direction", "sign", "permuted", "from nothing", "below, then above"])
def test_what_was_largest_is_so_no_more(what, generator):
    first = with_spectrum((300, 280), spectrum(280, 1.0, 0.9)).float()
    left, values, right = torch.linalg.svd(first.double())
    changed = {
        # Nothing of the old leading eigenspace has changed, and a direction outside of it has come up.
        "another direction": (left[:, :280] * values.clone().index_fill(0, torch.tensor([100]), 1.003)) @ right,
        "sign": -first,
        "permuted": first[torch.randperm(300)][:, torch.randperm(280)],
        "from nothing": left[:, 200:201] @ right[200:201],
        "below, then above": (left[:, :280] * values.index_fill(0, torch.tensor([1]), 1.002)) @ right,
    }[what].float()[None]
    vectors = power(Matrices(first[None]), None, generator, None).vectors
    check(power(Matrices(changed), vectors, generator, None), changed)


@pytest.mark.parametrize(("largest", "rest"), [(1.0, 0.99), (1.002, 0.999), (1.0, 0.1)])
@pytest.mark.parametrize("known", ["none of it", "one direction", "nothing"])
def test_known_vectors_that_are_of_no_use(known, largest, rest, generator):
    """Without a part of the largest direction, all the same, or zero, as after a resumed run of another model."""
    matrix = with_spectrum((320, 280), spectrum(280, largest, rest=rest)).float()[None]
    right = torch.linalg.svd(matrix[0].double())[2].float()
    vectors = {
        "none of it": right[1 : WARM + 1],
        "one direction": right[3:4].expand(WARM, -1),
        "nothing": torch.zeros(WARM, 280),
    }[known][None]
    for scale in (1.0, 1e-20, 1e20):
        check(power(Matrices(scale * matrix), vectors, generator, None), scale * matrix)


@pytest.mark.parametrize("growth", [1.2e-3, 2e-3, 1e-2, 0.05, 0.5])
@pytest.mark.parametrize(("shape", "times"), [((300, 300), 30), ((2000, 256), 30), ((1024, 1024), 2)])
def test_direction_that_no_known_vector_has_a_part_of_outgrows_the_largest(shape, times, growth, generator):
    """From one measurement to the next, in a dense spectrum; the random vectors alone can find it."""
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    vectors = power(Matrices(((left * values) @ right)[None]), None, generator, None).vectors
    direction = right[60]
    vectors = vectors - (vectors @ direction)[..., None] * direction
    values[60] = values[0] * (1 + growth)
    matrix = ((left * values) @ right)[None]
    expected = exact(matrix)
    for _ in range(times):
        found = power(Matrices(matrix), vectors, generator, None)
        assert (found.norms / expected - 1).abs() <= found.errors <= 1.01 * TOLERANCE


@pytest.mark.parametrize("shape", [(300, 300), (2000, 256)])
@pytest.mark.parametrize("what", ["swapped", "another weight", "hardly any", "rank one"])
def test_whatever_happens_to_a_dense_spectrum_between_two_measurements(what, shape, generator):
    for _ in range(20):
        matrix = torch.randn(1, *shape)
        size = matrix.norm() / math.prod(shape) ** 0.5 * (shape[0] ** 0.5 + shape[1] ** 0.5)
        vectors = power(Matrices(matrix), None, generator, None).vectors
        changed = {
            "swapped": lambda matrix=matrix: matrix[:, :, torch.randperm(shape[1])],
            "another weight": lambda: torch.randn(1, *shape),
            "hardly any": lambda matrix=matrix: matrix * (1 + 1e-6 * torch.randn(1, *shape)),
            "rank one": lambda matrix=matrix, size=size: matrix + size * unit(shape[0])[:, None] * unit(shape[1]),
        }[what]()
        check(power(Matrices(changed), vectors, generator, None), changed)


def unit(size):
    vector = torch.randn(size)
    return vector / vector.norm()


def test_bound_asked_for_is_kept_to_by_the_bound_that_comes_out(generator):
    """What the largest eigenvalue is said not to exceed by, it does not exceed by, and the bound says no more."""
    values = torch.rand(400).sort().values / 400
    lanczos = BlockLanczos(lambda rows: rows * values, torch.randn(1, WIDTH, 400, generator=generator), 20)
    answers = []
    for _ in range(20):
        lanczos.extend()
        leading = lanczos.leading()
        answers.append(not lanczos.missing(TOLERANCE))
        assert answers[-1] is bool(leading.upper <= leading.lower * (1 + 1.001 * TOLERANCE) ** 2)
        assert leading.lower * (1 - 1e-5) <= values[-1] <= leading.upper
    assert answers[-1]
    assert not answers[0]


def test_vectors_orthogonal_to_the_largest_direction(generator):
    matrix = torch.diag(torch.tensor(spectrum(300, 1.0, 0.99)))[None]
    vectors = torch.eye(300)[None, 1 : WARM + 1]
    check(power(Matrices(matrix), vectors, generator, None), matrix)


def test_known_vectors_save_steps(generator):
    matrix = torch.randn(1, 600, 500)
    cold = power(Matrices(matrix), None, generator, None)
    warm = power(Matrices(matrix + 1e-3 * torch.randn(1, 600, 500)), cold.vectors, generator, None)
    assert 0 < warm.steps < cold.steps


def test_fixed_number_of_steps_is_kept_to_and_its_bound_is_honest(generator):
    matrix = torch.randn(1, 600, 500)
    for steps in (1, 2, 4, 8):
        found = power(Matrices(matrix), None, generator, steps)
        assert found.steps == steps
        check(found, matrix, tolerance=math.inf)
    assert found.errors < 0.1


@pytest.mark.parametrize("rank", [0, 1, 5, 25])
def test_steps_beyond_what_there_is_to_find_do_no_harm(rank, generator):
    matrix = torch.randn(1, 400, rank) @ torch.randn(1, rank, 301)
    for steps in (5, 12, 17, 30):
        found = power(Matrices(matrix), None, generator, steps)
        check(found, matrix)
        check(power(Matrices(matrix), found.vectors, generator, steps), matrix)


def test_zero_is_zero_exactly(generator):
    for shape in [*SHAPES, (1, 1), (5, 1)]:
        for found in (
            power(Matrices(torch.zeros(2, *shape)), None, generator, None),
            svd(Matrices(torch.zeros(2, *shape))),
            newton_schulz(Matrices(torch.zeros(2, *shape)), "ns5-fast", generator, torch.float32),
        ):
            assert found.steps <= 5  # nothing to look for
            assert found.norms.tolist() == [0.0, 0.0]
            assert found.frobenius.tolist() == [0.0, 0.0]
            assert found.errors.nan_to_num(0.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_matrix_that_is_not_finite_is_nan_and_the_others_are_right(shape, number, generator):
    matrices = torch.randn(3, *shape)
    matrices[1, 2, 3] = number
    for measure in (
        lambda: power(Matrices(matrices), None, generator, None),
        lambda: svd(Matrices(matrices)),
        lambda: newton_schulz(Matrices(matrices), "ns3-accurate", generator, torch.float32),
    ):
        found = measure()
        assert found.norms.isnan().tolist() == [False, True, False]
        assert found.frobenius.isnan().tolist() == [False, True, False]
    check(power(Matrices(matrices[::2].contiguous()), None, generator, None), matrices[::2])


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_any_small_shape(shape, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(shape, generator=generator) * scale
    check(power(Matrices(matrices), None, generator, None), matrices)
    check(svd(Matrices(matrices)), matrices)


@pytest.mark.parametrize("shape", [(257, 257), (257, 1), (1, 5000), (300, 5000), (5000, 257)])
def test_extreme_shapes(shape, generator):
    matrices = torch.randn(2, *shape)
    check(power(Matrices(matrices), None, generator, None), matrices, tolerance=4 * TOLERANCE)


def test_precision_that_training_allows_does_not_matter(generator):
    matrix = torch.randn(1, 300, 280)
    expected = power(Matrices(matrix), None, torch.Generator().manual_seed(1), None)
    allowed = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            found = power(Matrices(matrix), None, torch.Generator().manual_seed(1), None)
            product = matrix @ matrix.mT
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(allowed)
    assert product.dtype == torch.bfloat16
    assert torch.equal(found.norms, expected.norms)


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
    expected = vector @ (wide @ (factor.T @ vector))
    found = newton_schulz(Matrices(matrix[None]), method, torch.Generator().manual_seed(3), torch.float32)
    torch.testing.assert_close(found.norms[0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("method", "least", "most"), [("ns5-fast", -0.4, -0.2), ("ns3-accurate", -0.25, -0.03)])
def test_newton_schulz_is_biased_as_documented(method, least, most, generator):
    matrices = torch.randn(4, 256, 256)
    found = newton_schulz(Matrices(matrices), method, generator, torch.float32)
    bias = (found.norms / exact(matrices) - 1).mean()
    assert least < bias < most
    assert found.errors.isnan().all()


def test_newton_schulz_that_fails_says_so(generator):
    """The start has no part of the only direction there is, so the norm comes out as 0."""
    matrix = torch.zeros(1, 20, 20)
    matrix[0, 3, 4] = 1.0
    for seed in range(5):
        found = newton_schulz(Matrices(matrix), "ns5-fast", generator.manual_seed(seed), torch.bfloat16)
        assert found.errors.isinf() or abs(found.norms - 1) < 0.4


# What these are made of


@pytest.mark.parametrize("size", [1, 2, 30, 200])
def test_dominant_bounds_the_largest_eigenvalue_from_both_sides(size):
    for values in (torch.rand(size), torch.ones(size), torch.logspace(-12, 0, size), 1e-12 * torch.rand(size)):
        basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
        matrix = (basis * values.double()) @ basis.T / size
        found = dominant(matrix[None])
        largest = values.double().max() / size
        assert found.lower <= largest * (1 + 1e-9)
        assert found.upper >= largest * (1 - 1e-9)
        assert found.upper <= found.lower * (1 + 1e-3)


def test_block_lanczos_excludes_what_is_not_there_and_nothing_else(generator):
    """With few steps the bound is wide, but it holds; with more it comes down to the eigenvalue."""
    values = torch.linspace(0, 0.5, 400) ** 2
    values[-1] = 0.9
    uppers = []
    for steps in (1, 3, 6, 12):
        start = torch.randn(1, WIDTH, 400, generator=generator)
        lanczos = BlockLanczos(lambda rows: rows * values, start, steps)
        for _ in range(steps):
            lanczos.extend()
        leading = lanczos.leading()
        assert leading.lower <= 0.9 * (1 + 1e-6)
        assert leading.upper >= 0.9
        uppers.append(float(leading.upper))
        vectors = lanczos.vectors(leading)[0]
        torch.testing.assert_close(vectors @ vectors.T, torch.eye(WARM), rtol=0, atol=1e-5)
    assert uppers[-1] < 0.9 * 1.001
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(uppers))


def test_bound_fails_as_rarely_as_is_said():
    """The sum of squares that random vectors are trusted to have is undercut by one in 100,000."""
    from scipy.stats import chi2

    from ignite_monitor.spectral.block_lanczos import _LEAST

    assert chi2(PROBES).cdf(_LEAST**2) == pytest.approx(1e-5, rel=0.01)

"""Hashes and indices: known answers, and the same in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ignite_monitor.model.sampling import fnv1a_64, spread_indices


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


@given(seed=st.integers(0, 2**64 - 1), numel=st.integers(0, 5000), count=st.none() | st.integers(1, 1200))
def test_indices_are_distinct_ascending_and_one_of_each_stratum(seed, numel, count):
    indices = spread_indices(seed, numel, count).tolist()
    assert len(indices) == (numel if count is None else min(count, numel))
    assert indices == sorted(set(indices))
    for place, index in enumerate(indices):
        assert place * numel // len(indices) <= index < (place + 1) * numel // len(indices)


def test_indices_are_those_of_splitmix64_in_plain_python():
    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    seed, numel, count = fnv1a_64("layer.weight"), 1_000_003, 1024
    expected = []
    for place in range(count):
        start, end = place * numel // count, (place + 1) * numel // count
        value = mix((seed + (place + 1) * 0x9E3779B97F4A7C15) % 2**64) & (2**63 - 1)
        expected.append(start + value % (end - start))
    assert spread_indices(seed, numel, count).tolist() == expected


def test_indices_of_a_tensor_of_a_trillion_elements():
    indices = spread_indices(7, 10**12, 1000)
    assert len(indices.unique()) == 1000
    assert indices.tolist() == sorted(indices.tolist())
    assert indices[0] >= 0
    assert 0.999e12 <= indices[-1] < 1e12


def test_no_row_or_column_is_left_out():
    """Places that repeated with a matrix's width would see the same columns over and over."""
    hits = torch.zeros(256)
    for name in range(64):
        hits += torch.bincount(spread_indices(fnv1a_64(str(name)), 256 * 256, 1024) % 256, minlength=256)
    # 256 each are expected; 6 standard deviations of a Poisson count
    assert hits.min() > 256 - 6 * 16
    assert hits.max() < 256 + 6 * 16


def test_same_in_every_process_whatever_the_hash_seed():
    code = (
        "from ignite_monitor.model.sampling import fnv1a_64, spread_indices;"
        "print(spread_indices(fnv1a_64('blocks.0.mlp.weight'), 40000, 64).tolist())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }  # fmt: skip
    assert printed == {f"{spread_indices(fnv1a_64('blocks.0.mlp.weight'), 40000, 64).tolist()}\n"}


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "low rank"])
def test_mean_square_of_a_sample_is_within_the_stated_error(kind):
    generator = torch.Generator().manual_seed(0)
    if kind == "low rank":
        x = torch.randn(500, 2, generator=generator) @ torch.randn(2, 300, generator=generator)
    else:
        x = torch.randn(500, 300, generator=generator, dtype=torch.float64)
        x = x if kind == "normal" else x * x.abs()
    x = x.flatten().double()
    kurtosis = x.pow(4).mean() / x.square().mean() ** 2
    errors = torch.stack([
        x[spread_indices(fnv1a_64(f"{kind} {name}"), x.numel(), 256)].square().mean() / x.square().mean() - 1
        for name in range(400)
    ])  # fmt: skip
    stated = ((kurtosis - 1) / 256).sqrt()
    # 400 errors show their root mean square to 1 / sqrt(800) = 4 % (more for heavy tails), their mean to stated / 20
    assert errors.square().mean().sqrt() < 1.15 * stated
    assert errors.mean().abs() < 4 * stated / 20

"""The hash of tensors against Python's own integers, and what it must not miss."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from ignite_monitor.model import hashes
from ignite_monitor.model.hashes import hashes_of

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
SHAPES = [(), (1,), (2,), (3,), (7,), (8,), (33,), (128,), (1, 1), (5, 3), (16, 16), (3, 64), (64, 5), (4, 4, 4)]
SHAPES += [(2, 3, 5), (8, 1, 8), (1000,), (31, 33), (2, 2, 2, 2), (10, 7, 3)]


def some(dtype, *shape):
    values = torch.randn(*shape) * 100
    return values > 0 if dtype == torch.bool else values.to(dtype)


def hash_bits(*tensors):
    """The hash of each of some states of one tensor, in one call."""
    return [int(hashes_of({"weight": tensor}, CPU)) for tensor in tensors]


def mixed(word):
    """SplitMix64's finalizer in Python's integers."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def key(*parts):
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def signed(total):
    return total - 2**64 if total >= 2**63 else total


def by_hand(name, tensor):
    raw = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
    total = sum(mixed((word + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i, word in enumerate(words))
    return signed(mixed((total + key(name, tensor.dtype, tensor.shape)) % 2**64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [hashes._WORDS_ON_CPU, 64])
def test_it_is_the_sum_that_it_says(dtype, limit, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(hashes, "_WORDS_ON_CPU", limit)
    states = [some(dtype, 7), some(dtype, 3, 5).mT, some(dtype, 0), some(dtype, 1).squeeze(), some(dtype, 2_001)]
    states = dict(
        zip("abcdefgh", [*states, some(dtype, 9)[3:], some(dtype, 9)[::2], some(dtype, 1).expand(9)], strict=True)
    )
    assert hashes_of(states, CPU).tolist() == [by_hand(name, item) for name, item in states.items()]
    assert hashes_of({"count": -5}, CPU).tolist() == [signed(mixed(key("count", -5)))]
    assert hashes_of({}, CPU).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 512), (300, 77), (256, 8, 4)])
def test_regular_changes_of_a_whole_tensor_are_seen(dtype, shape):
    """Changes that sums of products with the index miss: they move every element by the same bits."""
    weight = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1).to(dtype)
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(2))
    states = [weight * 2.0**power for power in (0, 1, 2, 3, 8, -1, -2, -4, -7)]
    states += [-weight, -weight * 2, weight.flip(0), weight.flip(-1), weight.roll(1, 0), weight[order]]
    states += [torch.cat([weight[1:2], weight[:1], weight[2:]]), weight.transpose(0, 1).reshape(shape), -weight.flip(0)]
    states += [torch.zeros(shape, dtype=dtype), -torch.zeros(shape, dtype=dtype)]
    halves = weight.clone()
    halves[::2] *= -1
    assert len(set(hash_bits(*states, halves))) == len(states) + 1


def test_exchanges_of_values_and_of_whole_tensors_are_seen():
    first, second = torch.tensor([1.5, 2.0, -1.5], dtype=torch.float64), torch.tensor([-1.5, 2.0, 1.5]).double()
    assert len(set(hash_bits(first, second, first[[1, 0, 2]], first[[2, 1, 0]], first[[1, 2, 0]]))) == 4
    pairs = hashes_of({"a": first, "b": first + 1}, CPU), hashes_of({"a": first + 1, "b": first}, CPU)
    assert int(pairs[0].sum()) != int(pairs[1].sum())
    assert hash_bits(torch.zeros(2)) != hash_bits(torch.zeros(3)) != hash_bits(torch.zeros(3, dtype=torch.bfloat16))


def changed_bits(count, shapes, dtypes, seed=0):
    """Flip one to 64 random bits of random tensors; return how many of ``count`` changes kept the hash."""
    random, kept, done = np.random.default_rng(seed), 0, 0
    for dtype in dtypes:
        for shape in shapes:
            data = random.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
            states, share = {}, -(-count // (len(shapes) * len(dtypes)))
            for number in range(share):
                flat = np.unpackbits(data.reshape(-1))
                bits = random.choice(flat.size, min(int(random.choice([1, 1, 2, 3, 8, 64])), flat.size), replace=False)
                flat[bits] ^= 1
                states[number] = torch.from_numpy(np.packbits(flat)).view(dtype).reshape(shape)
            own = torch.from_numpy(data).view(dtype).reshape(shape)
            pair = {"weight": own}
            same = [int(hashes_of({"weight": state}, CPU) == hashes_of(pair, CPU)) for state in states.values()]
            kept, done = kept + sum(same), done + share
    assert done >= count
    return kept


def test_random_changes_of_bits_are_seen():
    """A share of a million, which ``changed_bits(1_000_000, ...)`` makes."""
    assert changed_bits(1600, SHAPES, [torch.float32, torch.float64, torch.bfloat16, torch.int64]) == 0


def test_values_that_are_no_tensors():
    found = [int(hashes_of({"betas": value}, CPU)) for value in ((0.8, 0.9), (0.8, 0.9), (0.8, 0.90001), [0.8, 0.9])]
    assert found[0] == found[1]
    assert len({*found}) == 3


def test_a_hash_changes_with_every_bit():
    words = torch.randint(-(2**62), 2**62, (25,))
    states = {0: words}
    for place in range(25 * 64):
        states[place + 1] = words.clone()
        states[place + 1][place // 64] ^= -(2**63) if place % 64 == 63 else 1 << place % 64
    assert len(set(hash_bits(*states.values()))) == 25 * 64 + 1

"""The hash of tensors against Python's own integers, and what it must not miss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ignite_monitor.replicas import items
from ignite_monitor.replicas.items import hash_bits, hash_of, items_of, rng_items

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


def some(dtype, *shape):
    values = torch.randn(*shape) * 100
    return values > 0 if dtype == torch.bool else values.to(dtype)


def by_hand(tensor):
    size = 4 if tensor.dtype == torch.complex64 else tensor.itemsize
    raw = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    numbers = [int.from_bytes(raw[i : i + size], "little", signed=True) for i in range(0, len(raw), size)]
    total = sum((number + 1) * (2 * i + 1) for i, number in enumerate(numbers)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", [items._PIECE, 64])
def test_it_is_the_sum_that_it_says(dtype, piece, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(items, "_PIECE", piece)
    tensors = [some(dtype, 7), some(dtype, 3, 5).mT, some(dtype, 0), some(dtype, 1).squeeze(), some(dtype, 10_001)]
    assert [int(hash_bits(each)) for each in tensors] == [by_hand(each) for each in tensors]


def test_every_single_bit_and_every_exchange_is_seen():
    tensor = torch.randn(9)
    before = int(hash_bits(tensor))
    bits = tensor.view(torch.int32)
    for place in range(9):
        for bit in range(32):
            mask = -(2**31) if bit == 31 else 2**bit
            bits[place] ^= mask
            assert int(hash_bits(tensor)) != before
            bits[place] ^= mask
        for other in range(place):
            order = list(range(9))
            order[place], order[other] = other, place
            assert int(hash_bits(tensor[order])) != before
    assert int(hash_bits(tensor)) == before


@pytest.mark.parametrize("name", ["norm", "group_norm"])
def test_numbers_of_a_parameter_s_state_are_named_so(name):
    """Whatever the parameter is called."""
    model = nn.Sequential()
    model.add_module(name, nn.GroupNorm(1, 4))
    optimizer = torch.optim.NAdam(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter]["count"] = 1
    assert hash_of((1, 0.5, "a")) == hash_of((1, 0.5, "a")) != hash_of((1, 0.25, "a"))
    names = [each for each in items_of(model, optimizer) if " of " in each]
    assert names == [
        "settings of group 0 of the optimizer",
        f"numbers of {name}.weight in the optimizer",
        f"numbers of {name}.bias in the optimizer",
    ]


def test_numpy_with_another_bit_generator():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.Philox(3))
        first = rng_items(CPU)
        np.random.random()
        changed = [name for name, value in rng_items(CPU).items() if str(value) != str(first[name])]
    finally:
        np.random.set_bit_generator(before)
    assert changed == ["NumPy's RNG state"]

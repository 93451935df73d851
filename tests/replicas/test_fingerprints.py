"""The hash of tensors against Python's own integers, and what it must not miss."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from ignite_monitor import HDF5Logger, MonitorEvents, ReplicaCheckHandler
from ignite_monitor.cli import main
from ignite_monitor.replicas import items
from ignite_monitor.replicas.items import hash_bits, hash_of, items_of, rng_items
from tests._helpers import make_batches, make_trainer

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
    assert [int(hash_bits(item)) for item in tensors] == [by_hand(item) for item in tensors]


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
    names = [item for item in items_of(model, optimizer) if " of " in item]
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


def test_a_folded_hash_changes_with_every_bit_and_is_exact_in_float64():
    tensor = torch.randint(-(2**62), 2**62, (50,))
    before = float(items.as_numbers(hash_bits(tensor)))
    for place in range(50):
        for bit in range(64):
            tensor[place] ^= -(2**63) if bit == 63 else 1 << bit
            number = float(items.as_numbers(hash_bits(tensor)))
            assert 0 <= number < 2**53
            assert number == int(number)
            assert number != before
            tensor[place] ^= -(2**63) if bit == 63 else 1 << bit


@pytest.mark.parametrize("place", [None, 3])
def test_the_first_difference_of_two_runs_is_named(place, tmp_path, capsys):
    """A bit of a weight flips after a step: that weight is named alone, since others follow an iteration later."""
    for name in ("a", "b"):
        model, optimizer, trainer = make_trainer()
        handler = ReplicaCheckHandler(model, optimizer, hashes=True)

        def flip(engine, name=name, model=model):
            if name == "b" and engine.state.iteration == place:
                model[4].weight.data.view(-1).view(torch.int32)[5] ^= 1

        handler.attach(trainer)
        trainer.add_event_handler(MonitorEvents.OPTIMIZER_STEP_COMPLETED, flip)
        with HDF5Logger(tmp_path / f"{name}.h5") as logger:
            handler.log_to(logger, trainer)
            trainer.run(make_batches(5))
        assert len(trainer.state.metrics) == 2 + len(handler._items(trainer, torch.device("cpu")))
    paths = [str(tmp_path / "a.h5"), str(tmp_path / "b.h5")]
    assert main(["compare", *paths]) == 0
    text = capsys.readouterr().out
    assert ("in iteration 3: 4.weight\n" in text) is (place == 3)
    assert ("are the same in both" in text) is (place is None)
    assert main(["compare", "--json", *paths]) == 0
    hashes = json.loads(capsys.readouterr().out)["hashes"]
    assert (hashes["iteration"], hashes["names"]) == (place, ["4.weight"] if place else [])

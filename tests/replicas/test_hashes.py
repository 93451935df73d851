"""The hash of tensors against Python's own integers, and what it must not miss."""

from __future__ import annotations

import hashlib
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Engine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ignite_monitor import ReplicaCheckHandler
from ignite_monitor.replicas import handler, hashes
from ignite_monitor.replicas.hashes import hashes_of
from ignite_monitor.replicas.items import items_of
from tests._models import make_model

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


@pytest.mark.parametrize("name", ["norm", "group_norm"])
def test_the_optimizer_s_own_values_are_compared_by_name(name):
    """Tensors, numbers, strings, and containers of these, whatever the parameter is called."""
    model = nn.Sequential()
    model.add_module(name, nn.GroupNorm(1, 4))
    optimizer = torch.optim.NAdam(model.parameters(), betas=(0.8, 0.9))
    for parameter in model.parameters():
        optimizer.state[parameter] |= {
            "count": 1,
            "mean": torch.ones(2),
            "owner": object(),
            "old": [{"a": torch.ones(1)}],
        }
    optimizer.param_groups[0]["scorer"] = lambda: 1
    items = items_of(model, optimizer, set())
    own = {item.partition(" of ")[::2]: value for item, value in items.items() if " of " in item}
    parameters = [f"{name}.weight in the optimizer", f"{name}.bias in the optimizer"]
    state = {(key, owner) for key in ("count", "mean") for owner in parameters}
    assert state == {pair for pair in own if pair[1] in parameters}
    assert {("a", f"0 of old of {owner}") for owner in parameters} <= own.keys()
    of_group = {pair[0]: value for pair, value in own.items() if pair[1] == "group 0 of the optimizer"}
    numbers = {key: value for key, value in optimizer.defaults.items() if value is not None}
    assert numbers.pop("betas") == tuple(own[str(i), "betas of group 0 of the optimizer"] for i in range(2))
    assert of_group == numbers
    hashes = [int(hashes_of({"betas": value}, CPU)) for value in ((0.8, 0.9), (0.8, 0.9), (0.8, 0.90001), [0.8, 0.9])]
    assert hashes[0] == hashes[1]
    assert len({*hashes}) == 3


def test_a_hash_changes_with_every_bit():
    words = torch.randint(-(2**62), 2**62, (25,))
    states = {0: words}
    for place in range(25 * 64):
        states[place + 1] = words.clone()
        states[place + 1][place // 64] ^= -(2**63) if place % 64 == 63 else 1 << place % 64
    assert len(set(hash_bits(*states.values()))) == 25 * 64 + 1


@pytest.mark.parametrize("shape", [None, (-1, 2)], ids=["plain", "hybrid"])
def test_collectives_and_python_do_not_grow_with_the_ranks(shape, monkeypatch):
    """The check with a difference in it, which is named; one rank of a process group that transfers nothing."""

    def counted(world):
        names = ("all_reduce", "broadcast_object_list", "all_gather_object")
        collectives, calls = dict.fromkeys(names, 0), 0

        def count(name, *_, **__):
            collectives[name] += 1

        def profile(frame, event, _):
            nonlocal calls
            calls += event == "call" and "ignite_monitor" in frame.f_code.co_filename

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            model = make_model()
            group = dist.group.WORLD
            if shape is not None:
                mesh = group = init_device_mesh("cpu", (world // 2, 2))
                for layer in (model[0], model[4]):
                    whole = DTensor.from_local(layer.weight.detach(), mesh, [Replicate(), Shard(0)], run_check=False)
                    layer.weight = nn.Parameter(whole)
            check = ReplicaCheckHandler(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
            engine = Engine(lambda *_: None)
            check.attach(engine)
            with monkeypatch.context() as patch:
                for name in names:
                    patch.setattr(dist, name, partial(count, name))
                # As if the other ranks had another hash.
                real = handler.all_reduce
                patch.setattr(handler, "all_reduce", lambda values, **options: real(values, **options) + 1)
                patch.setattr(check.ranks, "gather", lambda value: [value])
                sys.setprofile(profile)
                try:
                    engine.run(range(3))
                finally:
                    sys.setprofile(None)
            assert engine.state.metrics == {"replicas/in_sync": 0.0}
        finally:
            dist.destroy_process_group()
        return collectives, calls

    (collectives, calls), other = counted(4), counted(16_384)
    assert other == (collectives, calls)
    assert collectives["all_reduce"] == 3 * (2 if shape is None else 4)
    assert calls < 20_000

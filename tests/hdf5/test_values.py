"""Names as Ignite gives them, values as they were, one transfer per device."""

from __future__ import annotations

import math
from collections import namedtuple
from fractions import Fraction

import numpy as np
import pytest
import torch
from ignite.engine import Engine
from ignite.handlers.base_logger import BaseOutputHandler
from torch import Tensor

from ignite_monitor.hdf5.values import flatten

Pair = namedtuple("Pair", "left right")


class Subclass(Tensor):
    pass  # a DTensor, say, which waits for other ranks when it is read


LOGGED = {
    "int": 3,
    "float": 0.1,
    "bool": True,
    "numpy": np.float32(1.5),
    "fraction": Fraction(1, 4),
    "0-dim": torch.tensor(2.5),
    "0-dim int": torch.tensor(2**53 - 1),
    "0-dim bool": torch.tensor(True),
    "bfloat16": torch.tensor(0.1, dtype=torch.bfloat16),
    "requires grad": torch.tensor(0.5, requires_grad=True),
    "1-dim": torch.arange(3.0, dtype=torch.float64) / 3,
    "1-dim grad": torch.ones(2, requires_grad=True),
    "one": torch.tensor([4.0]),
    "dict": {"a": 1, "b": {"c": torch.tensor(7), "d": [1, 2.5, {"e": 3}]}},
    "tuple": (1, torch.tensor(2.0)),
    "named": Pair(1.0, torch.ones(2)),
    "empty": {},
    "none of it": torch.zeros(0),
    "nan": math.nan,
    "inf": torch.tensor(-math.inf),
}


class Flattened(BaseOutputHandler):
    def __call__(self, engine, logger, event_name):
        raise NotImplementedError


def unexpected(name, value):
    raise AssertionError(name)


@pytest.mark.parametrize("keys", [list(LOGGED), *([key] for key in LOGGED)], ids=lambda keys: keys[0])
def test_names_and_values_are_ignites(keys):
    named = {key: LOGGED[key] for key in keys}
    engine = Engine(lambda engine, batch: None)
    engine.state.metrics = named
    expected = Flattened("", "all")._setup_output_metrics_state_attrs(engine, key_tuple=False)
    values = flatten(named, unexpected)
    assert [*values] == [name[1:] for name in expected]
    assert {type(value) for value in values.values()} <= {float}
    np.testing.assert_array_equal([*values.values()], [float(value) for value in expected.values()])


@pytest.mark.parametrize(
    "value",
    [
        "text",
        None,
        b"bytes",
        torch.ones(2, 2),
        np.ones((2, 2)),
        1j,
        torch.tensor(1j),
        np.complex64(1),
        object(),
        torch.zeros((), device="meta"),
        torch.zeros(3, device="meta"),
        torch.eye(2).to_sparse(),
        torch.ones(3) * 1j,
        torch.tensor(3.0).as_subclass(Subclass),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_number_is_skipped(value):
    skipped = []
    values = flatten({"a": 1.0, "x": {"y": value}, "b": torch.tensor(2.0)}, lambda name, _: skipped.append(name))
    assert values == {"a": 1.0, "b": 2.0}
    assert skipped == ["x/y"]


def test_keys_of_other_types():
    assert flatten({0: [1, 2], 1.5: 3, "t": {("a", 1): True}}, unexpected) == {
        "0/0": 1,
        "0/1": 2,
        "1.5": 3,
        "t/('a', 1)": 1,
    }


def test_one_transfer_whatever_the_number_of_values(monkeypatch):
    reads = []
    for reader in ["item", "tolist", "cpu", "__float__", "__bool__", "__int__", "numpy", "__array__"]:
        original = getattr(Tensor, reader)
        monkeypatch.setattr(
            Tensor, reader, lambda *args, name=reader, read=original: (reads.append(name), read(*args))[1]
        )
    values = [torch.tensor(float(i), dtype=[torch.float32, torch.float64, torch.int64][i % 3]) for i in range(300)]
    numbers = flatten({"a": values, "b": torch.ones(50), **{str(i): v for i, v in enumerate(values)}}, unexpected)
    assert [*numbers.values()] == [*range(300), *[1] * 50, *range(300)]
    assert reads == ["tolist"]

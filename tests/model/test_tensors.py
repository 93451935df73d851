"""Tensors found in the outputs of modules."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple

import numpy
import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from ignite_monitor.model.tensors import floating_tensors, loss_in, tagged_tensors

A, B, SCALAR = torch.ones(2), torch.ones(3, dtype=torch.bfloat16), torch.tensor(1.0)
TOKENS = torch.ones(2, dtype=torch.long)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    cache: object = None


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (A, [("", A)]),
        ((A, B), [("0", A), ("1", B)]),
        (Pair(A, SCALAR), [("first", A), ("second", SCALAR)]),
        ([A, (TOKENS, B)], [("0", A), ("1/1", B)]),
        ({"x": A, "tokens": TOKENS, 3: {"y": B}}, [("x", A), ("3/y", B)]),
        (OrderedDict(a=None, b=SCALAR), [("b", SCALAR)]),
        (Output(A, (B, SCALAR), object()), [("logits", A), ("hidden/0", B), ("hidden/1", SCALAR)]),
        (CausalLMOutput(loss=SCALAR, logits=A), [("loss", SCALAR), ("logits", A)]),
        (CausalLMOutput(logits=A), [("logits", A)]),
        (Output, []),
        (None, []),
        ("text", []),
        (TOKENS, []),
    ],
)
def test_places(output, expected):
    result = list(floating_tensors(output))
    assert [place for place, _ in result] == [place for place, _ in expected]
    assert all(ours is theirs for (_, ours), (_, theirs) in zip(result, expected, strict=True))


@pytest.mark.parametrize(
    ("output", "places"),
    [
        (A, [""]),
        ((A, None, TOKENS, B), ["0", "3"]),
        ((A, torch.nn.Parameter(B)), ["0", "1"]),
        (((A, B), None), ["0/0", "0/1"]),
        ({"a b": A, "a_b": B}, ["a_b", "a_b_2"]),
        ({"x": {"y": A}, "x/y": B}, ["x/y", "x/y_2"]),
        ({1: A, "1": B, "1_2": SCALAR}, ["1", "1_2", "1_2_2"]),
    ],
)
def test_tags_of_places_are_different(output, places):
    assert [name for name, _ in tagged_tensors(output, "m")] == [f"m/{place}".rstrip("/") for place in places]


def test_what_contains_itself_is_entered_once():
    output = [A, {"b": B}]
    output.append(output)
    output[1]["all"] = output
    assert [place for place, _ in floating_tensors(output)] == ["0", "1/b"]
    twice = [A]
    assert [place for place, _ in floating_tensors((twice, twice))] == ["0/0", "1/0"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [(1.5, 1.5), (numpy.float32(1.5), 1.5), ({"loss": SCALAR}, 1.0), (3, None), (True, None), (A, None), ("1", None)],
)
def test_loss_of_an_output(output, expected):
    assert loss_in(output) == expected

"""The exponents of single operations, against what random matrices of growing width do in float64."""

from __future__ import annotations

import math

import pytest
import torch

from ignite_monitor.scaling import LayerGraph, Node
from ignite_monitor.scaling.exponents import evaluate, terms
from ignite_monitor.scaling.graph import Alignment

WIDTHS = (32, 128, 512)


def slope(measure):
    """By which power of the width a measure shrinks."""
    torch.manual_seed(0)
    logs = torch.tensor([[math.log(n), math.log(measure(n))] for n in WIDTHS], dtype=torch.float64)
    centred = logs - logs.mean(0)
    return -float((centred[:, 0] * centred[:, 1]).sum() / centred[:, 0].square().sum())


def rms(tensor):
    return float(tensor.square().mean().sqrt())


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def expected_r(kind, r, a=0.0, alpha=0.5):
    """r of a junction of two embeddings with exponents r."""
    nodes = [Node("x", "embedding"), Node("y", "embedding"), Node("z", kind, ("x", "y"), a)]
    minima = terms(LayerGraph(nodes), {"z": Alignment(alpha, 0.5, alpha)}, "adam")
    return evaluate(minima, {"x": r[0], "y": r[1]})["r", "z"]


@pytest.mark.parametrize("r", [(0.0, 0.5), (0.5, 0.0), (0.25, 0.75), (0.5, 0.5)])
@pytest.mark.parametrize("kind", ["sum", "product"])
def test_junctions(kind, r):
    combine = torch.add if kind == "sum" else torch.mul

    def change(n):
        x, y = normal(64, n), normal(64, n)
        return rms(combine(x + normal(64, n) * n ** -r[0], y + normal(64, n) * n ** -r[1]) - combine(x, y))

    assert slope(change) == pytest.approx(expected_r(kind, r), abs=0.06)


@pytest.mark.parametrize("r", [(0.0, 0.5), (0.25, 0.25)])
@pytest.mark.parametrize("a", [0.5, 1.0])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_attention_scores(alpha, a, r):
    """Changes along the other factor are aligned with it, and independent ones are not."""

    def change(n):
        q, k = normal(256, n), normal(256, n)
        dq, dk = (k, q) if alpha == 1 else (normal(256, n), normal(256, n))
        dq, dk = dq * n ** -r[0], dk * n ** -r[1]
        return rms(n**-a * (((q + dq) * (k + dk)).sum(-1) - (q * k).sum(-1)))

    assert slope(change) == pytest.approx(expected_r("attention", r, a, alpha), abs=0.08)


@pytest.mark.parametrize(("c", "r_in"), [(1.0, 0.0), (0.5, 0.5), (1.25, 0.25), (1.5, 0.25)])
def test_hidden_layer_with_full_alignment(c, r_in):
    """An update along the input, as Adam's signs of one example are, and a change of the input that W0 has not seen."""

    def change(n):
        W, x, dx = normal(n, n) * n**-0.5, normal(n), normal(n) * n**-r_in
        update = torch.outer(normal(n).sign(), x.sign()) * n**-c
        return rms((W + update) @ (x + dx) - W @ x)

    nodes = [Node("x", "embedding"), Node("z", "hidden", ("x",), 0.0, 0.5)]
    minima = terms(LayerGraph(nodes), {"z": Alignment(1.0, 0.5, 1.0)}, "adam")
    assert slope(change) == pytest.approx(evaluate(minima, {"x": r_in, "z": c})["r", "z"], abs=0.12)


def gradient_size(n, spread, attention):
    """The size of the gradient with respect to the queries or the values of one head, behind a muP readout."""
    tokens = 32
    x = normal(tokens, n)
    q, k, v = (x @ normal(n, n) * n**-0.5 for _ in range(3))
    target = q if attention else v
    target.requires_grad_()
    out = torch.softmax(q @ k.T * n**-spread, dim=-1) @ v
    (normal(tokens) @ (out @ normal(n) / n)).backward()
    return rms(target.grad)


@pytest.mark.parametrize(("spread", "attention", "expected"), [(1.0, False, 1.0), (1.0, True, 1.5), (0.5, True, 1.0)])
def test_gradients_through_attention_without_alignment(spread, attention, expected):
    """gamma is 1 at the values of a muP readout, and 1 + a - alpha at the queries, with alpha 1/2."""
    nodes = [Node("q", "embedding"), Node("v", "embedding"), Node("s", "attention", ("q",), spread)]
    nodes += [Node("m", "contraction", ("s", "v")), Node("out", "readout", ("m",), 0.5, 0.5)]
    alignment = {"s": Alignment(0.5, 0.5, 0.5), "out": Alignment(0.5, 0.5, 0.5)}
    minima = terms(LayerGraph(nodes), alignment, "sgd")
    gamma = evaluate(minima, {"q": 0.0, "v": 0.0, "out": 0.0})["g", "q" if attention else "v"]
    assert gamma == pytest.approx(expected)
    measured = slope(lambda n: sum(gradient_size(n, spread, attention) for _ in range(20)))
    assert measured == pytest.approx(expected, abs=0.12)

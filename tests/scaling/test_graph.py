from __future__ import annotations

import math

import pytest

from ignite_monitor.scaling import PRESETS, LayerGraph, Node, chain


def names(graph):
    return {node.name: node.inputs for node in graph.nodes}


def test_chain():
    nodes = [Node("tokens", "embedding"), Node("positions", "embedding"), Node("h", "hidden", b=0.5)]
    nodes += [Node("head", "readout", b=0.5), Node("h2", "hidden", b=0.5), Node("head2", "readout", b=0.5)]
    assert names(chain(nodes)) == {
        "tokens": (),
        "positions": (),
        "h.input": ("tokens", "positions"),
        "h": ("h.input",),
        "head": ("h",),
        "h2": ("h",),
        "head2": ("h2",),
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_possible(preset):
    for kind, (a, b) in PRESETS[preset].items():
        LayerGraph([Node("x", kind, (), a, b)])


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([Node("x", "embedding", (), 0.5, 0.5)], r"x should have a \+ b equal to 0, .* 0\.5 \+ 0\.5"),
        ([Node("x", "hidden")], r"x should have a \+ b equal to 0\.5"),
        ([Node("x", "readout", b=0.25)], r"x should have a \+ b at least 0\.5"),
        ([Node("x", "dense")], "Node x should be of a kind"),
        ([Node("x", "embedding"), Node("x", "embedding")], "two nodes called x"),
        ([Node("x", "hidden", ("y",), b=0.5)], r"takes its input from \['y'\]"),
        ([Node("x", "sum")], "x is a sum without inputs"),
        ([Node("x", "embedding", shares="y")], "shares the weights of 'y'"),
        ([Node("x", "embedding", c=math.nan)], "c of x should be finite"),
    ],
)
def test_impossible_graphs(nodes, match):
    with pytest.raises(ValueError, match=match):
        LayerGraph(nodes)

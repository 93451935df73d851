"""Graphs for the tests of the solver, and models for those of tracing."""

from __future__ import annotations

import random

from ignite_monitor.scaling import PRESETS, LayerGraph, Node, chain


def preset_chain(preset="mup", hidden=2):
    ab = PRESETS[preset]
    return chain(
        [
            Node("in", "embedding", (), *ab["embedding"]),
            *(Node(f"h{place}", "hidden", (), *ab["hidden"]) for place in range(hidden)),
            Node("out", "readout", (), *ab["readout"]),
        ]
    )


def random_graph(seed, size=6, readouts=1):
    """A graph in which every layer reaches a readout, and alignments anywhere between none and full."""
    rng = random.Random(seed)
    nodes = [Node("in", "embedding", (), a := rng.choice([0.0, -0.5, 0.25]), -a)]
    open_ends = {"in"}
    for place in range(size):
        name = f"n{place}"
        kind = rng.choice(["hidden", "hidden", "hidden", "sum", "product", "contraction", "attention"])
        count = 1 if kind == "hidden" else 2
        # What nothing has taken yet comes first, so that in the end all of it has reached the last node.
        names = sorted(open_ends) + [node.name for node in rng.sample(nodes, len(nodes))]
        inputs = tuple(dict.fromkeys(names))[:count]
        a = rng.choice([0.0, 0.5]) if kind == "hidden" else (rng.choice([1.0, 1.25]) if kind == "attention" else 0.0)
        nodes.append(Node(name, kind, inputs, a, 0.5 - a if kind == "hidden" else 0.0))
        open_ends = open_ends - set(inputs) | {name}
    nodes.append(Node("all", "sum", tuple(sorted(open_ends))))
    for place in range(readouts):
        a = rng.choice([0.0, 0.5, 1.0])
        nodes.append(Node(f"out{place}", "readout", ("all",), a, rng.choice([0.5, 1.0]) - min(a, 0.5)))
    alignment = {
        node.name: (rng.uniform(0.5, 1), rng.choice([0.5, rng.uniform(0.5, 0.8)]), rng.uniform(0.5, 1.2))
        for node in nodes
    }
    return LayerGraph(nodes), alignment

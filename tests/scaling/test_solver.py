r"""Solutions of the linear program, against closed forms and an independent evaluation of the definition.

Closed forms for a chain of an embedding, one or more hidden layers and a readout, with alignment :math:`(\alpha, 1/2,
\alpha)`. With :math:`u = \alpha` and :math:`\omega = 1/2` the terms with :math:`r_\text{in}` allow whatever r >= 0
before them, so nothing is gained by r > 0, and every layer's own term is 0:

Adam: :math:`c_1 = -a_1,\; c_h = \alpha - a_h,\; c_L = \alpha - a_L`.

SGD: with :math:`\gamma = \min(a_L + b_L, 2 a_L + c_L)` the gradient's exponent, :math:`c_1 = -2 a_1 - \gamma,\; c_h =
\alpha - 2 a_h - \gamma,\; c_L \ge \alpha - 2 a_L`. A larger :math:`c_L` costs as much as it saves in the embedding and
once more in each hidden layer, as long as it moves :math:`\gamma`: up to :math:`2 a_L + c_L = a_L + b_L`. Hence
:math:`\gamma = s := a_L + b_L` and :math:`c_L = \max(\alpha, s) - 2 a_L`. Without a hidden layer it saves as much as it
costs, and the embedding's c is to be the smaller: the same.

These are the numbers of the four presets with :math:`\alpha` 1 (full) and 1/2 (no), among others.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ignite_monitor.scaling import ALIGNMENTS, PRESETS, InfeasibleError, LayerGraph, Node, solve


def chain(preset="mup", hidden=2):
    ab, names = PRESETS.get(preset) or dict(preset), ["in", *(f"h{n}" for n in range(hidden))]
    layers = [Node(name, "hidden", (before,), *ab["hidden"]) for before, name in itertools.pairwise(names)]
    last = Node("out", "readout", (names[-1],), *ab["readout"])
    return LayerGraph([Node("in", "embedding", (), *ab["embedding"]), *layers, last])


SPLITS = [
    (("embedding", (a, -a)), ("hidden", (a, 0.5 - a)), ("readout", (a, s - a)))
    for a, s in itertools.product((-0.5, 0.0, 0.75), (0.5, 0.75, 1.5))
]


@pytest.mark.parametrize("hidden", [0, 1, 4])
@pytest.mark.parametrize("optimizer_type", ["adam", "sgd"])
@pytest.mark.parametrize("alignment", ["full", "no"])
def test_closed_forms_of_presets_and_any_split_of_a_and_b(alignment, optimizer_type, hidden):
    alpha = ALIGNMENTS[alignment].alpha
    for ab in (*PRESETS, *SPLITS):
        (first, _), (middle, _), (last, b) = (PRESETS.get(ab) or dict(ab)).values()
        s = last + b
        adam = (-first, alpha - middle, alpha - last)
        sgd = (-2 * first - s, alpha - 2 * middle - s, max(alpha, s) - 2 * last)
        expected = adam if optimizer_type == "adam" else sgd
        found = solve(chain(ab, hidden), alignment, optimizer_type=optimizer_type)
        assert [*found.c.values()] == pytest.approx([expected[0], *[expected[1]] * hidden, expected[2]], abs=1e-9)
        assert min(found.r.values()) == pytest.approx(0, abs=1e-9)


FULL = {
    ("mup", "adam"): (1 / 2, 1, 1 / 2),
    ("mup", "sgd"): (0, 0, 0),
    ("standard", "adam"): (0, 1, 1),
    ("standard", "sgd"): (-1 / 2, 1 / 2, 1),
    ("ntk", "adam"): (0, 1 / 2, 1 / 2),
    ("ntk", "sgd"): (-1 / 2, -1 / 2, 0),
    ("mean_field", "adam"): (0, 1 / 2, 0),
    ("mean_field", "sgd"): (-1, -1, -1),
}


@pytest.mark.parametrize("case", FULL)
def test_exponents_of_presets(case):
    """Of an embedding, a hidden layer and a readout, under full alignment."""
    preset, optimizer_type = case
    assert [*solve(chain(preset, 1), optimizer_type=optimizer_type).c.values()] == pytest.approx(FULL[case], abs=1e-9)


# Measured alignments


def source(name="in"):
    return Node(name, "embedding", (), -0.5, 0.5)


def hidden(name, *inputs, c=None, **more):
    return Node(name, "hidden", inputs, 0.0, 0.5, c, **more)


def readout(name, *inputs):
    return Node(name, "readout", inputs, 0.5, 0.5)


def transformer(blocks):
    """A pre-norm transformer, in which block i takes the sum of the embedding and i branches."""
    nodes, stream = [source()], "in"
    for i in range(blocks):
        qkv = [hidden(f"{i}.{name}", stream) for name in "qkv"]
        mixed = Node(f"{i}.mixed", "junction", tuple(node.name for node in qkv))
        nodes += [*qkv, mixed, hidden(f"{i}.o", mixed.name), Node(f"{i}.sum", "junction", (stream, f"{i}.o"))]
        stream = f"{i}.sum"
    return LayerGraph([*nodes, readout("out", stream)])


def measured(graph, seed):
    """Alignments as they are measured: omega a little off 1/2."""
    rng = random.Random(seed)
    return {node.name: (rng.uniform(0.4, 1.1), rng.uniform(0.45, 0.6), rng.uniform(0.4, 1.1)) for node in graph.nodes}


def closed_form(graph, alignment):
    def clip(value):
        return min(max(value, 0.5), 1.0)

    return {
        node.name: -node.a
        if node.kind == "embedding"
        else max(clip(alignment[node.name][0]), clip(alignment[node.name][2])) - node.a
        for node in graph.layers
    }


@pytest.mark.parametrize("blocks", [1, 24])
def test_measured_alignments_give_the_closed_form(blocks):
    graph = transformer(blocks)
    for seed in range(3):
        alignment = measured(graph, seed)
        assert solve(graph, alignment).c == pytest.approx(closed_form(graph, alignment), abs=1e-6)


@pytest.mark.parametrize("optimizer_type", ["adam", "sgd"])
def test_no_layer_is_slower_than_under_full_alignment(optimizer_type):
    for graph in (transformer(12), chain("standard", 3), chain("ntk", 3)):
        full = solve(graph, optimizer_type=optimizer_type)
        for seed in range(4):
            found = solve(graph, measured(graph, seed), optimizer_type=optimizer_type)
            assert all(found.c[name] < full.c[name] + 1e-6 for name in full.c)
            assert all(found.c[name] > full.c[name] - 1.0 - 1e-6 for name in full.c)
            assert min(found.r.values()) > -1e-6


def test_without_an_embedding_a_layer_may_pay_for_the_next_up_to_full_alignment():
    """Nothing changes the input of h, so that a change of size n^-r with r > 0 lets the readout learn at u - r."""
    graph = LayerGraph([hidden("h"), *(readout(f"out{n}", "h") for n in range(3))])
    alignment = {"h": (0.7, 0.5, 0.7), **{f"out{n}": (0.6, 0.5, 0.8) for n in range(3)}}
    found = solve(graph, alignment)
    assert found.c == pytest.approx({"h": 0.9, **{f"out{n}": 0.1 for n in range(3)}}, abs=1e-6)


def test_a_tie_goes_to_the_earlier_layer():
    graph = LayerGraph([hidden("h"), readout("out", "h")])
    assert solve(graph, (0.7, 0.5, 0.9)).c == pytest.approx({"h": 0.7, "out": 0.4}, abs=1e-6)


def test_muon_depends_on_no_alignment():
    nodes = [source(), hidden("h", "in", update=0.5), hidden("g", "h", update=0.0), readout("out", "g")]
    for alignment in ("full", "no", (0.7, 0.6, 0.8)):
        c = solve(LayerGraph(nodes), alignment, optimizer_type="muon").c
        assert (c["h"], c["g"]) == pytest.approx((0.5, 0.0), abs=1e-6)


# Graphs


def test_tied_layers_and_repeated_calls_have_one_learning_rate():
    nodes = [source(), hidden("h", "in"), hidden("h#2", "h")._replace(shares="h")]
    nodes += [readout("out", "h#2")._replace(shares="in")]
    found = solve(LayerGraph(nodes), {"h": "full", "out": (0.6, 0.5, 0.6)})
    assert found.c == pytest.approx({"in": 0.5, "h": 1.0})
    assert found.r["out"] == pytest.approx(0.4)


def test_several_readouts_with_sgd():
    """The larger gradient counts: muP's readout hands back n^-1, a standard one n^-1/2."""
    nodes = [source(), hidden("trunk", "in"), readout("a", "trunk"), Node("b", "readout", ("trunk",), 0.0, 0.5)]
    found = solve(LayerGraph(nodes), "full", optimizer_type="sgd")
    assert found.c == pytest.approx({"in": 0.5, "trunk": 0.5, "a": 0.0, "b": 1.0})
    # muP's readout may learn until its gradient is as large as the other one's.
    found = solve(LayerGraph(nodes), "no", optimizer_type="sgd")
    assert found.c == pytest.approx({"in": 0.5, "trunk": 0.0, "a": -0.5, "b": 0.5}, abs=1e-6)


def test_biases_move_the_output_as_the_layer_does():
    """Under a multiplier n^-a a bias moves it by n^-(a + c) with Adam, and n^-(2a + c + gamma) with SGD."""
    assert solve(chain(hidden=1)).bias_c == pytest.approx({"in": 0.5, "h0": 0.0, "out": -0.5})
    sgd = solve(chain(hidden=1), optimizer_type="sgd").bias_c
    assert sgd == pytest.approx({"in": 0.0, "h0": -1.0, "out": -1.0})


def test_given_exponents_stay_and_name_the_layer_they_are_too_small_for():
    nodes = [source(), hidden("h", "in", c=1.3), readout("out", "h")]
    assert solve(LayerGraph(nodes)).c == pytest.approx({"in": 0.5, "h": 1.3, "out": 0.5})
    nodes = [source(), hidden("fast", "in", c=0.25), hidden("slow", "fast", c=1.5), readout("out", "slow")]
    with pytest.raises(InfeasibleError, match=r"a given c is too small \(0\.25 for fast, 1\.5 for slow\)"):
        solve(LayerGraph(nodes))
    assert solve(LayerGraph([nodes[0], hidden("fast", "in", c=0.6)]), "no").c["fast"] == 0.6


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([source(), hidden("h", "in")], "h reaches no trained readout, .*: train with Adam"),
        (
            [source(), readout("out", "in"), source("again")._replace(inputs=("out",)), readout("end", "again")],
            "number of outputs of out does not grow",
        ),
    ],
)
def test_gradients_that_are_not_known(nodes, match):
    solve(LayerGraph(nodes))
    with pytest.raises(ValueError, match=match):
        solve(LayerGraph(nodes), optimizer_type="sgd")


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([Node("x", "attention")], "kind"),
        ([source(), source()], "Two nodes"),
        ([hidden("h", "no")], "no earlier node"),
        ([Node("j", "junction")], "without inputs"),
        ([hidden("h")._replace(b=0.7)], r"a \+ b equal to 0\.5"),
        ([readout("out")._replace(b=-0.5)], r"a \+ b at least 0\.5"),
    ],
)
def test_wrong_graphs(nodes, match):
    with pytest.raises(ValueError, match=match):
        LayerGraph(nodes)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"alignment": "half"}, ValueError, "alignment should be one of"),
        ({"alignment": 0.5}, TypeError, "alignment should be one of"),
        ({"alignment": {"h0": "full", "out": "full"}}, ValueError, "lacks 'h1'"),
        ({"alignment": (math.nan, 0.5, 1.0)}, ValueError, "alignment should be finite"),
        ({"optimizer_type": "adagrad"}, ValueError, "optimizer_type should be"),
        ({"optimizer_type": ["adam"]}, TypeError, "optimizer_type should be"),
    ],
)
def test_wrong_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        solve(chain(), **arguments)


def test_no_weights_at_all():
    with pytest.raises(ValueError, match="at least one layer"):
        solve(LayerGraph([]))


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"ignite-monitor\[scaling\]"):
        solve(chain())

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

These are the numbers of both presets with :math:`\alpha` 1 and 1/2, among others.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ignite_monitor.scaling.solver import PRESETS, Node, ParametrizedLayer, solve


def use(name, role, *inputs, a, b, **more):
    return Node(name, inputs, ParametrizedLayer(name, role, (8, 16), f"{name}.weight", a=a, b=b, **more))


def source(name="in"):
    return use(name, "embedding", a=-0.5, b=0.5)


def hidden(name, *inputs, **more):
    return use(name, "hidden", *inputs, a=0.0, b=0.5, **more)


def readout(name, *inputs, a=0.5):
    return use(name, "readout", *inputs, a=a, b=0.5)


def solved(nodes, alignment=None, c_overrides=(), sgd=False):
    """The solution; one alignment is for all layers."""
    graph = {node.name: node for node in nodes}
    if isinstance(alignment, tuple):
        alignment = dict.fromkeys(graph, alignment)
    return solve(graph, alignment or {}, dict(c_overrides), sgd=sgd)


def weights(solution):
    return {name: c for name, c in solution.c.items() if not name.endswith(".bias")}


def chain(preset="mup", count=2):
    ab, names = PRESETS.get(preset) or dict(preset), ["in", *(f"h{n}" for n in range(count)), "out"]
    types = ["embedding", *["hidden"] * count, "readout"]
    inputs = [(), *((name,) for name in names)]
    return [
        use(name, kind, *taken, a=ab[kind][0], b=ab[kind][1])
        for name, kind, taken in zip(names, types, inputs, strict=False)
    ]


SPLITS = [
    (("embedding", (a, -a)), ("hidden", (a, 0.5 - a)), ("readout", (a, s - a)))
    for a, s in itertools.product((-0.5, 0.0, 0.75), (0.5, 0.75, 1.5))
]


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("sgd", [False, True])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_closed_forms_of_presets_and_any_split_of_a_and_b(alpha, sgd, count):
    for ab in (*PRESETS, *SPLITS):
        (first, _), (middle, _), (last, b) = (PRESETS.get(ab) or dict(ab)).values()
        s = last + b
        adam = (-first, alpha - middle, alpha - last)
        expected = (-2 * first - s, alpha - 2 * middle - s, max(alpha, s) - 2 * last) if sgd else adam
        solution = solved(chain(ab, count), (alpha, 0.5, alpha), sgd=sgd)
        c = [*weights(solution).values()]
        assert c == pytest.approx([expected[0], *[expected[1]] * count, expected[2]], abs=1e-9)
        assert min(solution.r.values()) == pytest.approx(0, abs=1e-9)


# Measured alignments


def transformer(blocks):
    """A pre-norm transformer, in which block i takes the sum of the embedding and i branches."""
    nodes, stream = [source()], "in"
    for i in range(blocks):
        qkv = [hidden(f"{i}.{name}", stream) for name in "qkv"]
        mixed = Node(f"{i}.mixed", tuple(node.name for node in qkv))
        nodes += [*qkv, mixed, hidden(f"{i}.o", mixed.name), Node(f"{i}.sum", (stream, f"{i}.o"))]
        stream = f"{i}.sum"
    return [*nodes, readout("out", stream)]


def measured(nodes, seed):
    """Alignments as they are measured: omega a little off 1/2."""
    rng = random.Random(seed)
    return {node.name: (rng.uniform(0.4, 1.1), rng.uniform(0.45, 0.6), rng.uniform(0.4, 1.1)) for node in nodes}


@pytest.mark.parametrize("blocks", [1, 24])
def test_measured_alignments_give_the_closed_form(blocks):
    nodes = transformer(blocks)
    for seed in range(3):
        alignment = measured(nodes, seed)
        gains = {name: min(max(alpha, u, 0.5), 1.0) for name, (alpha, _, u) in alignment.items()} | {"in": 0.0}
        expected = {node.name: gains[node.name] - node.layer.a for node in nodes if node.layer}
        assert weights(solved(nodes, alignment)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("sgd", [False, True])
def test_no_layer_is_slower_than_under_full_alignment(sgd):
    for nodes in (transformer(12), chain("standard", 3), chain(SPLITS[-1], 3)):
        full = weights(solved(nodes, sgd=sgd))
        for seed in range(4):
            solution = solved(nodes, measured(nodes, seed), sgd=sgd)
            assert all(full[name] - 1.0 - 1e-6 < c < full[name] + 1e-6 for name, c in weights(solution).items())
            assert min(solution.r.values()) > -1e-6


def test_without_an_embedding_a_layer_may_pay_for_the_next_up_to_full_alignment():
    """Nothing changes the input of h, so that a change of size n^-r with r > 0 lets the readout learn at u - r."""
    nodes = [hidden("h"), *(readout(f"out{n}", "h") for n in range(3))]
    alignment = {"h": (0.7, 0.5, 0.7), **{f"out{n}": (0.6, 0.5, 0.8) for n in range(3)}}
    expected = {"h": 0.9, **{f"out{n}": 0.1 for n in range(3)}}
    assert weights(solved(nodes, alignment)) == pytest.approx(expected, abs=1e-6)


def test_a_tie_goes_to_the_earlier_layer():
    c = weights(solved([hidden("h"), readout("out", "h")], (0.7, 0.5, 0.9)))
    assert c == pytest.approx({"h": 0.7, "out": 0.4}, abs=1e-6)


def test_muon_depends_on_no_alignment():
    nodes = [source(), hidden("h", "in", muon_update=0.5), hidden("g", "h", muon_update=0.0), readout("out", "g")]
    for alignment in ((1.0, 0.5, 1.0), (0.5, 0.5, 0.5), (0.7, 0.6, 0.8)):
        c = solved(nodes, alignment).c
        assert (c["h"], c["g"]) == pytest.approx((0.5, 0.0), abs=1e-6)


# Graphs


def test_tied_layers_and_repeated_calls_have_one_learning_rate():
    nodes = [source(), first := hidden("h", "in"), first._replace(name="h#2", inputs=("h",)), readout("out", "h#2")]
    nodes[-1].layer.weight = "in.weight"
    solution = solved(nodes, {"out": (0.6, 0.5, 0.6)})
    assert weights(solution) == pytest.approx({"in": 0.5, "h": 1.0, "out": 0.5})
    assert solution.r["out"] == pytest.approx(0.4)


def test_several_readouts_with_sgd():
    """The larger gradient counts: muP's readout hands back n^-1, a standard one n^-1/2."""
    nodes = [source(), hidden("trunk", "in"), readout("a", "trunk"), readout("b", "trunk", a=0.0)]
    assert weights(solved(nodes, sgd=True)) == pytest.approx({"in": 0.5, "trunk": 0.5, "a": 0.0, "b": 1.0})
    # muP's readout may learn until its gradient is as large as the other one's.
    c = weights(solved(nodes, (0.5, 0.5, 0.5), sgd=True))
    assert c == pytest.approx({"in": 0.5, "trunk": 0.0, "a": -0.5, "b": 0.5}, abs=1e-6)


def test_biases_move_the_output_as_the_layer_does():
    """Under a multiplier n^-a a bias moves it by n^-(a + c) with Adam, and n^-(2a + c + gamma) with SGD."""
    for sgd, expected in ((False, (0.5, 0.0, -0.5)), (True, (0.0, -1.0, -1.0))):
        c = solved(chain(count=1), sgd=sgd).c
        assert (c["in.bias"], c["h0.bias"], c["out.bias"]) == pytest.approx(expected)


def test_given_exponents_stay_and_name_the_layer_they_are_too_small_for():
    nodes = [source(), hidden("fast", "in"), hidden("slow", "fast"), readout("out", "slow")]
    c = weights(solved(nodes, c_overrides={"fast.weight": 1.3}))
    assert c == pytest.approx({"in": 0.5, "fast": 1.3, "slow": 1.0, "out": 0.5})
    c_overrides = {"fast.weight": 0.25, "slow.weight": 1.5}
    with pytest.raises(ValueError, match=r"given c is too small \(0\.25 for fast\.weight, 1\.5 for slow\.weight\)"):
        solved(nodes, c_overrides=c_overrides)
    assert solved(nodes, (0.5, 0.5, 0.5), c_overrides={"fast.weight": 0.6}).c["fast"] == 0.6


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([source(), hidden("h", "in")], "gradients of h .* it reaches no trained readout, .*: train with Adam"),
        (
            [source(), readout("out", "in"), source("again")._replace(inputs=("out",)), readout("end", "again")],
            "gradients of again .* number of inputs does not grow",
        ),
    ],
)
def test_gradients_that_are_not_known(nodes, match):
    solved(nodes)
    with pytest.raises(ValueError, match=match):
        solved(nodes, sgd=True)


def test_random_graphs_satisfy_the_constraints_and_no_exponent_can_be_smaller():
    """The definition, evaluated at the solution: r is at least 0, and not if any exponent falls by 0.01."""

    def smallest(nodes, alignment, c):
        r = {}
        for node in nodes:
            rates = [r[name] for name in node.inputs]
            terms = [*rates]
            if layer := node.layer:
                alpha, omega, u = alignment[node.name]
                own, is_embedding = layer.a + c[node.name], layer.role == "embedding"
                terms = [own - (0.0 if is_embedding else alpha)]
                for rate in rates:
                    terms += [own + rate - u, layer.a + layer.b + rate - min(omega, layer.a + layer.b)]
            r[node.name] = min(terms, default=math.inf)
        return min(r.values())

    rng = random.Random(0)
    for _ in range(50):
        nodes = [source()]
        for i in range(rng.randrange(1, 12)):
            before = rng.sample([node.name for node in nodes], min(len(nodes), rng.randrange(1, 4)))
            make = rng.choice([hidden, readout, None])
            nodes.append(Node(f"n{i}", tuple(before)) if make is None else make(f"n{i}", before[0]))
        alignment = {node.name: (rng.uniform(0.5, 1), rng.uniform(0.5, 1), rng.uniform(0.5, 1)) for node in nodes}
        c = weights(solved(nodes, alignment))
        assert smallest(nodes, alignment, c) > -1e-6
        for name in c:
            assert smallest(nodes, alignment, c | {name: c[name] - 0.01}) < 0


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    with pytest.raises(ImportError, match=r"ignite-monitor\[scaling\]"):
        solved(chain())

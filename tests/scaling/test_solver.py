r"""The exponents that come out, against closed forms, a mixed-integer program and enumeration.

Closed forms for a chain of an embedding, one or more hidden layers and a readout, with alignment :math:`(\alpha, 1/2,
\alpha)`. With :math:`u = \alpha` and :math:`\omega = 1/2` the terms with :math:`r_\text{in}` allow whatever r >= 0
before them, so nothing is gained by r > 0, and every layer's own term is 0:

Adam: :math:`c_1 = -a_1,\; c_h = \alpha - a_h,\; c_L = \alpha - a_L`.

SGD: with :math:`\gamma = \min(a_L + b_L, 2 a_L + c_L)` the gradient's exponent, :math:`c_1 = -2 a_1 - \gamma,\; c_h =
\alpha - 2 a_h - \gamma,\; c_L \ge \alpha - 2 a_L`. A larger :math:`c_L` costs as much as it saves in the embedding and
once more in each hidden layer, as long as it moves :math:`\gamma`: up to :math:`2 a_L + c_L = a_L + b_L`. Hence
:math:`\gamma = s := a_L + b_L` and :math:`c_L = \max(\alpha, s) - 2 a_L`. Without a hidden layer it saves as much as it
costs, and the embedding's c is to be the smaller: the same.

What follows for the four presets is written out below, from :math:`\alpha` 1 (full) and 1/2 (no).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import optimize

from ignite_monitor.scaling import ALIGNMENTS, Alignment, InfeasibleError, LayerGraph, Node, chain, exponents, solve
from tests.scaling._graphs import preset_chain, random_graph

# (embedding, hidden, readout)
CLOSED_FORMS = {
    ("mup", "adam", "full"): (1 / 2, 1, 1 / 2),
    ("mup", "adam", "no"): (1 / 2, 1 / 2, 0),
    ("mup", "sgd", "full"): (0, 0, 0),
    ("mup", "sgd", "no"): (0, -1 / 2, 0),
    ("standard", "adam", "full"): (0, 1, 1),
    ("standard", "adam", "no"): (0, 1 / 2, 1 / 2),
    ("standard", "sgd", "full"): (-1 / 2, 1 / 2, 1),
    ("standard", "sgd", "no"): (-1 / 2, 0, 1 / 2),
    ("ntk", "adam", "full"): (0, 1 / 2, 1 / 2),
    ("ntk", "adam", "no"): (0, 0, 0),
    ("ntk", "sgd", "full"): (-1 / 2, -1 / 2, 0),
    ("ntk", "sgd", "no"): (-1 / 2, -1, -1 / 2),
    ("mean_field", "adam", "full"): (0, 1 / 2, 0),
    ("mean_field", "adam", "no"): (0, 0, -1 / 2),
    ("mean_field", "sgd", "full"): (-1, -1, -1),
    ("mean_field", "sgd", "no"): (-1, -3 / 2, -1),
}


@pytest.mark.parametrize("hidden", [1, 4])
@pytest.mark.parametrize(("case", "expected"), CLOSED_FORMS.items(), ids=map("-".join, CLOSED_FORMS))
def test_presets(case, expected, hidden):
    preset, optimizer_type, alignment = case
    graph = preset_chain(preset, hidden)
    first, middle, last = expected
    found = solve(graph, alignment, optimizer_type=optimizer_type)
    assert found.c == pytest.approx({"in": first, **{f"h{n}": middle for n in range(hidden)}, "out": last}, abs=1e-9)
    assert min(found.r.values()) == pytest.approx(0, abs=1e-9)
    again = solve(graph, alignment, optimizer_type=optimizer_type, feature_learning=True)
    assert again.c == pytest.approx(found.c, abs=1e-9)


@pytest.mark.parametrize("optimizer_type", ["adam", "sgd"])
@pytest.mark.parametrize("alignment", ["full", "no"])
def test_formula_for_any_split_of_a_and_b(alignment, optimizer_type):
    alpha = ALIGNMENTS[alignment].alpha
    for a, s in itertools.product((-0.5, 0.0, 0.75), (0.5, 0.75, 1.5)):
        nodes = [
            Node("in", "embedding", (), a, -a),
            Node("h", "hidden", (), a, 0.5 - a),
            Node("out", "readout", (), a, s - a),
        ]
        adam = (-a, alpha - a, alpha - a)
        sgd = (-2 * a - s, alpha - 2 * a - s, max(alpha, s) - 2 * a)
        found = solve(chain(nodes), alignment, optimizer_type=optimizer_type)
        assert list(found.c.values()) == pytest.approx(adam if optimizer_type == "adam" else sgd, abs=1e-9)


# Against an independent formulation


def mixed_integer(graph, alignment, optimizer_type, zero=()):
    """The smallest sum of c with every r and gamma the minimum of its terms, one binary per term."""
    columns = {}

    def column(*key):
        return columns.setdefault(key, len(columns))

    for node in graph.nodes:
        if node.kind in {"embedding", "hidden", "readout"}:
            column("c", node.name)
    count = len(columns)
    minima = {}
    for node in graph.nodes:
        inputs = [column("r", name) for name in node.inputs]
        shift, own = 0.0, None
        if node.kind == "attention":
            shift = node.a - alignment[node.name][0]
        if node.kind in {"embedding", "hidden", "readout"}:
            own = ([column("c", node.name)], node.a)
            if optimizer_type == "sgd" and node.kind == "readout":
                own = (own[0], 2 * node.a)
            elif optimizer_type == "sgd":
                own = ([*own[0], column("gamma", node.name)], 2 * node.a)
        if node.kind == "embedding":
            found = [own]
        elif own is None:
            found = [([each], shift) for each in inputs]
        else:
            alpha, omega, u = alignment[node.name]
            found = [(own[0], own[1] - alpha)]
            for each in inputs:
                found += [([each], node.a + node.b - omega), ([*own[0], each], own[1] - u)]
        minima[column("r", node.name)] = found
    if optimizer_type == "sgd":
        for node in graph.nodes:
            for taker in graph.nodes:
                if node.name not in taker.inputs:
                    continue
                if taker.kind == "readout":
                    more = [([], taker.a + taker.b), ([column("c", taker.name)], 2 * taker.a)]
                else:
                    lost = taker.a - alignment[taker.name][0] if taker.kind == "attention" else 0.0
                    more = [([column("gamma", taker.name)], lost)]
                minima.setdefault(column("gamma", node.name), []).extend(more)
    continuous = len(columns)
    size = continuous + sum(map(len, minima.values()))
    large, rows, upper, place = 20.0, [], [], continuous
    for variable, terms in minima.items():
        chosen = np.zeros(size)
        for entries, constant in terms:
            row = np.zeros(size)
            row[variable] += 1
            for each in entries:
                row[each] -= 1
            rows += [row, -row]
            rows[-1][place] = large
            upper += [constant, large - constant]
            chosen[place] = -1
            place += 1
        rows.append(chosen)
        upper.append(-1)
    lower, most = np.full(size, -large), np.full(size, large)
    for key, each in columns.items():
        lower[each] = 0 if key[0] == "r" else -large
        if key[0] == "r" and key[1] in zero:
            most[each] = 0
    lower[continuous:], most[continuous:] = 0, 1
    result = optimize.milp(
        np.arange(size) < count,
        integrality=np.arange(size) >= continuous,
        bounds=optimize.Bounds(lower, most),
        constraints=optimize.LinearConstraint(np.array(rows), -np.inf, upper),
    )
    return result.fun if result.status == 0 else None


@pytest.mark.parametrize("optimizer_type", ["adam", "sgd"])
@pytest.mark.parametrize("seed", range(25))
def test_optimal_on_random_graphs(seed, optimizer_type):
    graph, alignment = random_graph(seed, readouts=1 + seed % 3)
    found = solve(graph, alignment, optimizer_type=optimizer_type)
    expected = mixed_integer(graph, alignment, optimizer_type)
    assert sum(found.c.values()) == pytest.approx(expected, abs=1e-4)  # 1e-6 of binaries times a large constant
    assert min(found.r.values()) > -1e-9


@pytest.mark.parametrize("seed", range(15))
def test_perturbed_solutions_are_worse(seed):
    """A smaller c lets a change grow, or is paid for elsewhere; a larger one is paid for itself.

    What costs the same in sum costs more where earlier layers weigh more: there is no other optimum.
    """
    graph, alignment = random_graph(seed)
    best = solve(graph, alignment)

    def pinned(c):
        nodes = [node._replace(c=c.get(node.name)) if node.has_weights else node for node in graph.nodes]
        return LayerGraph(nodes)

    def weighted(c):
        return sum(math.exp(-place / len(c)) * value for place, value in enumerate(c.values()))

    for name, value in best.c.items():
        with pytest.raises(InfeasibleError, match=r"grows as width"):
            solve(pinned(best.c | {name: value - 0.01}), alignment)
        for other in (value - 0.01, value + 0.01):
            try:
                found = solve(pinned({name: other}), alignment)
            except InfeasibleError:
                continue
            more = sum(found.c.values()) - sum(best.c.values())
            assert more > -1e-7
            assert more > 1e-6 or weighted(found.c) > weighted(best.c) + 1e-6


# Which of several optima


@pytest.mark.parametrize("seed", range(3))
def test_the_sum_comes_first_in_a_deep_model(seed):
    """With 100 layers, a larger c of which may save as much in others, the sum is still the smallest there is."""
    graph, count = preset_chain(hidden=98), 100
    alignment = np.random.default_rng(seed).uniform((0.5, 0.5, 0.5), (1.0, 0.7, 1.0), (count, 3))
    names = [node.name for node in graph.nodes]
    found = solve(graph, dict(zip(names, map(tuple, alignment.tolist()), strict=True)))
    c, r = np.eye(2 * count)[:count], np.eye(2 * count)[count:]
    rows, most = [r[0] - c[0]], [-0.5]
    for node, (alpha, omega, u), index in zip(graph.nodes[1:], alignment[1:], range(1, count), strict=True):
        rows += [r[index] - c[index], r[index] - c[index] - r[index - 1], r[index] - r[index - 1]]
        most += [node.a - alpha, node.a - u, node.a + node.b - omega]
    bounds = [(None, None)] * count + [(0, None)] * count
    result = optimize.linprog(c.sum(0), np.array(rows), most, bounds=bounds)
    assert sum(found.c.values()) == pytest.approx(result.fun, abs=1e-6)


def test_tie_goes_to_the_earlier_layer():
    """With u > alpha a larger c of the embedding saves as much in the readout; the embedding keeps the smallest."""
    graph = chain([Node("in", "embedding", (), -0.5, 0.5), Node("out", "readout", (), 0.5, 0.5)])
    assert solve(graph, (0.7, 0.5, 1.0)).c == pytest.approx({"in": 0.5, "out": 0.5})
    assert solve(graph, "no", optimizer_type="sgd").c == pytest.approx({"in": 0.0, "out": 0.0})


@pytest.mark.parametrize("optimizer_type", ["adam", "sgd"])
@pytest.mark.parametrize("seed", range(15))
def test_optimum_is_unique_and_moves_continuously(seed, optimizer_type):
    """No other optimum has as small a weighted sum; and a small change of alignment moves c by a small amount."""
    graph, alignment = random_graph(seed, size=8, readouts=2)
    found = solve(graph, alignment, optimizer_type=optimizer_type)
    again = solve(graph, dict(reversed(alignment.items())), optimizer_type=optimizer_type)
    assert found == again
    near = {name: (a + 1e-5, omega - 1e-5, u + 1e-5) for name, (a, omega, u) in alignment.items()}
    moved = solve(graph, near, optimizer_type=optimizer_type)
    assert moved.c == pytest.approx(found.c, abs=1e-3)


# Graphs solved by hand


def source(name="in"):
    return Node(name, "embedding", (), -0.5, 0.5)


def hidden(name, *inputs, c=None):
    return Node(name, "hidden", inputs, 0.0, 0.5, c)


def readout(name, *inputs):
    return Node(name, "readout", inputs, 0.5, 0.5)


TIGHT = (1.0, 1.2, 1.0)  # its input has to vanish as n^-0.2 where a + b = 1


def test_residual_changes_as_its_fastest_branch():
    """The readout needs r = 0.2 of the sum, so of both branches: in has c = 1/2 + 0.2, and h 1 + 0.2."""
    nodes = [source(), hidden("h", "in"), Node("add", "sum", ("in", "h")), readout("out", "add")]
    found = solve(LayerGraph(nodes), {"h": "full", "out": TIGHT})
    assert found.c == pytest.approx({"in": 0.7, "h": 1.2, "out": 0.5})
    assert found.r == pytest.approx({"in": 0.2, "h": 0.2, "add": 0.2, "out": 0.0})


def test_product_changes_as_its_fastest_factor():
    """Of gate and up both need r = 0.2. The sum of exponents, 0.2 + 0, would let up change what out can't bear.

    in has to have r = 0.2 too, as W0 hands on its change.
    """
    nodes = [source(), hidden("gate", "in"), hidden("up", "in"), Node("mul", "product", ("gate", "up"))]
    found = solve(LayerGraph([*nodes, readout("out", "mul")]), {"gate": "full", "up": "full", "out": TIGHT})
    assert found.c == pytest.approx({"in": 0.7, "gate": 1.2, "up": 1.2, "out": 0.5})
    assert found.r["mul"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("a", "alignment", "r"), [(1.0, "full", 0.0), (0.5, "no", 0.0), (1.0, "no", 0.5), (0.5, "full", 0.5)]
)
def test_attention(a, alignment, r):
    """A multiplier n^-1/2 leaves aligned scores growing as n^1/2, which only r = 1/2 of what makes them can mend."""
    nodes = [source(), hidden("q", "in"), hidden("k", "in"), Node("scores", "attention", ("q", "k"), a)]
    nodes += [hidden("v", "in"), Node("mix", "contraction", ("scores", "v")), readout("out", "mix")]
    found = solve(LayerGraph(nodes), alignment)
    alpha = ALIGNMENTS[alignment].alpha
    slow = r if a < alpha else 0.0
    expected = {"in": 0.5 + slow, "q": alpha + slow, "k": alpha + slow, "v": alpha, "out": alpha - 0.5}
    assert found.c == pytest.approx(expected)
    assert found.r["scores"] == pytest.approx(slow + a - alpha)


def test_attention_without_alignment_is_not_what_sgd_pays_for():
    """q and k get a gradient n^(a - alpha) smaller through scores that are divided by more than they need.

    With muP and no alignment gamma is 1 at the output: v has c = 1/2 - 1. q and k are n^1/2 behind.
    """
    nodes = [source(), hidden("q", "in"), hidden("k", "in"), Node("scores", "attention", ("q", "k"), 1.0)]
    nodes += [hidden("v", "in"), Node("mix", "contraction", ("scores", "v")), readout("out", "mix")]
    found = solve(LayerGraph(nodes), "no", optimizer_type="sgd")
    assert found.c == pytest.approx({"in": 0.0, "q": -1.0, "k": -1.0, "v": -0.5, "out": 0.0})


def test_several_readouts():
    """One readout that needs r = 0.2 slows what they share, and not the other readout nor its branch."""
    nodes = [source(), hidden("trunk", "in"), hidden("left", "trunk"), hidden("right", "trunk")]
    nodes += [readout("a", "left"), readout("b", "right")]
    found = solve(LayerGraph(nodes), {"trunk": "full", "left": "full", "right": "full", "a": TIGHT, "b": "full"})
    expected = {"in": 0.7, "trunk": 1.2, "left": 1.2, "right": 1.0, "a": 0.5, "b": 0.5}
    assert found.c == pytest.approx(expected)


def test_several_readouts_with_sgd():
    """The larger gradient counts: muP's readout hands back n^-1, a standard one n^-1/2."""
    nodes = [source(), hidden("trunk", "in"), readout("a", "trunk"), Node("b", "readout", ("trunk",), 0.0, 0.5)]
    found = solve(LayerGraph(nodes), "full", optimizer_type="sgd")
    assert found.c == pytest.approx({"in": 0.5, "trunk": 0.5, "a": 0.0, "b": 1.0})


def test_layers_called_twice_and_tied_ones_have_one_learning_rate():
    nodes = [source(), hidden("h", "in"), hidden("h#2", "h")._replace(shares="h")]
    nodes += [readout("out", "h#2")._replace(shares="in")]
    found = solve(LayerGraph(nodes), {"h": "full", "out": (0.6, 0.5, 0.6)})
    assert found.c == pytest.approx({"in": 0.5, "h": 1.0})
    assert found.r["out"] == pytest.approx(0.4)


def test_input_that_grows_with_width():
    """A hidden layer without a node before it has one term alone."""
    assert solve(chain([hidden("h"), readout("out")]), (0.8, 0.5, 0.9)).c == pytest.approx({"h": 0.8, "out": 0.4})


def test_biases_move_the_output_as_the_layer_does():
    """Under a multiplier n^-a a bias moves it by n^-(a + c) with Adam, and n^-(2a + c + gamma) with SGD."""
    assert solve(preset_chain(hidden=1)).bias_c == pytest.approx({"in": 0.5, "h0": 0.0, "out": -0.5})
    sgd = solve(preset_chain(hidden=1), optimizer_type="sgd").bias_c
    assert sgd == pytest.approx({"in": 0.0, "h0": -1.0, "out": -1.0})


# Fixed exponents, and what has no solution


def test_fixed_exponents_stay():
    graph = chain([source(), hidden("h", c=1.3), readout("out")])
    assert solve(graph).c == pytest.approx({"in": 0.5, "h": 1.3, "out": 0.5})


def test_infeasible_names_layer_and_pin():
    graph = chain([source(), hidden("fast", c=0.25), hidden("slow", c=1.5), readout("out")])
    with pytest.raises(
        InfeasibleError, match=r"0\.25 in fast, the change of the output of fast grows .* power of 0\.75"
    ):
        solve(graph)
    graph = chain([source()._replace(c=0.5), hidden("h", c=2.0), readout("out")])
    with pytest.raises(InfeasibleError, match=r"c fixed at 0\.5 in in, the change of the output of h .* power of 0\.1"):
        solve(graph, {"h": (1.0, 0.6, 1.0), "out": "full"})


def test_feature_learning_on_random_graphs():
    """Several readouts with u > alpha would rather have their input change slowly."""
    bound = 0
    for seed in range(40):
        graph, alignment = random_graph(seed, size=2 + seed % 3, readouts=3)
        alignment |= {f"out{n}": (0.5, 0.5, 1.5) for n in range(3)}
        expected = mixed_integer(graph, alignment, "adam", zero={"all"})
        if expected is None:
            with pytest.raises(InfeasibleError, match=r"readouts' inputs|not possible before"):
                solve(graph, alignment, feature_learning=True)
            continue
        found = solve(graph, alignment, feature_learning=True)
        assert found.r["all"] == pytest.approx(0.0, abs=1e-6)
        assert min(found.r.values()) > -1e-6
        assert sum(found.c.values()) == pytest.approx(expected, abs=1e-4)
        bound += solve(graph, alignment).r["all"] > 0.01
    assert bound >= 15


def test_feature_learning_by_hand():
    """Each of three readouts saves 1 for every 1 that h's c grows, up to u - alpha = 0.4, unless r has to be 0."""
    graph = LayerGraph([source(), hidden("h", "in"), *(readout(f"out{n}", "h") for n in range(4))])
    alignment = {"h": "full", **{f"out{n}": (0.6, 0.5, 1.0) for n in range(4)}}
    slow = solve(graph, alignment)
    assert slow.c == pytest.approx({"in": 0.9, "h": 1.4, **{f"out{n}": 0.1 for n in range(4)}})
    fast = solve(graph, alignment, feature_learning=True)
    assert fast.c == pytest.approx({"in": 0.5, "h": 1.0, **{f"out{n}": 0.5 for n in range(4)}})
    assert fast.r["h"] == pytest.approx(0.0, abs=1e-9)


def test_feature_learning_that_can_not_be():
    graph = chain([source(), hidden("h"), readout("out")])
    with pytest.raises(InfeasibleError, match=r"not possible before out: with omega 1\.2 and a \+ b = 1"):
        solve(graph, {"h": "full", "out": TIGHT}, feature_learning=True)
    graph = chain([source()._replace(c=0.7), hidden("h", c=1.1), readout("out")])
    with pytest.raises(InfeasibleError, match="let the readouts' inputs change"):
        solve(graph, feature_learning=True)


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([source(), hidden("h", "in")], "h reaches no trained readout, .*: train with Adam"),
        (
            [source(), readout("out", "in"), source("again")._replace(inputs=("out",)), readout("end", "again")],
            "hands back",
        ),
    ],
)
def test_gradients_that_are_not_known(nodes, match):
    solve(LayerGraph(nodes))
    with pytest.raises(ValueError, match=match):
        solve(LayerGraph(nodes), optimizer_type="sgd")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"alignment": "half"}, ValueError, "alignment should be one of"),
        ({"alignment": 0.5}, TypeError, "alignment should be one of"),
        ({"alignment": {"h0": "full", "out": "full"}}, ValueError, r"lacks \['h1'\]"),
        ({"alignment": (math.nan, 0.5, 1.0)}, ValueError, "alignment should be finite"),
        ({"optimizer_type": "adagrad"}, ValueError, "optimizer_type should be one of"),
        ({"optimizer_type": ["adam"]}, ValueError, "optimizer_type should be one of"),
    ],
)
def test_wrong_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        solve(preset_chain(), **arguments)


def test_no_weights_at_all():
    with pytest.raises(ValueError, match="at least one layer"):
        solve(LayerGraph([]))


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"ignite-monitor\[scaling\]"):
        solve(preset_chain())


@pytest.mark.parametrize("seed", range(12))
def test_where_u_is_at_most_alpha_each_exponent_has_a_bound_of_its_own(seed):
    """With less in one layer some change grows, however small the learning rates of all others: one optimum only."""
    graph, alignment = random_graph(seed)
    alignment = {name: Alignment(alpha, omega, min(u, alpha)) for name, (alpha, omega, u) in alignment.items()}
    found = solve(graph, alignment)
    minima = exponents.terms(graph, alignment, "adam")
    for layer in found.c:
        c = dict.fromkeys(found.c, math.inf) | {layer: found.c[layer]}
        assert min(exponents.evaluate(minima, c)["r", node.name] for node in graph.nodes) > -1e-6
        c[layer] -= 0.01
        assert min(exponents.evaluate(minima, c)["r", node.name] for node in graph.nodes) < -0.009

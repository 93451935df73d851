r"""A parametrization of a model that was written without one, found by comparing two widths of it.

**Outputs of a fixed size inside the network.** Keys and values that all heads share, the second layer of a mixer's
token MLP, a router's logits, LoRA's first matrix: a weight sums over n features and gives m numbers, m the same at any
width, that other weights take. Its exponents follow from what it feeds.

- *Its change* has to be of size one: :math:`n^{-a} \cdot n^{-c} \cdot n^{\alpha} = 1`, so :math:`c = \alpha - a`, as
  for any other.
- *Its start* W. The gradient with respect to the layer's input is :math:`W^\top g` with few numbers g, so the input
  changes along the rows of W: :math:`\omega` is 1 here, and 1/2 only where the outputs are as many as the inputs. So
  :math:`n^{-a} \Delta z W^\top` is of the size :math:`n^{1 - a - b}`, and a + b has to be 1, as in a readout. Started
  at size one, with a + b = 1/2, values of a multi-query attention drift as :math:`n^{1/2}` (measured: 0.46).
- But then the output starts at :math:`n^{-1/2}`. A loss sees no difference from zero there; what is linear does. With
  values of :math:`n^{-1/2}`, the next weight's update makes a change of :math:`n^{-1/2}`, until what is learned
  outgrows the start (measured: -0.3 to -0.6). So where it feeds what is linear (a sum, a product, another weight) **the
  weight starts at zero**, the limit of :math:`n^{-1/2}`: as with a residual branch that starts at zero, the start is
  that of an infinitely wide model, and all that follows learns at the same rate at any width.
- Where it feeds a function, as a router's softmax, whose value at zero is of size one, it is drawn as a readout is. So
  is the second of two that are multiplied with each other, as queries and keys of a fixed size: both at zero would
  never learn.
- Where it feeds a norm, its size makes no difference, and only its change relative to its start counts: with the
  exponents of a hidden layer, a + b = 1/2, that is of size one.
- Where it feeds a weight that is zero, as LoRA's first matrix A does, both at zero would never learn. So it starts at
  size one, a + b = 1/2. With Adam c is 1 for A, which sums over n, and 0 for the second matrix B, which sums over a
  fixed number: the ratio n of LoRA+ (arXiv:2402.12354). What A makes of its inputs' drift is of the size
  :math:`n^{\omega - a - b}` times that drift. :math:`\omega` is 1/2 before B has learned to hand gradients back, and
  grows towards 1 afterwards, as the layers before then learn along A: up to :math:`n^{1/2}`, LoRA's known internal
  instability (arXiv:2406.08447). Measured: :math:`\omega = 0.7`, and 0.1 of the drift itself, 0.3 together. A smaller
  start of A would be worse: with a + b = 1 all that B makes shrinks as :math:`n^{-0.35}`, and so does what follows.

``ab_overrides`` prevails over all of this, as everywhere.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import type_before_parametrizations

from ignite_monitor.checks import check_count, check_type
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.reference.rng import cuda_devices, preserved_rng_state
from ignite_monitor.scaling.graph import PRESETS, Node
from ignite_monitor.scaling.labels import FLAT, TracingError
from ignite_monitor.scaling.layers import FoundLayers, ParametrizedLayer, as_node, layers_by_hand
from ignite_monitor.scaling.module import Multiplier, check_weights, norm_of
from ignite_monitor.scaling.parametrization import Parametrization
from ignite_monitor.scaling.tracing import Trace

_logger = logging.getLogger(__name__)


def parametrize(
    make_model: Callable[[int], nn.Module], widths: tuple[int, int], *, sample_input: Any, **options: Any
) -> Parametrization:
    r"""A model with the multipliers, initial weights and learning rates of its width, without an edit of its code.

    The model is made at two widths, and both run once. Every weight that a linear operation sums over is a layer of its
    own: that of an embedding if only its outputs grow from one model to the other, of a readout if only its inputs do,
    and of a hidden layer if both. A readout whose output other layers take, as the keys and values of multi-query
    attention, starts at zero, or is a hidden layer: :mod:`ignite_monitor.scaling.widths` derives which. n is the fan-in
    (with the size of a convolution's kernel), of an embedding the number of its outputs. So the weights of ``nn.LSTM``,
    of ``nn.MultiheadAttention`` and of experts that are stacked in one parameter are layers like those of
    ``nn.Linear``. Where a module's output is that of its weight, it is multiplied by a forward hook, which is copied,
    pickled and compiled with the model: compile it afterwards.
    Elsewhere a is 0, and b and c are larger by what a would have been, which is the same training.

    Factors that the model's own code has and that depend on the width, as :math:`\sqrt n` after an embedding, count as
    part of the multiplier of the layer that they multiply. Weights that don't grow are no layers, and neither are
    parameters that nothing sums over (norms, position embeddings that are added): they stay as they are, at
    ``lr_prefactor``. Weights that are frozen, or zero, keep their values, and one warning says so; what is frozen is
    passed through as it is. ParametrizedModules in the model are taken as they are.

    Products of activations, as in attention, get no multiplier, and the solution supposes that their changes do not
    grow with width: that the dimension of a head does not grow, or that :math:`q k^\top` is divided by it and not by
    its root. There is a warning where they are seen to do otherwise.

    Args:
        make_model: makes the model at a width.
        widths: a small width, with which the large is only compared, and the width of the model to train.
        sample_input: an input for either, a tuple of arguments, or a dict of keyword arguments, with which the graph of
            layers is traced; or, where inputs grow too, a function that makes one for a width.
        options: more arguments of :class:`Parametrization`.

    Returns:
        The parametrization, with the model of the larger width in its ``model``.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the two models differ in more than sizes, nothing in them grows, or something does whose place
            among the layers is not known.
        RuntimeError: if the graph can't be traced, or a factor that depends on the width is of no layer.

    Examples:
        .. code-block:: python

            def make_model(width):
                return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


            parametrization = parametrize(make_model, widths=(32, 256), sample_input=torch.zeros(1, 64))
            optimizer = torch.optim.Adam(parametrization.param_groups)
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise TypeError(f"Argument make_model should be a function of the width, but given {type(make_model)}")
    if not isinstance(widths, (tuple, list)) or len(widths) != 2:
        raise TypeError(f"Argument widths should be a small and a large width, but given {widths!r}")
    if check_count("widths", widths[0], least=1) >= check_count("widths", widths[1]):
        raise ValueError(f"Argument widths should be a small and a large width, but given {widths!r}")
    with preserved_rng_state(cuda_devices()):
        small = make_model(widths[0])
    model = make_model(widths[1])
    growing = _growing_weights(small, model)
    by_hand = layers_by_hand(model, frozen=False)

    def traced(made: nn.Module, width: int, small: Trace | None = None) -> Trace:
        modules = dict(named_modules(made))
        layers = [(modules[name], as_node(layer)) for name, layer in by_hand.items()]
        inputs = sample_input(width) if callable(sample_input) else sample_input
        return Trace(made, layers, with_weights=True, small=small).run(inputs)

    trace = traced(model, widths[1], traced(small, widths[0]))
    inside = {id(each) for layer in by_hand.values() for each in layer.module.parameters()}
    _check_known(model, trace, {name for name, each in growing.items() if id(each) not in inside})
    if trace.warnings:
        _logger.warning("%s", trace.warnings[0])
    parametrization = Parametrization(model, sample_input=_found_layers(model, trace, by_hand), **options)
    _say_what_is_kept(parametrization, growing)
    return parametrization


def _found_layers(model: nn.Module, trace: Trace, by_hand: dict[str, ParametrizedLayer]) -> FoundLayers:
    modules = dict(named_modules(model))
    parameters = {name: (parameter, owner) for name, parameter, owner in named_parameters(model)}
    inner = _feeding(trace.nodes)
    layers = dict(by_hand)
    for name, use in trace.uses.items():
        parameter, owner = parameters[use.weight]
        takers = trace.takers.get(name, set()) if name in inner and use.kind == "readout" else set()
        kind = "hidden" if takers & {"norm", "zero"} else use.kind
        partners = {each for product in trace.products if name in product for each in product if each in layers}
        from_zero = "linear" in takers and kind == "readout" and not any(layers[each].from_zero for each in partners)
        is_zero = from_zero or not (parameter.is_meta or parameter.any())
        small, width = use.widths
        module = owner if use.module is None else modules[use.module]
        key = next(key for key, each in module.named_parameters() if each is parameter)
        a, b = PRESETS["mup"][kind]
        layers[name] = ParametrizedLayer(
            *(name, module, kind, width, a, b, None, (key,), _biases(module, key)),
            own=_exponent(trace.own_growth(name), width / small),
            hook=None if use.module is None else Multiplier(width, kind),
            is_module=use.is_module,
            # What is zero may be added to another weight, as LoRA's is when it is merged: so it has no multiplier.
            multiplies=use.is_module and not is_zero,
            from_zero=from_zero,
            few=kind != use.kind,
        )
    # Pairs as LoRA's: what feeds a weight that is zero, and that weight.
    feeding = {name for name, use in trace.uses.items() if name in inner and use.kind == "readout"}
    feeding = {name for name in feeding if "zero" in trace.takers.get(name, ())}
    first = {node.name for node in trace.nodes if node.layer in feeding}
    for node in trace.nodes:
        if node.layer in trace.uses and first & {node.name, *node.inputs}:
            layers[node.layer] = replace(layers[node.layer], drift=0.5)
    for name in by_hand:
        growth = trace.own_growth(name)
        if abs(growth) > FLAT:
            raise TracingError(
                f"The output of {name}, a ParametrizedModule, is multiplied by a factor that depends on the width "
                f"(times {math.exp(growth):.3g} from the smaller model to the larger), which its exponents do not "
                "count: leave it out there, and let the ParametrizedModule multiply, with a and b"
            )
    everything = [*modules.values(), *(parameter for parameter, _ in parameters.values())]
    order = {id(each): index for index, each in enumerate(everything)}

    def place_in_model(name: str) -> list[int]:
        return [order[id(each)] for each in (layers[name].module, *[*layers[name].weights.values()][:1])]

    return FoundLayers({name: layers[name] for name in sorted(layers, key=place_in_model)}, trace.nodes)


def _exponent(growth: float, times: float) -> float:
    """The exponent of a factor, from its growth; a twelfth of a whole number where it is one but for rounding."""
    if abs(growth) <= FLAT:
        return 0.0
    exponent = growth / math.log(times)
    nearest = round(12 * exponent) / 12
    return nearest if abs(exponent - nearest) < 1e-4 else exponent


def _biases(module: nn.Module, key: str) -> tuple[str, ...]:
    """The names of a weight's biases in its module: all that is no weight, or what is called like the weight."""
    biases = tuple(name for name, each in module.named_parameters(recurse=False) if each.ndim < 2)
    if key == "weight" or norm_of(dict(module.named_parameters()), key) is not None:
        return biases
    return tuple(name for name in biases if name == key.replace("weight", "bias") != key)


def _feeding(nodes: Iterable[Node]) -> set[str]:
    """The nodes whose values a weight takes, directly or through others."""
    feeding: set[str] = set()
    for node in reversed(list(nodes)):
        if node.has_weights or node.kind == "fixed" or node.name in feeding:
            feeding.update(node.inputs)
    return {node.layer for node in nodes if node.name in feeding}


def _growing_weights(small: nn.Module, large: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the larger model that are larger than in the smaller one.

    Raises:
        TypeError: if one is no module.
        ValueError: if they differ in more than sizes, or can't be looked into, or nothing grows.
    """
    for made in (small, large):
        _check_made(made)
    modules = list(named_modules(small)), list(named_modules(large))
    # By name, since make_model may define the class; and each module with a parametrization of torch's has its own.
    kinds = [
        [f"{name or 'the model'} ({type_before_parametrizations(module).__qualname__})" for name, module in each]
        for each in modules
    ]
    for one, other in itertools.zip_longest(*kinds, fillvalue="nothing more"):
        if one != other:
            raise ValueError(
                "Argument make_model should make models that differ in sizes alone, but they have other modules, first "
                f"{one} in the smaller and {other} in the larger: let the width decide of sizes alone"
            )
    sizes = [{name: tuple(each.shape) for name, each, _ in named_parameters(made)} for made in (small, large)]
    for name in dict.fromkeys([*sizes[0], *sizes[1]]):
        if name not in sizes[0] or name not in sizes[1] or len(sizes[0][name]) != len(sizes[1][name]):
            raise ValueError(
                "Argument make_model should make models that differ in sizes alone, but "
                f"{name.rpartition('.')[0] or 'the model'} differs in {name}"
            )
    growing = {
        name: parameter
        for name, parameter, _ in named_parameters(large)
        if parameter.ndim > 1 and sizes[0][name] != sizes[1][name]
    }
    if not growing:
        raise ValueError("Argument make_model should make a model whose weights grow with width, but none does")
    return growing


def _check_made(model: nn.Module) -> None:
    check_type("make_model", model, nn.Module, "a function that returns a torch.nn.Module")
    for name, module in named_modules(model):
        lazy = any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters(recurse=False))
        if lazy or isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"Argument make_model should make a model without {'lazy' if lazy else 'scripted'} modules, but "
                f"{name or 'all of it'} is one: {'run it once there' if lazy else 'leave torch.jit.script out'}"
            )
        check_weights(name, module)


def _check_known(model: nn.Module, trace: Trace, growing: set[str]) -> None:
    unused = []
    for name, parameter, module in named_parameters(model):
        if name not in growing or not parameter.requires_grad:
            continue
        of = f"{name.rpartition('.')[0] or 'the model'} ({type(module).__name__})"
        if name in trace.unknown:
            raise ValueError(
                f"{trace.unknown[name]} uses {name}, which grows with width, and it is not known what for, so that "
                f"{of} has no exponents: put it into a ParametrizedModule(module, width_dim=n, layer_type=...) in "
                "make_model, with which it is taken as one layer, whatever it does"
            )
        if name not in trace.touched:
            unused.append(f"{of}, whose {name.rpartition('.')[2]} grows with width")
    if unused:
        raise TracingError(
            f"With sample_input the model does not run {'; '.join(unused)}: give a sample_input with which it does, or "
            "freeze what is not trained"
        )


def _say_what_is_kept(parametrization: Parametrization, growing: dict[str, nn.Parameter]) -> None:
    names = {id(parameter): name for name, parameter in growing.items()}
    kept: dict[str, list[str]] = {
        "frozen, as they are": [name for name, each in growing.items() if not each.requires_grad],
        "zero, as they are": [],
        "set to zero, since other layers take their outputs, whose number does not grow": [],
    }
    _, zero, set_to_zero = kept.values()
    for name, layer in parametrization.layers.items():
        not_drawn = [names.get(id(each), name) for key, each in layer.weights.items() if key not in layer.seeds]
        (set_to_zero if layer.from_zero else zero).extend(not_drawn)
    parts = [
        f"{len(listed)} {how} ({listed[0]}{', …' if len(listed) > 1 else ''})" for how, listed in kept.items() if listed
    ]
    if parts:
        _logger.warning("Weights that are not drawn anew: %s", "; ".join(parts))

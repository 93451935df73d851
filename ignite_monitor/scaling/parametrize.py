"""Parametrization of a model that was written without one, by comparing two widths of it."""

from __future__ import annotations

import gc
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ignite_monitor.checks import check_choice, check_count, check_real, check_type
from ignite_monitor.model.isolation import cuda_devices, preserved_rng_state
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.scaling.exported import ExportedModels, LayerUse, mark_relative
from ignite_monitor.scaling.parametrization import (
    Parametrization,
    ParametrizedLayer,
    RandomTensors,
    initialize_weights,
    is_zero,
)
from ignite_monitor.scaling.program import ExportError, TracingError, role_by_fans
from ignite_monitor.scaling.solver import LAYER_TYPES, OPTIMIZER_TYPES, PRESETS, LayerGraph, Node, as_alignment, solve

MUON_UPDATES = {"original": 0.0, "match_rms_adamw": 0.5}
"""Exponent of the change of a hidden layer's output per step of ``torch.optim.Muon``, by its ``adjust_lr_fn``."""

T = TypeVar("T")
_logger = logging.getLogger(__name__)


def parametrize(
    make_model: Callable[[int], nn.Module],
    widths: tuple[int, int],
    *,
    sample_input: Any,
    lr_prefactor: float = 1e-3,
    std_prefactor: float = 1.0,
    weight_decay: float | None = None,
    optimizer_type: str = "adam",
    adjust_lr_fn: str = "original",
    alignment: str | tuple[float, float, float] = "full",
    ab_overrides: Mapping[str, tuple[float, float]] | None = None,
    c_overrides: Mapping[str, float] | None = None,
    kinds: Mapping[str, str] | None = None,
    initialize: bool = True,
) -> Parametrization:
    r"""Give a model the initial weights, multipliers and learning rates of its width.

    Every weight that grows with the width is a layer: an "embedding" if only its outputs grow, a "readout" if only its
    inputs do, "hidden" if both do. Roles, the graph of layers and the model's own factors, such as :math:`\sqrt n`, are
    read from ``torch.export`` of both models.

    A layer of width n multiplies its output by :math:`n^{-a}`, starts from weights of standard deviation
    ``std_prefactor`` :math:`\cdot\, n^{-b}` and zero biases, and learns at ``lr_prefactor`` :math:`\cdot\, n^{-c}`.
    (a, b) are muP's by default; c is the smallest with which nothing grows. Layers whose output no module
    returns have a = 0, and b and c larger by a: the same training. Other parameters, and frozen and zero weights, keep
    their values.

    Overrides are mappings by a layer's name, the last part of its name, or its type.

    Args:
        make_model: makes the model at a width.
        widths: a small width, used for comparison only, and the width of the model to train.
        sample_input: an input for both: a tensor, a tuple of arguments, or a dict of keyword arguments; or a function
            that makes one for a width.
        lr_prefactor: the learning rate at width 1, and of parameters that are no layers.
        std_prefactor: the weights' standard deviation at width 1.
        weight_decay: decoupled weight decay (AdamW, SGD; not Adam's L2 penalty), such that learning rate times weight
            decay is ``lr_prefactor * weight_decay`` for all layers and widths; None for the optimizer's.
        optimizer_type: "adam" for Adam, AdamW and others whose updates do not depend on the gradient's size, "sgd", or
            "muon" for hidden weights trained by ``torch.optim.Muon`` and the rest by AdamW.
        adjust_lr_fn: Muon's argument of that name, "original" or "match_rms_adamw".
        alignment: "full", "no", or (alpha, omega, u) for all layers.
        ab_overrides: (a, b).
        c_overrides: exponents of learning rates that are not to be solved for.
        kinds: name of a weight, a module, or its last part -> "embedding", "hidden", "readout" or "vector" (no layer).
            Where the graph can't be read, all weights but those of torch's modules need one.
        initialize: False keeps all weights, and adds no multipliers; only learning rates follow the width.

    Returns:
        The parametrization, with the model of the larger width in its ``model``.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument is invalid, the models differ in more than sizes, or a weight's purpose is unknown.
        RuntimeError: if the graph can't be read; the error names the place.

    Examples:
        .. code-block:: python

            def make_model(width):
                return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


            parametrization = parametrize(make_model, widths=(32, 256), sample_input=torch.zeros(1, 64))
            optimizer = torch.optim.Adam(parametrization.param_groups)
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise TypeError(f"Argument make_model should be a function of the width, but given {type(make_model)}")
    is_pair = isinstance(widths, (tuple, list)) and len(widths) == 2
    if not is_pair or check_count("widths", widths[0], least=1) >= check_count("widths", widths[1]):
        error = ValueError if is_pair else TypeError
        raise error(f"Argument widths should be a small and a large width, but given {widths!r}")
    lr_prefactor = check_real("lr_prefactor", lr_prefactor, above=0.0)
    std_prefactor = check_real("std_prefactor", std_prefactor, above=0.0)
    weight_decay = None if weight_decay is None else check_real("weight_decay", weight_decay, least=0.0)
    check_choice("optimizer_type", optimizer_type, *OPTIMIZER_TYPES)
    check_choice("adjust_lr_fn", adjust_lr_fn, *MUON_UPDATES)
    check_type("initialize", initialize, bool, "bool")
    assumed_alignment = as_alignment("alignment", alignment)

    with preserved_rng_state(cuda_devices()):
        small = make_model(widths[0])
    with RandomTensors() as random:
        model = make_model(widths[1])
    weights = _growing_weights(small, model)
    inputs = [sample_input(width) if callable(sample_input) else sample_input for width in widths]
    uses, nodes = _read((small, model), (inputs[0], inputs[1]), _given_roles(kinds, weights), weights)
    gc.collect()  # exported programs hold the models in reference cycles

    keys = {name: (name, name.rpartition(".")[2], use.kind) for name, use in uses.items()}
    ab = _overridden("ab_overrides", ab_overrides, keys, _check_ab, LAYER_TYPES)
    c = _overridden("c_overrides", c_overrides, keys, check_real, LAYER_TYPES)
    given = {uses[name].weight: value for name, value in c.items()}
    if any(given[uses[name].weight] != value for name, value in c.items()):
        raise ValueError(f"Layers that share a weight are given different c: {c}")
    # A weight that is zero may be added to another one, as LoRA's is when it is merged: it has no multiplier.
    kept = {name for name, use in uses.items() if not initialize or is_zero(weights[use.weight])}
    completed = {node.name: node for node in nodes}
    for name, use in uses.items():
        a, b = ab.get(name, PRESETS["mup"][use.kind])
        if use.module is None or name in kept:
            a, b = 0.0 - use.exponent, a + b + use.exponent
        is_muon = optimizer_type == "muon" and use.kind == "hidden" and weights[use.weight].ndim == 2
        update = MUON_UPDATES[adjust_lr_fn] if is_muon else None
        for key in use.nodes:
            own = completed[key]._replace(kind=use.kind, a=a, b=b, few=use.few, update=update)
            completed[key] = own._replace(c=given.get(use.weight))
    graph, assumed = LayerGraph(completed.values()), dict.fromkeys(uses, assumed_alignment)
    solution = solve(graph, assumed, optimizer_type=optimizer_type)

    layers: dict[str, ParametrizedLayer] = {}
    for name, use in uses.items():
        node, n = graph[name], use.widths[1]
        std = None if name in kept else std_prefactor * n**-node.b
        multiplier = float(n) ** -(node.a + use.exponent)  # 1 without a module
        exponents, biases = (node.a, node.b, solution.c[node.layer]), _biases(model, use)
        layers[name] = ParametrizedLayer(name, use.kind, n, *exponents, use.weight, biases, use.module, multiplier, std)
        first = layers[node.layer]
        if initialize and (first.std, first.fan_in) != (std, n):
            raise ValueError(
                f"Layers {first.name} and {name} share their weight, so both should have the same width and standard "
                f"deviation, but they have {first.fan_in} and {n}, and {first.std} and {std}. Use modules that share "
                "the parameter, such as nn.Linear, or initialize=False"
            )
    if initialize:
        replaced = dict.fromkeys(layer.weight for layer in layers.values() if layer.std is not None)
        lost = [name for name in replaced if not weights[name].is_meta and weights[name] not in random]
        if lost:
            _logger.warning(
                f"parametrize: {len(replaced)} weights are re-initialized, and the values of {len(lost)} of them were "
                f"not random, such as pretrained ones (first {lost[0]}). initialize=False keeps them."
            )
        initialize_weights(model, layers)
    return Parametrization(model, layers, graph, assumed, solution, optimizer_type, lr_prefactor, weight_decay)


# Roles


def _read(
    models: tuple[nn.Module, nn.Module], inputs: tuple[Any, Any], roles: Mapping[str, str], growing: Collection[str]
) -> tuple[dict[str, LayerUse], list[Node]]:
    """Uses of weights and the nodes of the graph, exported if possible, else from sizes and given roles."""
    try:
        exported = ExportedModels(models, inputs, roles)
    except ExportError:
        if not roles:
            raise
        return _uses_by_size(models, roles, growing)
    unused = [
        f"{name} ({type(module).__name__})"
        for name, parameter, module in named_parameters(models[1])
        if name in growing and parameter.requires_grad and name not in roles and name not in exported.reached
    ]
    if unused:
        raise TracingError(
            f"With sample_input the model does not use {', '.join(unused)}: give a sample_input with which it does, or "
            "freeze what is not trained"
        )
    mark_relative(exported.uses, exported.nodes)
    return exported.uses, exported.nodes


def _uses_by_size(
    models: tuple[nn.Module, nn.Module], roles: Mapping[str, str], growing: Collection[str]
) -> tuple[dict[str, LayerUse], list[Node]]:
    """Uses and a graph, in which all layers take the output of the first embedding, for a model that can't be read."""
    shapes = {name: parameter.shape for name, parameter, _ in named_parameters(models[0])}
    uses: dict[str, LayerUse] = {}
    for name, weight, module in named_parameters(models[1]):
        role, layer, pair = roles.get(name), name.removesuffix(".weight"), (shapes[name], weight.shape)
        if name not in growing or not weight.requires_grad or role == "vector":
            continue
        has_hook = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding))
        if isinstance(module, nn.Embedding):
            role, widths = role_by_fans(((1, pair[0][-1]), (1, pair[1][-1])), role or "embedding")
        elif has_hook or isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)):  # outputs first
            fans = [(math.prod(shape[1:]), shape[0]) for shape in pair]
            role, widths = role_by_fans((fans[0], fans[1]), role)
        elif role is None:
            raise ExportError(f"argument kinds should give the role of {name}, too")
        else:  # PyTorch has inputs last
            widths = [sizes for sizes in zip(*pair, strict=True) if sizes[0] != sizes[1]][-1]
        uses[layer] = LayerUse(name, role, widths, layer if layer != name and has_hook else None, [layer])
    first = next((name for name, use in uses.items() if use.kind == "embedding"), None)
    inputs = () if first is None else (first,)
    nodes = [Node(name, use.kind, () if use.kind == "embedding" else inputs) for name, use in uses.items()]
    return uses, sorted(nodes, key=lambda node: node.name != first)


def _given_roles(kinds: Any, weights: Collection[str]) -> dict[str, str]:
    """Roles by the weights' names; in ``kinds`` a weight, its module, or the last part of either may be named."""

    def check(name: str, role: str) -> str:
        check_choice(name, role, *LAYER_TYPES, "vector")
        return role

    owners = {weight: weight.removesuffix(".weight") for weight in weights}
    keys = {weight: (weight, owner, owner.rpartition(".")[2]) for weight, owner in owners.items()}
    return _overridden("kinds", kinds, keys, check)


def _overridden(
    name: str, overrides: Any, keys: Mapping[str, Iterable[str]], check: Callable[[str, Any], T], known: Any = ()
) -> dict[str, T]:
    """Checked values of an argument by part, each by the first of the part's keys; known keys need not fit any."""
    check_type(name, {} if overrides is None else overrides, Mapping, "Mapping or None")
    checked = {key: check(f"{name}[{key!r}]", value) for key, value in (overrides or {}).items()}
    fitting = {part: [key for key in own if key in checked] for part, own in keys.items()}
    unknown = set(checked).difference(known, *fitting.values())
    if unknown:
        raise ValueError(
            f"Argument {name} should name layers or weights that grow with width, but given {sorted(map(str, unknown))}"
        )
    return {part: checked[own[0]] for part, own in fitting.items() if own}


def _check_ab(name: str, value: object) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"Argument {name} should be two numbers (a, b), but given {value!r}")
    return check_real(name, value[0]), check_real(name, value[1])


def _biases(model: nn.Module, use: LayerUse) -> tuple[str, ...]:
    """Names of a layer's biases: all vectors of a module with one weight, else the one that is named alike."""
    path, _, key = use.weight.rpartition(".")
    module = dict(named_modules(model))[path if use.module is None else use.module]
    alike = None if key == "weight" else key.replace("weight", "bias")
    names = {id(parameter): name for name, parameter, _ in named_parameters(model)}
    vectors = module.named_parameters(recurse=False)
    return tuple(names[id(item)] for name, item in vectors if item.ndim < 2 and alike in (None, name))


def _growing_weights(small: nn.Module, large: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the larger model that are larger than in the smaller one."""
    for model in (small, large):
        check_type("make_model", model, nn.Module, "a function that returns a torch.nn.Module")
    for name, module in named_modules(large):
        if is_parametrized(module) and any(item.requires_grad for item in module.parameters()):
            raise ValueError(
                f"Argument make_model should make a model of plain modules, but {name or 'it'} computes its weight "
                "from other parameters (torch.nn.utils.parametrize)"
            )
    smaller, weights = ({name: item for name, item, _ in named_parameters(model)} for model in (small, large))
    for one, other in itertools.zip_longest(smaller, weights, fillvalue="nothing more"):
        if one != other:
            raise ValueError(
                "Argument make_model should make models that differ in sizes alone, but they have other parameters, "
                f"first {one} in the smaller and {other} in the larger"
            )
    growing = {name: item for name, item in weights.items() if item.ndim > 1 and item.shape != smaller[name].shape}
    if not growing:
        raise ValueError("Argument make_model should make a model whose weights grow with width, but none does")
    return growing

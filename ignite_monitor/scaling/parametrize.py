"""Parametrization of a model that was written without one, by comparing two widths of it."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ignite_monitor.checks import check_choice, check_count, check_real, check_type
from ignite_monitor.model.isolation import cuda_devices, preserved_rng_state
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.scaling.exported import ExportedModels, is_zero
from ignite_monitor.scaling.graph import LAYER_TYPES, PRESETS, LayerGraph, Node, as_alignment
from ignite_monitor.scaling.parametrization import DrawnTensors, Parametrization, ParametrizedLayer, initialize_weights
from ignite_monitor.scaling.program import ExportError, TracingError
from ignite_monitor.scaling.roles import LayerUse, choose_initialization, given_roles, overridden, uses_by_size
from ignite_monitor.scaling.solver import OPTIMIZER_TYPES, solve

MUON_UPDATES = {"original": 0.0, "match_rms_adamw": 0.5}
"""Exponent of the change of a hidden layer's output per step of ``torch.optim.Muon``, by its ``adjust_lr_fn``."""

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
    alignment_overrides: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
    initialize: bool = True,
) -> Parametrization:
    r"""Give a model the initial weights, multipliers and learning rates of its width.

    ``make_model`` makes the model at both widths. Every weight that grows from one to the other is a layer: an
    "embedding" if only its outputs grow, a "readout" if only its inputs do, "hidden" if both do. Roles, the graph of
    layers and factors of the model's own code, such as :math:`\sqrt n` after an embedding, are read from
    ``torch.export`` of both models.

    A layer of width n multiplies its output by :math:`n^{-a}`, starts from weights of standard deviation
    ``std_prefactor`` :math:`\cdot\, n^{-b}` and zero biases, and learns at ``lr_prefactor`` :math:`\cdot\, n^{-c}`.
    (a, b) are those of muP by default; c is the smallest with which nothing grows with width. Layers whose output no
    module returns have a = 0, with b and c larger by a, which is the same training. Parameters that are no layers, and
    frozen and zero weights, keep their values.

    Overrides are mappings; a layer is looked up by its name, the last part of its name, then its type.

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
        alignment_overrides: alignments, as for ``alignment``.
        kinds: name of a weight, a module, or its last part -> "embedding", "hidden", "readout" or "vector" (no layer),
            for models that ``torch.export`` refuses, and for weights whose purpose is unknown.
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
    default = as_alignment("alignment", alignment)

    with preserved_rng_state(cuda_devices()):
        small = make_model(widths[0])
    with DrawnTensors() as drawn:
        model = make_model(widths[1])
    growing = _growing_weights(small, model)
    inputs = [sample_input(width) if callable(sample_input) else sample_input for width in widths]
    uses, nodes = _read((small, model), (inputs[0], inputs[1]), given_roles(kinds, growing), growing)
    gc.collect()  # exported programs hold the models in reference cycles
    choose_initialization(uses, nodes)

    keys = {name: (name, name.rpartition(".")[2], use.kind) for name, use in uses.items()}
    ab = overridden("ab_overrides", ab_overrides, keys, _check_ab, LAYER_TYPES)
    c = overridden("c_overrides", c_overrides, keys, check_real, LAYER_TYPES)
    alignments = overridden("alignment_overrides", alignment_overrides, keys, as_alignment, LAYER_TYPES)
    assumed = dict.fromkeys(uses, default) | alignments
    parameters = {name: parameter for name, parameter, _ in named_parameters(model)}
    layers = {
        name: _layer(name, use, ab.get(name), parameters[use.weight], std_prefactor, initialize)
        for name, use in uses.items()
    }
    matrices = [name for name, parameter in parameters.items() if parameter.ndim == 2 and optimizer_type == "muon"]
    graph = _graph(nodes, layers, uses, c, dict.fromkeys(matrices, MUON_UPDATES[adjust_lr_fn]))
    solution = solve(graph, assumed, optimizer_type=optimizer_type)
    layers = {
        name: replace(layer, c=solution.c[graph[name].layer], biases=_biases(model, layer))
        for name, layer in layers.items()
    }
    parametrization = Parametrization(
        model, layers, graph, assumed, solution, optimizer_type, lr_prefactor, weight_decay
    )
    if initialize:
        _check_shared(layers, graph)
        _warn_of_weights(layers, growing, drawn)
        initialize_weights(parametrization)
    return parametrization


def _read(
    models: tuple[nn.Module, nn.Module], inputs: tuple[Any, Any], roles: Mapping[str, str], growing: Collection[str]
) -> tuple[dict[str, LayerUse], list[Node]]:
    """Uses of weights and the nodes of the graph, exported if possible, else from sizes and given roles."""
    try:
        exported = ExportedModels(models, inputs, roles)
    except ExportError:
        if not roles:
            raise
        return uses_by_size(models, roles, growing)
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
    for warning in exported.warnings[:1]:
        _logger.warning("parametrize: %s", warning)
    return exported.uses, exported.nodes


def _layer(
    name: str, use: LayerUse, ab: tuple[float, float] | None, weight: Tensor, prefactor: float, initialize: bool
) -> ParametrizedLayer:
    """A layer without its biases and its c."""
    n, own = use.widths[1], use.exponent(name)
    a, b = ab or PRESETS["mup"][use.kind]
    from_zero = use.from_zero and ab is None and initialize
    # A weight that is zero may be added to another one, as LoRA's is when it is merged: it has no multiplier.
    multiplies = use.module is not None and initialize and not is_zero(weight) and not from_zero
    if not multiplies:
        a, b = 0.0 - own, a + b + own
    std: float | None = 0.0 if from_zero else prefactor * n**-b
    if not initialize or is_zero(weight) or not weight.requires_grad:
        std = None
    multiplier = float(n) ** -(a + own) if multiplies else 1.0
    return ParametrizedLayer(name, use.kind, n, a, b, 0.0, use.weight, (), use.module, own, multiplier, std)


def _biases(model: nn.Module, layer: ParametrizedLayer) -> tuple[str, ...]:
    """Names of a layer's biases: all vectors of a module with one weight, else the one that is named alike."""
    path, _, key = layer.weight.rpartition(".")
    module = dict(named_modules(model))[path if layer.module is None else layer.module]
    alike = None if key == "weight" else key.replace("weight", "bias")
    names = {id(parameter): name for name, parameter, _ in named_parameters(model)}
    vectors = module.named_parameters(recurse=False)
    return tuple(names[id(item)] for name, item in vectors if item.ndim < 2 and alike in (None, name))


def _graph(
    nodes: Iterable[Node],
    layers: Mapping[str, ParametrizedLayer],
    uses: Mapping[str, LayerUse],
    c: Mapping[str, float],
    muon_updates: Mapping[str, float],
) -> LayerGraph:
    """The graph with exponents; layers with the same weight have one c."""
    given: dict[str, float] = {}
    for name, value in c.items():
        if given.setdefault(layers[name].weight, value) != value:
            raise ValueError(f"Layers that share {layers[name].weight} are given different c: {dict(c)}")
    layer_of = {node: layers[name] for name, use in uses.items() for node in use.nodes}

    def complete(node: Node) -> Node:
        layer = layer_of.get(node.name)
        if layer is None:
            return node
        update = muon_updates.get(layer.weight) if layer.layer_type == "hidden" else None
        few = uses[layer.name].few
        return node._replace(
            kind=layer.layer_type, a=layer.a, b=layer.b, c=given.get(layer.weight), few=few, update=update
        )

    return LayerGraph(map(complete, nodes))


def _growing_weights(small: nn.Module, large: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the larger model that are larger than in the smaller one.

    Raises:
        TypeError: if one is no module.
        ValueError: if they differ in more than sizes, have weights that can't be parametrized, or nothing grows.
    """
    for model in (small, large):
        check_type("make_model", model, nn.Module, "a function that returns a torch.nn.Module")
    for name, module in named_modules(large):
        if reason := _refused(module):
            raise ValueError(f"Argument make_model should make a model of plain modules, but {name or 'it'} {reason}")
    for one, other in itertools.zip_longest(_structure(small), _structure(large), fillvalue="nothing more"):
        if one != other:
            raise ValueError(
                "Argument make_model should make models that differ in sizes alone, but they have other parts, first "
                f"{one} in the smaller and {other} in the larger"
            )
    shapes = {name: parameter.shape for name, parameter, _ in named_parameters(small)}
    growing = {
        name: parameter
        for name, parameter, _ in named_parameters(large)
        if parameter.ndim > 1 and parameter.shape != shapes[name]
    }
    if not growing:
        raise ValueError("Argument make_model should make a model whose weights grow with width, but none does")
    return growing


def _structure(model: nn.Module) -> Iterator[str]:
    for name, module in named_modules(model):
        yield f"{name or 'the model'} ({type(module).__qualname__})"
        for key, parameter in module.named_parameters(recurse=False):
            yield f"{name}.{key} of {parameter.ndim} dimensions".lstrip(".")


def _refused(module: nn.Module) -> str | None:
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters(recurse=False)):
        return "is lazy: run it once in make_model"
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted"
    is_computed = isinstance(getattr(module, "parametrizations", None), nn.ModuleDict)
    if is_computed and any(parameter.requires_grad for parameter in module.parameters()):
        return "computes its weight from other parameters (torch.nn.utils.parametrize)"
    return None


def _check_shared(layers: Mapping[str, ParametrizedLayer], graph: LayerGraph) -> None:
    for name, layer in layers.items():
        owner = layers[graph[name].layer]
        if (owner.std, owner.fan_in) != (layer.std, layer.fan_in):
            raise ValueError(
                f"Layers {owner.name} and {name} share their weight, so both should have the same width and standard "
                f"deviation, but they have {owner.fan_in} and {layer.fan_in}, and {owner.std} and {layer.std}. Use the "
                "weight in modules of its own, such as an nn.Linear whose weight is the same parameter, or "
                "initialize=False"
            )


def _warn_of_weights(
    layers: Mapping[str, ParametrizedLayer], growing: Mapping[str, nn.Parameter], drawn: DrawnTensors
) -> None:
    """Name the weights that lose values that were not drawn at random."""
    stds = {layer.weight: layer.std for layer in layers.values()}
    replaced = [name for name, std in stds.items() if std is not None]
    lost = [name for name in replaced if not growing[name].is_meta and growing[name] not in drawn]
    if lost:
        _logger.warning(
            "parametrize: %d weights are re-initialized, and %d of them had values that were not drawn at random, such "
            "as pretrained ones (first %s). initialize=False keeps them.",
            len(replaced),
            len(lost),
            lost[0],
        )


def _check_ab(name: str, value: object) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"Argument {name} should be two numbers (a, b), but given {value!r}")
    return check_real(name, value[0]), check_real(name, value[1])

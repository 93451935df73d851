r"""Parametrization of a model that was written without one, by comparing two widths of it.

**Layers with a fixed number of outputs inside the network**, such as keys and values that all heads share, the second
layer of a mixer's token MLP, a router, or the first matrix of LoRA: they sum over n features like a readout, but other
weights take their outputs.

- Their change is of size one with :math:`c = \alpha - a`, as for every layer.
- Behind few outputs, gradients with respect to the input are :math:`W^\top g` with few elements g, so the input changes
  along the rows of W: :math:`\omega` is 1, and :math:`n^{1 - a - b}` needs a + b = 1, as in a readout.
- With a + b = 1 the output starts at :math:`n^{-1/2}`. If a linear operation takes it, everything behind it shrinks
  with width, so **the weight starts at zero**, the limit for n to infinity, like a residual branch that starts at zero.
- If a function takes it, such as a router's softmax, it starts like a readout. So does the second of two that are
  multiplied with each other: both at zero would never learn.
- In front of a norm only the relative change counts, and in front of a zero weight (LoRA's A) both at zero would never
  learn: these are initialized like hidden layers, with a + b = 1/2 (c = 1 for A and 0 for B, the ratio n of LoRA+,
  arXiv:2402.12354).
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import type_before_parametrizations

from ignite_monitor.checks import check_choice, check_count, check_real, check_type
from ignite_monitor.model.isolation import cuda_devices, preserved_rng_state
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.scaling.exported import ExportedModels, LayerUse
from ignite_monitor.scaling.graph import LayerGraph, Node, tied
from ignite_monitor.scaling.parametrization import (
    DrawnTensors,
    Multiplier,
    Parametrization,
    ParametrizedLayer,
    initialize_weights,
)
from ignite_monitor.scaling.presets import LAYER_TYPES, MUON_UPDATES, OPTIMIZER_TYPES, PRESETS, as_alignment
from ignite_monitor.scaling.program import ExportError, TracingError
from ignite_monitor.scaling.roles import given_roles, uses_by_size
from ignite_monitor.scaling.solver import solve

_logger = logging.getLogger(__name__)
T = TypeVar("T")


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
    ``torch.export`` of both models (:mod:`ignite_monitor.scaling.exported`).

    A layer of width n multiplies its output by :math:`n^{-a}`, starts from weights of standard deviation
    ``std_prefactor`` :math:`\cdot\, n^{-b}` and zero biases, and learns at ``lr_prefactor`` :math:`\cdot\, n^{-c}`.
    (a, b) are those of muP by default; c is the smallest with which nothing grows with width. Layers whose output no
    module returns have a = 0, with b and c larger by a, which is the same training. Parameters that are no layers keep
    their values and learn at ``lr_prefactor``; frozen and zero weights keep theirs, too.

    Overrides are mappings; a layer is looked up by its name, the last part of its name, then its type.

    Args:
        make_model: makes the model at a width.
        widths: a small width, used for comparison only, and the width of the model to train.
        sample_input: an input for both: a tensor, a tuple of arguments, or a dict of keyword arguments; or a function
            that makes one for a width.
        lr_prefactor: the learning rate at width 1.
        std_prefactor: the weights' standard deviation at width 1.
        weight_decay: decoupled weight decay (AdamW, SGD; not Adam's L2 penalty), such that the product of learning rate
            and weight decay is ``lr_prefactor * weight_decay`` for all layers and widths; None for the optimizer's.
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
    if not isinstance(widths, (tuple, list)) or len(widths) != 2:
        raise TypeError(f"Argument widths should be a small and a large width, but given {widths!r}")
    if check_count("widths", widths[0], least=1) >= check_count("widths", widths[1]):
        raise ValueError(f"Argument widths should be a small and a large width, but given {widths!r}")
    lr_prefactor = check_real("lr_prefactor", lr_prefactor, above=0.0)
    std_prefactor = check_real("std_prefactor", std_prefactor, above=0.0)
    weight_decay = None if weight_decay is None else check_real("weight_decay", weight_decay, least=0.0)
    check_choice("optimizer_type", optimizer_type, *OPTIMIZER_TYPES)
    check_choice("adjust_lr_fn", adjust_lr_fn, *MUON_UPDATES)
    check_type("initialize", initialize, bool, "bool")
    default = as_alignment("alignment", alignment)

    with preserved_rng_state(cuda_devices()):
        small = make_model(widths[0])
    drawn = DrawnTensors()
    with drawn:
        model = make_model(widths[1])
    growing = _growing_weights(small, model)
    roles = given_roles(kinds, growing)
    inputs = [sample_input(width) if callable(sample_input) else sample_input for width in widths]
    uses, nodes = _read((small, model), (inputs[0], inputs[1]), roles, growing)

    gc.collect()  # exported programs hold the models in reference cycles
    parameters = {name: (each, owner) for name, each, owner in named_parameters(model)}
    _assign_starts(uses, nodes)
    modules = dict(named_modules(model))
    types = {name: use.kind for name, use in uses.items()}
    ab = _overridden("ab_overrides", ab_overrides, types, _check_ab)
    c = _overridden("c_overrides", c_overrides, types, check_real)
    alignments = _overridden("alignment_overrides", alignment_overrides, types, as_alignment)
    layers: dict[str, ParametrizedLayer] = {}
    for name, use in uses.items():
        weight, owner = parameters[use.weight]
        owner = owner if use.module is None else modules[use.module]
        is_zero = not weight.is_meta and not bool(weight.any())
        from_zero = use.from_zero and name not in ab and initialize
        kept = not initialize or is_zero or not weight.requires_grad
        a, b = ab.get(name, PRESETS["mup"][use.kind])
        # A weight that is zero may be added to another one, as LoRA's is when it is merged: it has no multiplier.
        multiplies = use.module is not None and initialize and not is_zero and not from_zero
        n, own = use.widths[1], use.exponent(name)
        layers[name] = ParametrizedLayer(
            *(name, use.kind, n, *((a, b) if multiplies else (0.0 - own, a + b + own)), 0.0, use.weight),
            biases=_biases(use.weight, owner, {id(each): name for name, (each, _) in parameters.items()}),
            module=use.module,
            own=own,
            multiplier=float(n) ** -(a + own) if multiplies else 1.0,
            std=None if kept else 0.0 if from_zero else std_prefactor * n ** -(b if multiplies else a + b + own),
        )
    muon = MUON_UPDATES[adjust_lr_fn] if optimizer_type == "muon" else None
    graph = _graph(nodes, layers, uses, c, muon, parameters)
    assumed = {name: alignments.get(name, default) for name in layers}
    solution = solve(graph, assumed, optimizer_type=optimizer_type)
    layers = {name: replace(layer, c=solution.c[graph[name].layer]) for name, layer in layers.items()}
    parametrization = Parametrization(
        model, layers, graph, assumed, solution=solution, optimizer_type=optimizer_type, lr_prefactor=lr_prefactor,
        weight_decay=weight_decay,
    )  # fmt: skip
    if initialize:
        _check_shared(parametrization)
        _warn_of_weights(parametrization, growing, drawn)
        initialize_weights(parametrization)
        for layer in layers.values():
            if layer.multiplier != 1.0 and layer.module is not None:
                modules[layer.module].register_forward_hook(Multiplier(layer.multiplier))
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
    unused = []
    for name, parameter, module in named_parameters(models[1]):
        if name not in growing or not parameter.requires_grad or name in roles:
            continue
        if name not in exported.reached:
            unused.append(f"{name} ({type(module).__name__})")
    if unused:
        raise TracingError(
            f"With sample_input the model does not use {', '.join(unused)}: give a sample_input with which it does, or "
            "freeze what is not trained"
        )
    for warning in exported.warnings[:1]:
        _logger.warning("parametrize: %s", warning)
    return exported.uses, exported.nodes


def _assign_starts(uses: Mapping[str, LayerUse], nodes: Iterable[Node]) -> None:
    """Choose the initialization of layers with few outputs, by the operations that take these."""
    feeding: set[str] = set()
    for node in reversed(list(nodes)):
        if node.has_weights or node.kind == "fixed" or node.name in feeding:
            feeding.update(node.inputs)
    inner = {node.layer for node in nodes if node.name in feeding}
    for name, use in uses.items():
        if use.kind != "readout" or name not in inner:
            continue
        if use.takers & {"norm", "zero"}:
            use.kind, use.few = "hidden", True
        elif "linear" in use.takers:
            use.from_zero = not any(uses[partner].from_zero for partner in use.partners)


def _graph(
    nodes: Iterable[Node],
    layers: Mapping[str, ParametrizedLayer],
    uses: Mapping[str, LayerUse],
    c: Mapping[str, float],
    muon: float | None,
    parameters: Mapping[str, tuple[nn.Parameter, nn.Module]],
) -> LayerGraph:
    def complete(node: Node) -> Node:
        layer = layers.get(node.layer)
        if layer is None:
            return node
        is_muon = layer.layer_type == "hidden" and parameters[layer.weight][0].ndim == 2
        return node._replace(
            kind=layer.layer_type, a=layer.a, b=layer.b, c=c.get(layer.name), few=uses[layer.name].few,
            update=muon if is_muon else None,
        )  # fmt: skip

    graph = LayerGraph(complete(node) for node in nodes)
    return tied(graph, {name: parameters[layer.weight][0] for name, layer in layers.items()})


def _biases(weight: str, module: nn.Module, names: Mapping[int, str]) -> tuple[str, ...]:
    """Names of a weight's biases in its module: all vectors of a module with one weight, else what is named alike."""
    key = weight.rpartition(".")[2]
    vectors = {each: parameter for each, parameter in module.named_parameters(recurse=False) if parameter.ndim < 2}
    if key != "weight":
        vectors = {
            each: parameter for each, parameter in vectors.items() if each == key.replace("weight", "bias") != key
        }
    return tuple(names[id(parameter)] for parameter in vectors.values())


def _growing_weights(small: nn.Module, large: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the larger model that are larger than in the smaller one.

    Raises:
        TypeError: if one is no module.
        ValueError: if they differ in more than sizes, have weights that can't be parametrized, or nothing grows.
    """
    for model in (small, large):
        _check_made(model)
    kinds = [
        [f"{name or 'the model'} ({type_before_parametrizations(module).__qualname__})" for name, module in modules]
        for modules in (list(named_modules(small)), list(named_modules(large)))
    ]
    for one, other in itertools.zip_longest(*kinds, fillvalue="nothing more"):
        if one != other:
            raise ValueError(
                "Argument make_model should make models that differ in sizes alone, but they have other modules, first "
                f"{one} in the smaller and {other} in the larger"
            )
    sizes = [{name: tuple(each.shape) for name, each, _ in named_parameters(model)} for model in (small, large)]
    for name in dict.fromkeys([*sizes[0], *sizes[1]]):
        if name not in sizes[0] or name not in sizes[1] or len(sizes[0][name]) != len(sizes[1][name]):
            raise ValueError(f"Argument make_model should make models that differ in sizes alone, but {name} differs")
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
        reason = None
        if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters(recurse=False)):
            reason = "is lazy: run it once in make_model"
        elif isinstance(module, torch.jit.ScriptModule):
            reason = "is scripted"
        elif isinstance(getattr(module, "parametrizations", None), nn.ModuleDict) and any(
            parameter.requires_grad for parameter in module.parameters()
        ):
            reason = "computes its weight from other parameters (torch.nn.utils.parametrize)"
        if reason is not None:
            raise ValueError(f"Argument make_model should make a model of plain modules, but {name or 'it'} {reason}")


def _check_shared(parametrization: Parametrization) -> None:
    layers = parametrization.layers
    for name, layer in layers.items():
        owner = layers[parametrization.graph[name].layer]
        if (owner.std, owner.fan_in) != (layer.std, layer.fan_in):
            raise ValueError(
                f"Layers {owner.name} and {name} share their weight, so both should have the same width and standard "
                f"deviation, but they have {owner.fan_in} and {layer.fan_in}, and {owner.std} and {layer.std}. Use the "
                "weight in modules of its own, such as an nn.Linear whose weight is the same parameter, or "
                "initialize=False"
            )


def _warn_of_weights(
    parametrization: Parametrization, growing: Mapping[str, nn.Parameter], drawn: DrawnTensors
) -> None:
    """Name the weights that keep their values, or lose values that were not drawn at random."""
    layers = {layer.weight: layer for layer in parametrization.layers.values()}
    replaced = [name for name, layer in layers.items() if layer.std is not None]
    lost = [name for name in replaced if not growing[name].is_meta and growing[name] not in drawn]
    if lost:
        _logger.warning(
            "parametrize: %d weights are re-initialized, and %d of them had values that were not drawn at random, such "
            "as pretrained ones (first %s). initialize=False keeps them.",
            len(replaced),
            len(lost),
            lost[0],
        )
    kept = {
        "frozen": [name for name, each in growing.items() if not each.requires_grad],
        "zero": [name for name, layer in layers.items() if layer.std is None and growing[name].requires_grad],
        "set to zero, as other layers take their few outputs": [n for n, layer in layers.items() if layer.std == 0.0],
    }
    parts = [f"{len(names)} {how} ({names[0]}{', …' * (len(names) > 1)})" for how, names in kept.items() if names]
    if parts:
        _logger.warning("parametrize: weights that are not drawn at random: %s", "; ".join(parts))


def _check_ab(name: str, value: object) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"Argument {name} should be two numbers (a, b), but given {value!r}")
    return check_real(name, value[0]), check_real(name, value[1])


def _overridden(
    name: str, overrides: Mapping[str, Any] | None, types: Mapping[str, str], check: Callable[[str, Any], T]
) -> dict[str, T]:
    """Values of overrides by the layers' names.

    Args:
        check: makes a value of (name, value), or raises.

    Raises:
        TypeError: if they are no mapping, or a value is of another type.
        ValueError: if a key fits no layer, or a value is invalid.
    """
    if overrides is None:
        return {}
    check_type(name, overrides, Mapping, "Mapping or None")
    checked = {key: check(f"{name}[{key!r}]", value) for key, value in overrides.items()}
    values: dict[str, T] = {}
    used = set(LAYER_TYPES)  # a preset has them all, whatever the model
    for layer, kind in types.items():
        keys = [key for key in (layer, layer.rpartition(".")[2], kind) if key in checked]
        used.update(keys)
        if keys:
            values[layer] = checked[keys[0]]
    if unknown := sorted(map(str, set(checked) - used)):
        raise ValueError(f"Argument {name} should name layers of the model or layer types, but given {unknown}")
    return values

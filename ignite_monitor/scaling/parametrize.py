"""Parametrization of a model that was written without one, by comparing two widths of it."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ignite_monitor.checks import check_choice, check_count, check_real, check_type
from ignite_monitor.model.isolation import preserved_rng_state
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.scaling.exported import NEGLIGIBLE, ExportedModels, mark_relative
from ignite_monitor.scaling.operations import TracingError
from ignite_monitor.scaling.parametrization import Parametrization, RandomTensors, initialize_weights, is_zero
from ignite_monitor.scaling.solver import PRESETS, ROLES, ParametrizedLayer, solve

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
    preset: str = "mup",
    c_overrides: Mapping[str, float] | None = None,
    initialize: bool = True,
) -> Parametrization:
    r"""Give a model the initial weights, multipliers and learning rates of its width.

    Every weight that grows with the width is a layer: an "embedding" if only its outputs grow, a "readout" if only its
    inputs do, "hidden" if both do. Roles, the graph of layers and the model's own factors, such as :math:`\sqrt n`, are
    read from ``torch.export`` of both models. A layer of width n multiplies its output by :math:`n^{-a}`. It starts
    from zero biases and weights of standard deviation ``std_prefactor`` :math:`\cdot\, n^{-b}`. Its learning rate
    is ``lr_prefactor`` :math:`\cdot\, n^{-c}`, with the smallest c with which nothing grows. Layers whose output no
    module returns have a = 0, and b and c larger by a: the same training. Other parameters, and frozen and zero
    weights, keep their values.

    Args:
        make_model: makes the model at a width.
        widths: a small width, used for comparison only, and the width of the model to train, at least twice as large:
            between closer widths factors such as a root can't be told from rounding.
        sample_input: an input for both: a tensor, a tuple of arguments, or a dict of keyword arguments; or a function
            that makes one for a width.
        lr_prefactor: the learning rate at width 1, and of parameters that are no layers.
        std_prefactor: the weights' standard deviation at width 1.
        weight_decay: decoupled weight decay (AdamW, SGD; not Adam's L2 penalty), such that learning rate times weight
            decay is ``lr_prefactor * weight_decay`` for all layers and widths; None for the optimizer's.
        optimizer_type: "adam" for Adam, AdamW and others whose updates do not depend on the gradient's size, "sgd", or
            "muon" for hidden weights trained by ``torch.optim.Muon`` and the rest by AdamW.
        adjust_lr_fn: Muon's argument of that name, "original" or "match_rms_adamw".
        preset: (a, b) of all layers: "mup" or "standard".
        c_overrides: name of a layer, its last part, or a role -> exponent c that is not to be solved for.
        initialize: False keeps all weights, and adds no multipliers; only learning rates follow the width.

    Returns:
        The parametrization, with the model of the larger width in its ``model``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is invalid, the models differ in more than sizes, or a given c is too small.
        TracingError: if the graph can't be read, or the model does not use a weight; a RuntimeError.

    Examples:
        .. code-block:: python

            def make_model(width):
                return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


            parametrization = parametrize(make_model, widths=(32, 256), sample_input=torch.zeros(1, 64))
            optimizer = torch.optim.Adam(parametrization.param_groups)
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise TypeError(f"Argument make_model should be a function of the width, but given {type(make_model)}")
    check_type("widths", widths, tuple, "a tuple of a small and a large width")
    if len(widths) != 2 or 2 * check_count("widths", widths[0], least=1) > check_count("widths", widths[1]):
        raise ValueError(
            f"Argument widths should be a width and another, at least twice as large, but given {widths!r}"
        )
    lr_prefactor = check_real("lr_prefactor", lr_prefactor, above=0.0)
    std_prefactor = check_real("std_prefactor", std_prefactor, above=0.0)
    weight_decay = None if weight_decay is None else check_real("weight_decay", weight_decay, least=0.0)
    check_choice("optimizer_type", optimizer_type, "adam", "sgd", "muon")
    check_choice("adjust_lr_fn", adjust_lr_fn, *MUON_UPDATES)
    check_choice("preset", preset, *PRESETS)
    check_type("initialize", initialize, bool, "bool")

    with preserved_rng_state():
        small = make_model(widths[0])
    with RandomTensors() as random:
        model = make_model(widths[1])
    weights = _growing_weights(small, model)
    inputs = [sample_input(width) if callable(sample_input) else sample_input for width in widths]
    exported = ExportedModels((small, model), (inputs[0], inputs[1]))
    unused = [name for name, item in weights.items() if item.requires_grad and name not in exported.reached]
    if unused:
        raise TracingError(f"With sample_input the model does not use {', '.join(unused)}: change it, or freeze these")
    layers, graph = exported.layers, exported.graph
    del exported
    gc.collect()  # exported programs hold the models in reference cycles
    mark_relative(graph)
    c_by_weight = _given_c(c_overrides, layers)
    owners: dict[str, ParametrizedLayer] = {}
    for layer in layers.values():
        layer.a, layer.b = PRESETS[preset][layer.role]
        factor = layer.log_factor or 0.0  # logarithm of the ratio of the model's own factors
        exponent = 0.0 if abs(factor) <= NEGLIGIBLE else round(factor / math.log(layer.widths[1] / layer.widths[0]), 6)
        # A weight that is zero may be added to another one, as LoRA's is when it is merged: it has no multiplier.
        is_kept = not initialize or is_zero(weights[layer.weight])
        if layer.module is None or is_kept:
            layer.a, layer.b = 0.0 - exponent, layer.a + layer.b + exponent
        layer.multiplier = float(layer.width) ** -(layer.a + exponent)  # 1 without a module
        layer.std = None if is_kept else std_prefactor * layer.width**-layer.b
        layer.biases = _biases(model, layer)
        if optimizer_type == "muon" and layer.role == "hidden" and weights[layer.weight].ndim == 2:
            # An orthogonal update of k x n maps an aligned input of norm sqrt(n) to a vector of that norm, whose k
            # elements have the root mean square sqrt(n / k). It grows if k does not.
            layer.muon_update = MUON_UPDATES[adjust_lr_fn] + 0.5 * layer.has_few_outputs
        first = owners.setdefault(layer.weight, layer)
        if initialize and (first.std, first.width) != (layer.std, layer.width):
            raise ValueError(f"Layers {first.name} and {layer.name} share a weight, but not width and initial values")
    solution = solve(graph, {}, c_by_weight, sgd=optimizer_type == "sgd")
    for name, layer in layers.items():
        layer.c = solution.c[name]
    if initialize:
        replaced = dict.fromkeys(layer.weight for layer in layers.values() if layer.std is not None)
        lost = [name for name in replaced if not weights[name].is_meta and weights[name] not in random]
        if lost:
            _logger.warning(
                f"parametrize: {len(replaced)} weights are re-initialized, and the values of {len(lost)} of them were "
                f"not random, such as pretrained ones (first {lost[0]}). initialize=False keeps them."
            )
        initialize_weights(model, layers)
    return Parametrization(model, layers, graph, solution, c_by_weight, optimizer_type, lr_prefactor, weight_decay)


def _given_c(overrides: Any, layers: Mapping[str, ParametrizedLayer]) -> dict[str, float]:
    """Given exponents c by weight; a layer's name is preferred to its last part, and that to a role."""
    overrides = {} if overrides is None else overrides
    check_type("c_overrides", overrides, Mapping, "Mapping or None")
    values = {key: check_real("c_overrides", value) for key, value in overrides.items()}
    keys = {name: (name, name.rpartition(".")[2], layer.role) for name, layer in layers.items()}
    if unknown := set(values).difference(ROLES, *keys.values()):
        raise ValueError(f"Argument c_overrides should name layers that grow with width, but given {unknown}")
    fitting = {name: [key for key in names if key in values] for name, names in keys.items()}
    c = {name: values[names[0]] for name, names in fitting.items() if names}
    by_weight = {layers[name].weight: value for name, value in c.items()}
    if any(by_weight[layers[name].weight] != value for name, value in c.items()):
        raise ValueError(f"Layers that share a weight are given different c: {c}")
    return by_weight


def _biases(model: nn.Module, layer: ParametrizedLayer) -> tuple[str, ...]:
    """Names of a layer's biases: all vectors of a module with one weight, else the one that is named alike."""
    path, _, key = layer.weight.rpartition(".")
    owner = dict(named_modules(model))[path if layer.module is None else layer.module]
    alike = None if key == "weight" else key.replace("weight", "bias")
    vectors = dict(owner.named_parameters(recurse=False))
    ids = {id(item) for name, item in vectors.items() if item.ndim < 2 and alike in (None, name)}
    return tuple(name for name, parameter, _ in named_parameters(model) if id(parameter) in ids)


def _growing_weights(small: nn.Module, large: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the larger model that are larger than in the smaller one."""
    for model in (small, large):
        check_type("make_model", model, nn.Module, "a function that returns a torch.nn.Module")
    for name, module in named_modules(large):
        if is_parametrized(module) and any(item.requires_grad for item in module.parameters()):
            raise ValueError(f"Argument make_model should not use torch.nn.utils.parametrize, as {name} does")
    smaller, weights = ({name: item for name, item, _ in named_parameters(model)} for model in (small, large))
    if differing := sorted(smaller.keys() ^ weights.keys()):
        raise ValueError(f"Argument make_model should make models that differ in sizes alone, but in {differing}")
    growing = {name: item for name, item in weights.items() if item.ndim > 1 and item.shape != smaller[name].shape}
    if not growing:
        raise ValueError("Argument make_model should make a model whose weights grow with width, but none does")
    return growing

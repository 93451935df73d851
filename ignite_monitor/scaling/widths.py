"""A parametrization of a model that was written without one, found by comparing two widths of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_count
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.scaling._forward import run, untouched
from ignite_monitor.scaling._growth import Grown, growing_modules, width_and_type
from ignite_monitor.scaling.module import Multiplier
from ignite_monitor.scaling.parametrization import Parametrization
from ignite_monitor.scaling.tracing import Between, between_layers

_logger = logging.getLogger(__name__)


def parametrize(
    make_model: Callable[[int], nn.Module], widths: tuple[int, int], *, sample_input: Any, **options: Any
) -> Parametrization:
    r"""A model with the multipliers, initial weights and learning rates of its width, without an edit of its code.

    The model is made at two widths. A module's weight is that of an embedding if only its outputs grow from one to the
    other, of a readout if only its inputs do, and of a hidden layer if both. n is the fan-in (with the size of a
    convolution's kernel), of an embedding the number of its outputs. Parameters without a weight that grows (norms,
    position embeddings that are added) stay as they are, at ``lr_prefactor``. Multipliers are forward hooks, which are
    copied, pickled and compiled with the model: compile it afterwards.

    Products of activations, as in attention, get no multiplier, and the solution supposes that their changes do not
    grow with width: that the dimension of a head does not grow, or that :math:`q k^\top` is divided by it and not by
    its root. There is a warning where ``scaled_dot_product_attention`` is seen to do otherwise.

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
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        small = make_model(widths[0])
    model = make_model(widths[1])
    growing = growing_modules(small, model)
    inputs = sample_input(widths[1]) if callable(sample_input) else sample_input
    shapes = _shapes_seen(model, [grown.module for grown in growing], inputs)
    used = {id(weight) for grown in growing if id(grown.module) in shapes for weight, _ in grown.weights.values()}
    for grown in growing:
        # One that does not run may still lend its weights to others, as T5's shared embedding does.
        lends = id(grown.module) not in shapes and used.issuperset(id(weight) for weight, _ in grown.weights.values())
        layer = None if lends else width_and_type(grown, shapes.get(id(grown.module)))
        if layer is not None:
            grown.module.register_forward_hook(Multiplier(*layer))
    parametrization = Parametrization(model, sample_input=inputs, **options)
    between = _between_layers(model, parametrization, inputs)
    _check_weights(model, growing, between)
    if between.scales:
        inputs = sample_input(widths[0]) if callable(sample_input) else sample_input
        _check_attention(_between_layers(small, parametrization, inputs).scales, between.scales)
    return parametrization


def _between_layers(model: nn.Module, parametrization: Parametrization, sample_input: Any) -> Between:
    nodes = {name: parametrization.graph[name]._replace(inputs=(), shares=None) for name in parametrization.layers}
    layers = [(module, nodes[name]) for name, module in named_modules(model) if name in nodes]
    return between_layers(model, layers, sample_input)


def _check_weights(model: nn.Module, growing: list[Grown], between: Between) -> None:
    ours = {id(weight) for grown in growing for weight, _ in grown.weights.values()}
    for name, parameter, _ in named_parameters(model):
        if id(parameter) in ours and name in between.multiplied:
            raise ValueError(
                f"The graph can't be traced: {between.multiplied[name]} uses {name}, which grows with width, outside "
                "of a layer: make it of Linear, Conv and Embedding, or wrap it in a ParametrizedModule by hand"
            )


def _check_attention(small: list[tuple[str, int, float]], large: list[tuple[str, int, float]]) -> None:
    for (name, size, scale), (_, larger, other) in zip(small, large, strict=False):
        if larger > size and other * larger > 1.05 * scale * size:
            _logger.warning(
                "%s: the heads grow with width, from %d to %d, but scores are divided by less than that, from %.3g to "
                "%.3g. Where queries and keys align, they will grow with width; give it a scale that is proportional "
                "to 1 / the head's dimension.",
                name,
                size,
                larger,
                1 / scale,
                1 / other,
            )
            return


def _shapes_seen(model: nn.Module, modules: list[nn.Module], sample_input: Any) -> dict[int, tuple[int, int] | None]:
    """The last dimensions of what modules take and return, of those that run; None where it is no single tensor."""
    seen: dict[int, tuple[int, int] | None] = {}

    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        single = args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and args[0].ndim and output.ndim
        seen[id(module)] = (args[0].shape[-1], output.shape[-1]) if single else None

    with untouched(model):
        handles = [module.register_forward_hook(look) for module in modules]
        try:
            run(model, sample_input)
        finally:
            for handle in handles:
                handle.remove()
    return seen

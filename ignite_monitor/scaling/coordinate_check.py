"""The coordinate check: outputs of layers, and their changes, over the width."""

from __future__ import annotations

import itertools
import logging
import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.checks import check_count, check_function
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.isolation import cuda_devices, generators_of, preserved_rng_state
from ignite_monitor.model.modes import eager, is_plain
from ignite_monitor.model.names import is_layer
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.reference.call import Call, Comparison, NotComparableError
from ignite_monitor.reference.passes import ReferencePasses
from ignite_monitor.reference.reference import Reference
from ignite_monitor.scaling.coordinate_result import QUANTITIES, CoordinateCheck, Record
from ignite_monitor.scaling.parametrization import Parametrization
from ignite_monitor.scaling.solver import clipped_alignment

_logger = logging.getLogger(__name__)


def coordinate_check(
    make_model: Callable[[int], tuple[nn.Module | Parametrization, Any]],
    make_batch: Callable[[int], Any],
    widths: Sequence[int],
    *,
    train_step: Callable[[nn.Module, Any, Any], Any] | None = None,
    steps: int = 10,
    seeds: int = 3,
) -> CoordinateCheck:
    r"""Measure how the outputs of all layers, and their changes, grow with the width in the first training steps.

    With a correct parametrization they do not: slopes of log value over log width are 0. For a layer f with output
    :math:`f_t(x_t)` after t updates,

    ================  ==============================================================================================
    quantity          root mean square, over a batch, of
    ================  ==============================================================================================
    "activation"      :math:`f_t(x_t)`
    "change"          :math:`f_t(x_t) - f_0(x_0)`
    "weight_update"   :math:`f_t(x_t) - f_0(x_t)`, the change by the layer's own weights (arXiv:2505.22491)
    "input_drift"     :math:`f_0(x_t) - f_0(x_0)`, the change by the layers before it
    ================  ==============================================================================================

    where :math:`x_0` is the input for the same batch, with the same dropout masks, in the initial model. Layers are all
    modules with parameters of their own. Of a :class:`Parametrization` the result has the expected slopes, too. Models
    of one seed differ in width alone, and so do batches of one seed and step. RNG state is restored.

    Args:
        make_model: makes, for a width, the model or its :class:`Parametrization`, and the optimizer.
        make_batch: makes, for a width, a batch (x, y); called in every step.
        widths: the widths, at least two.
        train_step: takes the model, the optimizer and a batch, and makes one update; None for the cross-entropy of the
            model's output for x, with classes in the last dimension, and y.
        steps: number of updates.
        seeds: number of training runs at every width.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument is invalid, or the train step runs no forward pass of the model.

    Examples:
        .. code-block:: python

            def make_model(width):
                parametrization = parametrize(make_mlp, (32, width), sample_input=torch.zeros(1, 64))
                return parametrization, torch.optim.Adam(parametrization.param_groups)


            result = coordinate_check(make_model, lambda width: (x, y), [64, 128, 256, 512])
            print(result.table())
            result.plot("coordinates.png")
    """
    if not isinstance(widths, Sequence) or isinstance(widths, str):
        raise TypeError(f"Argument widths should be a list of widths, but given {type(widths)}")
    if len({check_count("widths", width, least=1) for width in widths}) < max(len(widths), 2):
        raise ValueError(f"Argument widths should have at least two different widths, each once, but given {widths}")
    steps = check_count("steps", steps, least=1)
    seeds = check_count("seeds", seeds, least=1)
    for name, function in (("make_model", make_model), ("make_batch", make_batch)):
        check_function(name, function, "width", described="a function of the width", optional=False)
    check_function("train_step", train_step, "model", "optimizer", "batch")
    records: list[Record] = []
    expected: dict[tuple[str, str], float] = {}
    sizes: dict[int, int] = {}
    with preserved_rng_state(cuda_devices()):
        for width, seed in itertools.product(widths, range(seeds)):
            _seed(seed, 0)
            made = make_model(width)
            model, optimizer = made if isinstance(made, (tuple, list)) and len(made) == 2 else (made, None)
            if isinstance(model, Parametrization):
                expected, model = expected_slopes(model), model.model
            if not isinstance(model, nn.Module) or optimizer is None:
                raise TypeError(f"Argument make_model should return a model and an optimizer, but returns {type(made)}")
            sizes[width] = sum(parameter.numel() for parameter in model.parameters())
            if len(set(sizes.values())) < len(sizes):
                raise ValueError(f"Argument make_model makes models of {sizes[width]} parameters at several widths")
            # A generator that the model holds may be shared with other code.
            with preserved_rng_state([], generators_of(model).values()):
                training = _train(model, optimizer, make_batch, train_step or _cross_entropy_step, width, seed)
                for step, values in enumerate(itertools.islice(training, steps + 1)):
                    for layer, measured in values.items():
                        pairs = zip(QUANTITIES, measured, strict=True)
                        records += [Record(width, seed, step, layer, quantity, value) for quantity, value in pairs]
    return CoordinateCheck(records, expected)


def expected_slopes(parametrization: Parametrization) -> dict[tuple[str, str], float]:
    """Return the slopes of layers and quantities after the first update, by the exponents of a parametrization."""
    solution = parametrization.solution
    slopes: dict[tuple[str, str], float] = {}
    for layer in parametrization.layers.values():
        if layer.module is None:
            continue
        node = parametrization.graph[layer.name]
        alpha, omega, u = clipped_alignment(node, parametrization.alignment)
        reached = min((solution.r[source] for source in node.inputs), default=math.inf)
        start = (0.0 if node.kind == "embedding" else 0.5) - node.a - node.b
        change, update = -solution.r[node.name], max(alpha, u - reached) - node.a - solution.c[node.layer]
        values = max(start, change), change, update, omega - node.a - node.b - reached
        pairs = zip(QUANTITIES, values, strict=True)
        slopes |= {(node.name, quantity): value + 0.0 for quantity, value in pairs if math.isfinite(value)}
    return slopes


def _train(model: nn.Module, optimizer: Any, make_batch: Any, train_step: Any, width: int, seed: int) -> Iterator[Any]:
    """Yield the quantities of all layers in each step."""
    reference = Reference(model, "init")
    layers = [name for name, module in reference.modules.items() if is_layer(name, module)]
    outputs = _OutputChanges(reference)
    passes = ReferencePasses(reference, layers, outputs, _logger.warning)
    for step in itertools.count(1):
        _seed(seed, step)
        batch = make_batch(width)
        outputs.clear()
        with eager(), passes.watched():
            train_step(model, optimizer, batch)
        values = outputs.values(passes.incomplete)
        if not values:
            raise ValueError(
                "Argument train_step should run the whole model in training mode, but made no such forward pass"
            )
        yield values


def _cross_entropy_step(model: nn.Module, optimizer: Any, batch: Any) -> None:
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    optimizer.zero_grad()
    output = model(batch[0]) if is_pair else None
    if not isinstance(output, Tensor) or output.ndim < 2:
        raise TypeError(
            "Without train_step, make_batch should return x and y, and the model a tensor with classes in the last of "
            f"two or more dimensions, but they return {type(batch)} and {type(output)}"
        )
    F.cross_entropy(output.flatten(0, -2), batch[1].flatten()).backward()
    optimizer.step()


def _seed(seed: int, step: int) -> None:
    number = 1_000_003 * seed + step
    torch.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(number % 2**32)


class _OutputChanges(Comparison):
    """Measures the outputs of a model's layers."""

    def __init__(self, reference: Reference) -> None:
        self._run = reference.run
        self._mean_squares: dict[str, list[Tensor]] = {}

    def clear(self) -> None:
        self._mean_squares = {}

    def keep(self, call: Call) -> Sequence[Tensor | None]:
        return [_first(call.output)]

    def enter(self, call: Call) -> Tensor | None:
        # The whole model has the same inputs as the reference.
        return _first(self._run(call.name, call.args, call.kwargs)) if call.name else call.kept[0]

    def leave(self, call: Call) -> Tensor:
        outputs = [_first(call.output), call.entered, call.kept[0]]
        if not all(output is not None and is_plain(output) and output.shape == outputs[0].shape for output in outputs):
            raise NotComparableError("its outputs are not dense floating-point tensors of one shape")
        now, crossed, then = (output.detach().to(wide_dtype(output.device)) for output in outputs)
        return torch.stack([part.square().mean() for part in (now, now - then, now - crossed, crossed - then)])

    def passed(self, results: dict[str, list[Any]]) -> None:
        for name, calls in results.items():
            self._mean_squares.setdefault(name, []).extend(calls)

    def values(self, incomplete: Collection[str]) -> dict[str, list[float]]:
        """Return the root mean squares of each layer, in the order of the quantities."""
        complete = {name: calls for name, calls in self._mean_squares.items() if name not in incomplete}
        means = [torch.stack(calls).mean(0) for calls in complete.values()]
        return dict(zip(complete, torch.stack(means).sqrt().tolist() if means else [], strict=True))


def _first(output: Any) -> Tensor | None:
    return next((tensor for _, tensor in floating_tensors(output)), None)

"""The coordinate check: outputs of layers, and their changes, over the width."""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor.checks import check_count, check_function, check_type
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.forward import after_forward
from ignite_monitor.model.isolation import preserved_rng_state
from ignite_monitor.model.linear_maps import feature_dim
from ignite_monitor.model.names import is_layer, named_modules, tags
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.rcc.handler import RCCHandler
from ignite_monitor.scaling.coordinate_result import QUANTITIES, CoordinateCheck, Record
from ignite_monitor.scaling.parametrization import Parametrization
from ignite_monitor.scaling.solver import FULL, Alignment, clipped


def coordinate_check(
    make_model: Callable[[int], tuple[nn.Module | Parametrization, Any]],
    make_batch: Callable[[int], Any],
    widths: list[int],
    *,
    train_step: Callable[[nn.Module, Any, Any], Any] | None = None,
    steps: int = 10,
    seeds: int = 3,
) -> CoordinateCheck:
    r"""Measure how the outputs of all layers, and their changes, grow with the width in the first training steps.

    With a correct parametrization they do not: slopes of log value over log width are 0. All modules with parameters of
    their own are measured. "activation" is the root mean square of the output. The others are root mean squares over
    features of what :class:`~ignite_monitor.RCCHandler` measures (arXiv:2505.22491): "output_change", "weight_update"
    (the change by the layer's own weights) and "input_drift" (the change by the layers before it).

    Of a :class:`Parametrization` the result has the expected slopes, too. All widths have the same seeds. RNG state is
    restored, except that of dropout in recurrent layers on cuDNN: they have "activation" only.

    Args:
        make_model: makes, for a width, the model or its :class:`Parametrization`, and the optimizer.
        make_batch: makes, for a width, a batch (x, y); called in every step.
        widths: the widths, at least two.
        train_step: takes the model, the optimizer and a batch, and makes one update; None for the cross-entropy of the
            model's output for x, with classes in the last dimension, and y.
        steps: number of updates.
        seeds: number of training runs at every width.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is invalid, or the train step runs no forward pass of the model.
    """
    check_type("widths", widths, list, "a list of widths")
    if len({check_count("widths", width, least=1) for width in widths}) < max(len(widths), 2):
        raise ValueError(f"Argument widths should have at least two different widths, each once, but given {widths}")
    steps = check_count("steps", steps, least=1)
    seeds = check_count("seeds", seeds, least=1)
    check_function("make_model", make_model, "width", optional=False)
    check_function("make_batch", make_batch, "width", optional=False)
    check_function("train_step", train_step, "model", "optimizer", "batch")
    records: list[Record] = []
    expected: dict[tuple[str, str], tuple[float, float]] = {}
    with preserved_rng_state():
        for width, seed in itertools.product(widths, range(seeds)):
            _seed(seed, 0)
            made: Any = make_model(width)
            check_type("make_model", made, tuple, "a function that returns a tuple of a model and an optimizer")
            model, optimizer = made
            multipliers: dict[str, float] = {}
            if isinstance(model, Parametrization):
                expected = expected_slopes(model)
                multipliers = {layer.module: layer.multiplier for layer in model.layers.values() if layer.module}
                model = model.model
            step = functools.partial(train_step or _cross_entropy_step, model, optimizer)
            records += _train(model, multipliers, step, make_batch, width, seed, steps)
    return CoordinateCheck(records, expected)


def expected_slopes(parametrization: Parametrization) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the ranges of slopes of modules and quantities in the first updates, by a parametrization's exponents.

    Weights: each of fan-in n changes by n^-(a + c + g) in the direction of the batch's inputs. Along one of K
    independent inputs that adds up to n, along all others to (K n)^1/2: alpha and u rise from 1/2 to 1 where n is K.
    Input: backpropagation directs its change along the weights. Of k outputs from n inputs, the root mean square then
    grows by omega = 1/2 (k = n, a spectral norm of order 1) up to 1 (k fixed: rows of norm 1 that it is aligned with).
    Start: n terms of n^-(a + b) add up to n^(1/2 - a - b), times the size of the input: below n^0 behind readouts
    inside the network, until these have learnt. A junction counts as a sum, as large as its largest input.
    """
    solution = parametrization.solution
    slopes: dict[tuple[str, str], tuple[float, float]] = {}
    sizes: dict[str, float] = {}  # of nodes at initialization, as exponents
    for name, node in parametrization.graph.items():
        size, layer = max((sizes[source] for source in node.inputs), default=0.0), node.layer
        sizes[name] = size
        if layer is None:
            continue
        start = (0.0 if layer.role == "embedding" else 0.5) - layer.a - layer.b
        sizes[name] += start
        if layer.module is None or name != layer.name:  # a repeated call has the slopes of the first
            continue
        omega = clipped(layer, FULL).omega
        reached = min((solution.r[source] for source in node.inputs), default=math.inf)
        step = layer.a + solution.c[layer.name] + solution.g[node.name]  # of the output by one element of the weight
        slow, fast = (
            max(alpha, u - reached) - step
            for alpha, _, u in (clipped(layer, Alignment(0.5, 0.5, 0.5)), clipped(layer, FULL))
        )
        drift = omega - layer.a - layer.b - reached
        aligned = 1.0 - layer.a - layer.b - reached if layer.role == "readout" or layer.has_few_outputs else drift
        # Below the faster of its terms, as long as widths are so small that the slower one counts.
        change = min(slow, drift) if node.inputs else slow, max(fast, aligned)
        values = (start, max(start, change[1])), change, (slow, fast), (drift, aligned)
        for quantity, (low, high) in zip(QUANTITIES, values, strict=True):
            if math.isfinite(low):
                slopes[layer.module, quantity] = low + min(size, 0.0), high + 0.0
    return slopes


def _train(
    model: nn.Module, multipliers: Mapping[str, float], step: Any, make_batch: Any, width: int, seed: int, steps: int
) -> list[Record]:
    """Train, and return the quantities before the first and after all updates."""

    def train_step(engine: Engine, _: Any) -> None:
        _seed(seed, engine.state.iteration)
        step(make_batch(width))

    layers = {module: name for name, module in dict(named_modules(model)).items() if is_layer(name, module)}
    handler, engine = RCCHandler(model), Engine(train_step)
    outputs: dict[str, list[tuple[int, float]]] = defaultdict(list)  # numbers of features, and mean squares
    records: list[Record] = []

    def keep_output(module: nn.Module, args: Any, output: Any) -> None:
        tensor = next((item.detach() for _, item in floating_tensors(output) if item.ndim), None)
        if tensor is not None:
            dim = feature_dim(module)
            features = tensor.shape[dim if dim >= -tensor.ndim else -1]
            outputs[layers[module]].append((features, float(tensor.to(wide_dtype(tensor.device)).square().mean())))

    def record(engine: Engine) -> None:
        if not outputs:
            raise ValueError("Argument train_step should run the model, but made no forward pass")
        changes = handler.on_host()
        for name, tag in zip(layers.values(), tags(name or "_root_" for name in layers.values()), strict=True):
            if name in outputs:
                features, squares = zip(*outputs[name], strict=True)
                values = {"activation": math.sqrt(statistics.fmean(squares))}
                for quantity in QUANTITIES:
                    if (change := changes.get(f"rcc/{quantity}/{tag}")) is not None:
                        # The handler does not know of the parametrization's forward hooks.
                        values[quantity] = float(change) * multipliers.get(name, 1.0) / math.sqrt(features[0])
                if "weight_update" in values:  # of a layer without a floating-point input it is the whole change
                    values.setdefault("output_change", values["weight_update"])
                records.extend(Record(width, seed, engine.state.iteration - 1, name, *item) for item in values.items())
        outputs.clear()

    with after_forward(layers, keep_output), handler.attach(engine):
        engine.add_event_handler(Events.ITERATION_COMPLETED, record)
        engine.run(range(steps + 1))
    return records


def _cross_entropy_step(model: nn.Module, optimizer: Any, batch: Any) -> None:
    x, y = batch
    optimizer.zero_grad()
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    optimizer.step()


def _seed(seed: int, step: int) -> None:
    number = 1_000_003 * seed + step
    torch.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(number % 2**32)

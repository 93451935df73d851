"""The coordinate check: whether layers do the same at any width."""

from __future__ import annotations

import importlib
import itertools
import logging
import random
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.checks import check_count, check_function, check_type
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.eager import Eager
from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.names import named_modules
from ignite_monitor.model.structure import is_layer
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.rcc.terms import output_change
from ignite_monitor.reference.call import Call, Comparison, NotComparableError
from ignite_monitor.reference.passes import ReferencePasses
from ignite_monitor.reference.reference import Reference
from ignite_monitor.reference.rng import cuda_devices, generators_of, preserved_rng_state
from ignite_monitor.scaling.coordinate_result import QUANTITIES, CoordinateCheck, Record
from ignite_monitor.scaling.module import layer_name, multiplier_of

_logger = logging.getLogger(__name__)

TrainStep = Callable[[nn.Module, Any, Any], Any]


def coordinate_check(
    make_model: Callable[[int], tuple[nn.Module, Any]],
    make_batch: Callable[[int], Any],
    widths: Sequence[int],
    *,
    train_step: TrainStep | None = None,
    steps: int = 10,
    seeds: int = 3,
    quantities: Sequence[str] = QUANTITIES,
) -> CoordinateCheck:
    r"""How the outputs of all layers, and their changes, grow with the width in the first steps of a training.

    In a model that is parametrized well they don't: the slope of log value over log width is 0, and learning rates
    carry over from a small model to a large one. Of a layer f with the output :math:`f_t(x_t)` after t updates,

    ================  ==============================================================================================
    quantity          root mean square, over a batch, of
    ================  ==============================================================================================
    "activation"      :math:`f_t(x_t)`
    "change"          :math:`f_t(x_t) - f_0(x_0)`
    "weight_update"   :math:`f_t(x_t) - f_0(x_t)`, what the layer's own weights have done (arXiv:2505.22491)
    "input_drift"     :math:`f_0(x_t) - f_0(x_0)`, what the layers before it have done
    ================  ==============================================================================================

    with :math:`x_0` what the same batch, with the same dropout masks, makes in the model as it was at first. Layers are
    all modules with parameters of their own; multipliers count with the layer, and a ParametrizedModule has its own
    name. With muP a readout's output starts as :math:`n^{1/2 - a - b} = n^{-1/2}`; of a parametrized model the result
    knows that, and says so instead of naming it among those that depend on the width. So it does with weight updates
    that are aligned with their inputs by less than was supposed, and with LoRA's pairs, along which inputs drift.

    Random numbers are seeded: models of one seed differ in width alone, and so do batches of one seed and step. All
    generators are as before afterwards.

    Args:
        make_model: makes, for a width, the model and its optimizer.
        make_batch: makes, for a width, a batch (x, y); it is called for every step.
        widths: the widths, at least two.
        train_step: takes the model, the optimizer and a batch, and makes one update; None for that of the cross-entropy
            of the model's output for x, with classes in the last dimension, and y.
        steps: how many updates to make.
        seeds: how many trainings to make at every width.
        quantities: what to measure.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, or the train step runs no forward pass of the model.

    Examples:
        .. code-block:: python

            def make_model(width):
                parametrization = parametrize(make_mlp, (32, width), sample_input=torch.zeros(1, 64))
                return parametrization.model, torch.optim.Adam(parametrization.param_groups)


            result = coordinate_check(make_model, lambda width: (x, y), [64, 128, 256, 512])
            print(result.table(), result.summary(), sep="\n\n")
            result.plot("coordinates.png")
    """
    widths = _check_widths(widths)
    steps = check_count("steps", steps, least=1)
    seeds = check_count("seeds", seeds, least=1)
    if isinstance(quantities, str) or not quantities or not set(quantities) <= set(QUANTITIES):
        raise ValueError(f"Argument quantities should be some of {QUANTITIES}, but given {quantities!r}")
    for name, function in (("make_model", make_model), ("make_batch", make_batch)):
        check_function(name, function, "width", described="a function of the width", optional=False)
    check_function("train_step", train_step, "model", "optimizer", "batch")
    records: list[Record] = []
    starts: dict[str, float] = {}
    rates: dict[str, float] = {}
    drifts: dict[str, float] = {}
    sizes: dict[int, int] = {}
    with preserved_rng_state(cuda_devices()), _progress(len(widths) * seeds * (steps + 1)) as advance:
        for width, seed in itertools.product(widths, range(seeds)):
            _seed(seed, 0)
            model, optimizer = _made(make_model, width)
            for name, module in named_modules(model):
                hook = multiplier_of(module)
                if hook is not None:
                    rates[name], drifts[name] = hook.rate, hook.drift
                    if hook.start < 0:  # and so starts what it is in
                        parts = name.split(".")
                        starts |= {".".join(parts[:count]): hook.start for count in range(len(parts) + 1)}
            sizes[width] = sum(parameter.numel() for parameter in model.parameters())
            if len(set(sizes.values())) < len(sizes):
                raise ValueError(
                    "Argument make_model should make models that grow with the width, but makes one with "
                    f"{sizes[width]} parameters at several widths"
                )
            training = _train(model, optimizer, make_batch, train_step or _cross_entropy_step, width, seed)
            # A generator that the model holds may be the user's, and other models' too.
            held = [each for module in model.modules() for each in generators_of(module).values()]
            with preserved_rng_state([], held):
                for step, values in zip(range(steps + 1), training, strict=False):
                    records += [
                        Record(width, seed, step, layer, quantity, measured[QUANTITIES.index(quantity)])
                        for layer, measured in values.items()
                        for quantity in dict.fromkeys(quantities)
                    ]
                    advance()
    return CoordinateCheck(records, starts, rates, drifts)


def _made(make_model: Callable[[int], tuple[nn.Module, Any]], width: int) -> tuple[nn.Module, Any]:
    made = make_model(width)
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise TypeError(f"Argument make_model should give a model and an optimizer, but gives {type(made)}")
    model, optimizer = made
    check_type("make_model", model, nn.Module, "a function that gives a torch.nn.Module and an optimizer")
    return model, optimizer


def _train(
    model: nn.Module, optimizer: Any, make_batch: Callable[[int], Any], train_step: TrainStep, width: int, seed: int
) -> Iterator[dict[str, list[float]]]:
    """What the layers' outputs are like in each step.

    Raises:
        ValueError: if the train step runs no forward pass of the model.
    """
    reference = Reference(model, "init")
    modules = reference.modules
    layers = {layer_name(modules, name): None for name, module in modules.items() if is_layer(name, module)}
    outputs = OutputChanges(reference)
    passes = ReferencePasses(reference, layers, outputs, _logger.warning)
    step = 0
    while True:
        step += 1
        _seed(seed, step)
        batch = make_batch(width)
        outputs.clear()
        with ExitStack() as stack:
            stack.enter_context(Eager())
            stack.enter_context(passes.watched())
            train_step(model, optimizer, batch)
        values = outputs.values(passes.incomplete)
        if not values:
            raise ValueError(
                "Argument train_step should run the whole model in training mode, but nothing was seen of it"
            )
        yield values


def _cross_entropy_step(model: nn.Module, optimizer: Any, batch: Any) -> None:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        given = len(batch) if isinstance(batch, (tuple, list)) else type(batch)
        raise TypeError(
            f"Argument make_batch should give x and y, but gives {given}: for another batch, give a train_step"
        )
    x, y = batch
    optimizer.zero_grad()
    output = model(x)
    if not isinstance(output, Tensor) or output.ndim < 2:
        raise TypeError(
            "The model's output for x should be a tensor of two or more dimensions, with classes in the last, but is "
            f"{type(output)}: for another model, give a train_step"
        )
    F.cross_entropy(output.flatten(0, -2), y.flatten()).backward()
    optimizer.step()


def _seed(seed: int, step: int) -> None:
    number = 1_000_003 * seed + step
    torch.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(number % 2**32)


def _check_widths(widths: object) -> list[int]:
    if not isinstance(widths, Sequence) or isinstance(widths, str):
        raise TypeError(f"Argument widths should be a list of widths, but given {type(widths)}")
    checked = [check_count("widths", width, least=1) for width in widths]
    if len(set(checked)) < max(len(checked), 2):
        raise ValueError(f"Argument widths should have at least two different widths, each once, but given {widths}")
    return checked


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], Any]]:
    """A progress bar, where tqdm is installed and somebody is looking."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, desc="Coordinate check", unit="step", disable=None, leave=False) as bar:
        yield bar.update


class OutputChanges(Comparison):
    """Measures the outputs of a model's layers, multipliers included."""

    def __init__(self, reference: Reference) -> None:
        self._run = reference.run
        self._mean_squares: dict[str, list[Tensor]] = {}

    def clear(self) -> None:
        self._mean_squares = {}

    def keep(self, call: Call) -> Sequence[Tensor | None]:
        return [_first(call.output)]

    def enter(self, call: Call) -> Tensor | None:
        """What the reference's layer makes of the inputs that the model's is about to get."""
        # The inputs of the whole model are those of the reference.
        return _first(self._run(call.name, call.args, call.kwargs)) if call.name else call.kept[0]

    def leave(self, call: Call) -> Tensor:
        """Mean squares of the call, one for each of :data:`QUANTITIES`.

        Raises:
            NotComparableError: if there is no output to measure.
        """
        outputs = [_first(call.output), call.entered, call.kept[0]]
        if any(each is None or not is_plain(each) for each in outputs) or len({each.shape for each in outputs}) > 1:
            raise NotComparableError("its outputs are no dense floating-point tensors of one shape")
        now, crossed, then = (each.detach().to(wide_dtype(each.device)) for each in outputs)
        change = output_change(now, crossed, then)
        parts = now, now - then, change.weight_update, change.input_drift
        return torch.stack([each.square().mean() for each in parts])

    def passed(self, results: dict[str, list[Any]]) -> None:
        for name, calls in results.items():
            self._mean_squares.setdefault(name, []).extend(calls)

    def values(self, incomplete: Collection[str]) -> dict[str, list[float]]:
        """The root mean squares of each layer, in the order of :data:`QUANTITIES`."""
        complete = {name: calls for name, calls in self._mean_squares.items() if name not in incomplete}
        means = [torch.stack(calls).mean(0) for calls in complete.values()]
        return dict(zip(complete, torch.stack(means).sqrt().tolist() if means else [], strict=True))


def _first(output: Any) -> Tensor | None:
    return next((tensor for _, tensor in floating_tensors(output)), None)


def check_target(target: str, widths: Sequence[int], steps: int, seeds: int) -> CoordinateCheck:
    """A coordinate check of what a user's function makes.

    Args:
        target: ``MODULE:FACTORY``, where MODULE is the name of a module or the path of a Python file, and FACTORY,
            called without arguments, returns ``(make_model, make_batch)`` or these and ``train_step``.

    Raises:
        ValueError: if the target is no such thing, or raises an error.
    """
    try:
        made = _factory(target)()
    except ValueError:
        raise
    except Exception as error:  # the user's own code
        raise ValueError(f"{target}: {type(error).__name__}: {error}") from error
    if not isinstance(made, Sequence) or not 2 <= len(made) <= 3:
        raise ValueError(f"{target} should return make_model and make_batch, or these and train_step, but gives {made}")
    options: dict[str, Any] = dict(zip(("make_model", "make_batch", "train_step"), made, strict=False))
    try:
        return coordinate_check(**options, widths=widths, steps=steps, seeds=seeds)
    except Exception as error:  # likewise
        raise ValueError(f"{target}: {type(error).__name__}: {error}") from error


def _factory(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ValueError(f"{target!r} should be MODULE:FACTORY")
    try:
        if not place.endswith(".py") and not {"", str(Path.cwd())} & {*sys.path}:
            sys.path.insert(0, str(Path.cwd()))
        found = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
    except Exception as error:
        raise ValueError(f"{place} can't be imported: {type(error).__name__}: {error}") from error
    if not callable(found.get(name)):
        raise ValueError(f"{place} has no function {name}")
    return found[name]

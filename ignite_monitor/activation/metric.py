"""Metrics of tensors: the user's own functions, and the choice of built-in ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.activation.statistics import STATISTICS
from ignite_monitor.checks import check_choice
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.names import Pattern, Selection

AGGREGATES = ("mean", "sum", "max", "min")
RATIO = "ratio"  # of two sums


class Aggregation(NamedTuple):
    """Aggregation of a metric's values over passes and ranks."""

    partial: Callable[[Tensor, Tensor], Tensor]  # function of values and weights, one per row, that returns rows
    summed: int  # number of columns that are summed; of the others the maximum is taken
    finish: Callable[[Tensor], Tensor]  # function of the sums or maxima of rows


def _with_weights(values: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([values, weights], 1)


AGGREGATIONS = {
    "mean": Aggregation(lambda v, w: _with_weights(v * w, w), 2, lambda rows: rows[:, 0] / rows[:, 1]),
    "sum": Aggregation(_with_weights, 2, lambda rows: torch.where(rows[:, 1] > 0, rows[:, 0], math.nan)),
    "max": Aggregation(lambda v, w: v, 0, lambda rows: rows[:, 0]),
    "min": Aggregation(lambda v, w: -v, 0, lambda rows: -rows[:, 0]),
    RATIO: Aggregation(lambda v, w: v, 2, lambda rows: rows[:, 0] / rows[:, 1]),
}


class Metric:
    """A function of a tensor, with the modules it applies to and the aggregation of its values.

    Args:
        fn: is called with a detached tensor, without recording gradients. Returns a number, or a tensor whose mean is
            taken. Must not change its argument; is not called for tensors without elements.
        include: a regular expression; only modules or parameters with a match in their names. None for all.
        exclude: a regular expression; modules or parameters with a match in their names are excluded.
        aggregate: aggregation over an iteration's passes and micro-batches: ``"mean"``, weighted by the tensors'
            numbers of elements, ``"sum"``, ``"max"`` or ``"min"``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a pattern is not a regular expression, or there is no such aggregation.

    Examples:
        .. code-block:: python

            Metric(lambda x: (x.abs() > 6).float(), include=r"mlp", aggregate="max")
    """

    def __init__(
        self,
        fn: Callable[..., float | Tensor],
        include: Pattern = None,
        exclude: Pattern = None,
        aggregate: str = "mean",
    ) -> None:
        if not callable(fn):
            raise TypeError(f"Argument fn should be callable, but given {type(fn)}")
        check_choice("aggregate", aggregate, *AGGREGATES)
        self.fn, self.aggregate = fn, aggregate
        self._selection = Selection(include, exclude)

    def __contains__(self, name: str) -> bool:
        return name in self._selection


class MetricSet:
    """Metrics of one kind of tensor, from the handler's argument of that name."""

    def __init__(self, argument: str, given: Any) -> None:
        builtin = [name for name in STATISTICS if name != "dead_fraction" or argument == "activations"]
        if given is True:
            given = dict.fromkeys(builtin, True)
        if not isinstance(given, Mapping):
            raise TypeError(f"Argument {argument} should be a dict of functions, True or None, but given {type(given)}")
        self.builtin = [given.get(name) is True for name in STATISTICS]
        self.custom: dict[str, Metric] = {}
        for name, metric in given.items():
            if not isinstance(name, str):
                raise TypeError(f"Argument {argument} should have names of type str, but given {type(name)}")
            if not is_tag(name):
                raise ValueError(
                    f"Argument {argument} should have names of letters, digits, '-', '_', '.' and '/', "
                    f"but given {name!r}"
                )
            if metric is True and name in builtin:
                continue
            if metric is True:
                raise ValueError(f"Argument {argument} has no built-in {name!r}, but {', '.join(builtin)}")
            if callable(metric) or isinstance(metric, Metric):
                self.custom[name] = metric if isinstance(metric, Metric) else Metric(metric)
            else:
                raise TypeError(
                    f"Argument {argument} should hold functions, Metric or True, but given {type(metric)} for {name!r}"
                )

    def __bool__(self) -> bool:
        return bool(self.custom) or any(self.builtin)

    def wants(self, name: str) -> bool:
        """Return True if any metric applies to a module or parameter."""
        return any(self.builtin) or bool(self.of(name))

    def of(self, name: str) -> list[tuple[str, Metric]]:
        """Return the metrics, other than the built-in ones, of a module or parameter."""
        return [(key, metric) for key, metric in self.custom.items() if name in metric]


def is_tag(name: str) -> bool:
    """Return True if loggers take a name as it is."""
    return re.fullmatch(r"[A-Za-z0-9_./-]+", name) is not None


def call_metric(metric: Metric, description: str, tensor: Tensor) -> Tensor:
    """Return the value of a metric, 0-dim and of the device's widest dtype."""
    try:
        with torch.no_grad():
            return as_number(metric.fn(tensor), tensor.device)
    except Exception as error:
        shape = tuple(tensor.shape)
        raise RuntimeError(f"{description}, given a tensor of shape {shape}, failed: {error}") from error


def as_number(value: Any, device: torch.device) -> Tensor:
    """Convert a number, or the mean of a tensor, to a 0-dim tensor of the widest dtype."""
    if isinstance(value, Tensor) and not value.is_complex():
        return value.detach().mean(dtype=wide_dtype(value.device))
    if isinstance(value, Real):
        return torch.full((), float(value), dtype=wide_dtype(device), device=device)
    kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value)
    raise TypeError(f"A real number or a tensor of real numbers is needed, but given {kind}")

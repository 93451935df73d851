"""What to measure of which tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from ignite_monitor.activation.statistics import STATISTICS
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.names import Pattern, Selection
from ignite_monitor.reference.call import FailedFunctionError

AGGREGATES = ("mean", "sum", "max", "min", "last")

Aggregate = str | Callable[[Tensor], float | Tensor]


class Metric:
    """A function of a tensor, with what it is for and how its numbers are put together.

    Args:
        fn: is given a detached tensor, or two where it is of a difference, and returns a number, or a tensor whose
            mean counts. It is called without gradients, and must not change what it is given.
        include: a regular expression; only modules or parameters in whose name it is found are measured. None for all
            that the handler looks at.
        exclude: a regular expression; those in whose name it is found are not measured.
        aggregate: how the numbers of an iteration's passes and micro-batches make one: ``"mean"``, weighted by the
            tensors' numbers of elements, ``"sum"``, ``"max"``, ``"min"``, ``"last"``, or a function of a tensor that
            holds them all. None for what the handler does.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a pattern is no regular expression, or there is no such way to aggregate.

    Examples:
        .. code-block:: python

            Metric(lambda x: (x.abs() > 6).float(), include=r"mlp", aggregate="max")
    """

    def __init__(
        self,
        fn: Callable[..., float | Tensor],
        include: Pattern = None,
        exclude: Pattern = None,
        aggregate: Aggregate | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"Argument fn should be callable, but given {type(fn)}")
        self.fn = fn
        self.include = include
        self.exclude = exclude
        self.aggregate = None if aggregate is None else check_aggregate(aggregate)
        self._selection = Selection(include, exclude)

    def __contains__(self, name: str) -> bool:
        return name in self._selection


def check_aggregate(aggregate: Any) -> Aggregate:
    """The argument, if it is a way to aggregate.

    Raises:
        TypeError: if it is neither a string nor callable.
        ValueError: if it is another string.
    """
    if not isinstance(aggregate, str) and not callable(aggregate):
        raise TypeError(f"Argument aggregate should be a str or callable, but given {type(aggregate)}")
    if isinstance(aggregate, str) and aggregate not in AGGREGATES:
        raise ValueError(f"Argument aggregate should be one of {AGGREGATES} or callable, but given {aggregate!r}")
    checked: Aggregate = aggregate
    return checked


def underflow_fraction(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Which part of the elements, other than 0, becomes 0 in a dtype."""
    tensor, rounded = _computable(tensor), _computable(tensor.to(dtype))
    return ((tensor != 0) & (rounded == 0)).to(wide_dtype(tensor.device)).mean()


def overflow_fraction(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Which part of the elements is finite, but rounds to more than the largest number of a dtype."""
    tensor, info = _computable(tensor), torch.finfo(dtype)
    # Conversion to float8 saturates in some versions of torch, and in others does not.
    step = info.eps * 2.0 ** math.floor(math.log2(info.max))
    beyond = tensor.abs() >= info.max + step / 2
    return (beyond & tensor.isfinite()).to(wide_dtype(tensor.device)).mean()


def _computable(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype that is not for storing alone."""
    return tensor.float() if tensor.itemsize == 1 else tensor


_OF_DTYPES = {"underflow_fraction": underflow_fraction, "overflow_fraction": overflow_fraction}


class MetricSet:
    """The metrics of one kind of tensor.

    Args:
        given: name -> function, :class:`Metric`, or True for the built-in one of that name; True for the built-in set.
        aggregate: how numbers are put together where a metric doesn't say.
        of_dtypes: whether there are the built-in ones that a dtype may be given for.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a name can't be one, or a dtype is no floating-point one.
    """

    def __init__(
        self, argument: str, given: Any, builtin: tuple[str, ...], aggregate: Aggregate, of_dtypes: bool = False
    ) -> None:
        if given is True:
            given = dict.fromkeys(builtin, True)
        if not isinstance(given, Mapping):
            raise TypeError(f"Argument {argument} should be a dict of functions, True or None, but given {type(given)}")
        self.argument = argument
        self.builtin = [False] * len(STATISTICS)
        self.own: dict[str, Metric] = {}
        self.aggregate = aggregate
        for name, metric in given.items():
            if not isinstance(name, str):
                raise TypeError(f"Argument {argument} should have names of type str, but given {type(name)}")
            if not name or set(name) - _TAG:
                raise ValueError(
                    f"Argument {argument} should have names of letters, digits, '-', '_', '.' and '/', "
                    f"but given {name!r}"
                )
            if name in _OF_DTYPES and (metric is True or isinstance(metric, torch.dtype)):
                if not of_dtypes:
                    raise ValueError(f"Argument {argument} has no built-in {name!r}, but {', '.join(builtin)}")
                dtype = torch.float16 if metric is True else metric
                if not dtype.is_floating_point:
                    raise ValueError(
                        f"Argument {argument} should have a floating-point dtype for {name!r}, but {dtype}"
                    )
                self.own[name] = Metric(functools.partial(_OF_DTYPES[name], dtype=dtype), aggregate="mean")
            elif metric is True:
                if name not in builtin:
                    raise ValueError(f"Argument {argument} has no built-in {name!r}, but {', '.join(builtin)}")
                self.builtin[STATISTICS.index(name)] = True
            elif isinstance(metric, Metric):
                self.own[name] = metric
            elif callable(metric):
                self.own[name] = Metric(metric)
            else:
                raise TypeError(
                    f"Argument {argument} should hold functions, Metric or True, but given {type(metric)} for {name!r}"
                )

    def __bool__(self) -> bool:
        return bool(self.own) or any(self.builtin)

    @property
    def gathers(self) -> bool:
        """Whether numbers are put together by a function of the user's, which needs all of them."""
        return callable(self.aggregate) or any(callable(metric.aggregate) for metric in self.own.values())

    def function_of(self, name: str | None) -> Callable[[Tensor], float | Tensor]:
        """The function of the user's that puts the numbers of a metric together, or what is no metric's."""
        own = None if name is None else self.own[name].aggregate
        return cast("Callable[[Tensor], float | Tensor]", own or self.aggregate)

    def of(self, name: str) -> list[tuple[str, Metric]]:
        """The user's own metrics for a module or parameter."""
        return [(key, metric) for key, metric in self.own.items() if name in metric]


_TAG = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./")


def call_metric(metric: Metric, what: str, tensors: tuple[Tensor, ...]) -> Tensor:
    """The number that a metric gives of a tensor, 0-dim and of the device's widest dtype.

    Raises:
        FailedFunctionError: if the function raises an error, which is its cause, or returns something else.
    """
    try:
        with torch.no_grad():
            return as_number(metric.fn(*tensors), tensors[0].device)
    except Exception as error:
        shape = tuple(tensors[0].shape)
        raise FailedFunctionError(f"{what}, given a tensor of shape {shape}, failed: {error}") from error


def as_number(value: Any, device: torch.device) -> Tensor:
    """A number, or the mean of a tensor, as a 0-dim tensor of the widest dtype.

    Raises:
        TypeError: if it is neither.
    """
    wide = wide_dtype(device)
    if isinstance(value, Tensor) and not value.is_complex():
        return value.detach().mean(dtype=wide_dtype(value.device))
    if isinstance(value, Real):
        return torch.full((), float(value), dtype=wide, device=device)
    kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value)
    raise TypeError(f"A real number or a tensor of real numbers is needed, but given {kind}")

"""Threshold rules: the largest value that is no spike, estimated from earlier values."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from ignite_monitor.checks import check_count, check_real
from ignite_monitor.model._torch import foreach_add, foreach_addcdiv, foreach_mul
from ignite_monitor.model.devices import move_like

State = dict[str, Tensor]

NEGLIGIBLE = 1e-6
"""A standard deviation below this times the mean is rounding: in float32 norms have a relative error of about 1e-7."""


class ThresholdRule:
    r"""Base class of threshold rules: running moments, warm-up, and a state for checkpoints.

    A subclass overrides :meth:`__call__`; one that needs more than the moments also extends :meth:`empty` and
    :meth:`include`. The state is a dictionary of tensors on the device of the values, and nothing reads it on the host.
    If all of them are 0-dim, the rule can also follow many values side by side, each with its own statistics; tensors
    that are 0-dim below then have their shape.

    The moments weigh the i-th of n values by :math:`w_i = d^{\,n-i}` with the decay d (Welford 1962, in the weighted
    form of D. H. D. West, "Updating mean and variance estimates: an improved method", CACM 22(9), 1979).

    Args:
        warmup: number of values before the first threshold.
        decay: factor of all earlier weights at every new value, in (0, 1); None gives all values the same weight.

    Attributes:
        state: ``count`` n, ``weight`` :math:`\sum w_i`, ``weight_squared`` :math:`\sum w_i^2`, ``mean`` :math:`\mu`,
            ``spread`` :math:`\sum w_i (x_i - \mu)^2`, and what a subclass adds.

    Raises:
        TypeError: if an argument is not a number of the required kind.
        ValueError: if an argument is out of range.

    Examples:
        .. code-block:: python

            class TwiceTheMean(ThresholdRule):
                def __call__(self, mean, std, count):
                    return 2 * mean

            GradMonitor(model, optimizer, threshold=TwiceTheMean(warmup=50))
    """

    _MOMENTS = ("count", "weight", "weight_squared", "mean", "spread")
    _gives_infinity = True

    def __init__(self, *, warmup: int = 20, decay: float | None = None) -> None:
        self.warmup = check_count("warmup", warmup)
        self.decay = 1.0 if decay is None else check_real("decay", decay, above=0.0, below=1.0)
        self.state = self._initial = {name: value.to(torch.float64) for name, value in self.empty().items()}

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor | float:
        """Compute the largest value that is no spike; NaN or inf for no threshold.

        Args:
            mean: weighted mean of the earlier values, 0-dim.
            std: their weighted sample standard deviation, 0-dim; NaN before the second.
            count: their number, 0-dim.

        Raises:
            NotImplementedError: if a subclass does not override it.
        """
        raise NotImplementedError

    def empty(self) -> State:
        """Create the state before the first value: name -> float64 tensor of any shape on the CPU."""
        return dict(zip(self._MOMENTS, torch.zeros(len(self._MOMENTS), dtype=torch.float64).unbind(), strict=True))

    def include(self, state: State, value: Tensor) -> State:
        """Return the state after one more value, as new tensors of the same shapes.

        Args:
            state: the state before the value.
            value: the value, 0-dim.
        """
        weight, squared, spread = state["weight"], state["weight_squared"], state["spread"]
        if self.decay != 1.0:
            weight, squared, spread = foreach_mul((weight, squared, spread), (self.decay, self.decay**2, self.decay))
        count, weight, squared = foreach_add((state["count"], weight, squared), 1.0)
        delta = value - state["mean"]
        mean = torch.addcdiv(state["mean"], delta, weight)
        spread = torch.addcmul(spread, delta, value - mean)
        return dict(zip(self._MOMENTS, (count, weight, squared, mean, spread), strict=True))

    def entry(self, limit: Tensor) -> Tensor:
        """Return the value that updates the statistics in place of a spike: the limit.

        Args:
            limit: the threshold that the spike exceeded, 0-dim.
        """
        return limit

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return threshold, mean and sample standard deviation, 0-dim.

        The threshold is NaN if there is none, the mean before the first value, the deviation before the second.
        """
        state = self.state
        # 0 / 0 before the first value; the divisor is n - 1 for equal weights.
        freedom, mean = foreach_addcdiv(
            (state["weight"], state["mean"]),
            (state["weight_squared"], state["mean"]),
            (state["weight"], state["weight"]),
            (-1.0, 0.0),
        )
        std = (state["spread"] / freedom).sqrt()
        limit = self(state["mean"], std, state["count"])
        limit = limit.to(mean) if isinstance(limit, Tensor) else torch.full_like(mean, float(limit))
        if self._gives_infinity:
            limit = limit.masked_fill(limit == math.inf, math.nan)
        return limit.masked_fill(state["count"] < self.warmup, math.nan), mean, std

    def threshold(self) -> Tensor:
        """Return the largest value that is no spike, 0-dim; inf if there is no threshold."""
        return self.statistics()[0].nan_to_num(math.inf, math.inf, -math.inf)

    def observe(self, value: Tensor, when: Tensor | None = None, reset: Tensor | None = None) -> None:
        """Update the statistics with one value, unless it is so large that its powers are not finite.

        Args:
            value: the value, 0-dim.
            when: 0-dim bool: do so only if it is True; None for True.
            reset: 0-dim bool: discard all earlier values first; None for False.
        """
        before = self.state if reset is None else _where(reset, self._initial, self.state)
        usable = value <= largest_usable(value)
        when = usable if when is None else when & usable
        after = self.include(before, value)
        self.state = after if is_true(when) else _where(when, after, before)

    def reset(self) -> None:
        """Discard all values."""
        self.state = self._initial

    def to(self, reference: Tensor) -> None:
        """Move the state to another device.

        Args:
            reference: tensor of the device and dtype, and if all of the state is 0-dim, of the shape.
        """
        scalar = not any(value.ndim for value in self.empty().values())

        def moved(state: State) -> State:
            values = {name: move_like(value, reference) for name, value in state.items()}
            return {name: value.expand(reference.shape) for name, value in values.items()} if scalar else values

        self.state, self._initial = moved(self.state), _joined(moved(self._initial))

    def state_dict(self) -> State:
        """Return the state, name -> tensor."""
        return {name: value.clone() for name, value in self.state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: the :meth:`state_dict` of a rule of the same kind.

        Raises:
            ValueError: if names or shapes differ from those of this rule.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"Argument state_dict should be a dictionary of tensors, but given {type(state_dict)}")
        given = {name: torch.as_tensor(value) for name, value in state_dict.items()}
        shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in (self.state, given)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"Argument state_dict should hold {shapes[0]} for {type(self).__name__}, but given {shapes[1]}: "
                "was it saved with another threshold rule?"
            )
        self.state = {name: move_like(given[name], value).clone() for name, value in self.state.items()}

    def __repr__(self) -> str:
        given = vars(self) | {"decay": None if self.decay == 1.0 else self.decay}
        names = [name for name in inspect.signature(type(self)).parameters if name in given]
        return f"{type(self).__name__}({', '.join(f'{name}={given[name]!r}' for name in names)})"


def largest_usable(value: Tensor) -> float:
    """The largest value whose powers are finite in its dtype."""
    return float(torch.finfo(value.dtype).max ** 0.3)


def is_true(flag: Tensor) -> bool:
    """Return True if a bool tensor is known to be True without synchronization."""
    return flag.is_cpu and not flag.ndim and torch.is_nonzero(flag)


class _Joined(State):
    """A state whose tensors are the rows of one."""

    rows: Tensor


def _joined(state: State) -> State:
    """Join the tensors of a state if they have one shape."""
    if isinstance(state, _Joined) or len({value.shape for value in state.values()}) > 1:
        return state
    return _split([*state], torch.stack([*state.values()]))


def _split(names: list[str], rows: Tensor) -> _Joined:
    state = _Joined(zip(names, rows.unbind(), strict=True))
    state.rows = rows
    return state


def _where(flag: Tensor, some: State, others: State) -> State:
    """Select each tensor of two states by a flag."""
    names = [*others]
    some, others = _joined({name: some[name] for name in names} if [*some] != names else some), _joined(others)
    if isinstance(some, _Joined) and isinstance(others, _Joined):
        return _split(names, torch.where(flag, some.rows, others.rows))
    return {name: torch.where(flag, some[name], value) for name, value in others.items()}


class MeanStdThreshold(ThresholdRule):
    r"""A value above :math:`\mu + k \sigma` is a spike.

    :math:`\mu` and :math:`\sigma` are mean and sample standard deviation of the earlier values, exponentially weighted
    with ``decay``. There is no threshold while :math:`\sigma \le 10^{-6} |\mu|`: nothing is known of the spread yet.
    ``docs/detection.md`` reports false alarms and recall.

    Args:
        k: number of standard deviations above the mean.
        warmup: number of values before the first threshold, at least 2.
        decay: factor of all earlier weights at every new value, in (0, 1); None gives all values the same weight.

    Raises:
        TypeError: if an argument is not a number of the required kind.
        ValueError: if an argument is out of range.
    """

    _gives_infinity = False

    def __init__(self, k: float = 6.0, warmup: int = 20, decay: float | None = 0.99) -> None:
        self.k = check_real("k", k, above=0.0)
        super().__init__(warmup=check_count("warmup", warmup, least=2), decay=decay)

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        return torch.add(mean, std, alpha=self.k).masked_fill(std <= NEGLIGIBLE * mean.abs(), math.nan)


class StaticThreshold(ThresholdRule):
    """A value above a fixed number is a spike, from the first one on.

    Args:
        value: the number, greater than 0.

    Raises:
        TypeError: if ``value`` is not a number.
        ValueError: if ``value`` is not greater than 0.
    """

    def __init__(self, value: float) -> None:
        self.value = check_real("value", value, above=0.0)
        super().__init__(warmup=0)

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> float:
        return self.value


class CallableThreshold(ThresholdRule):
    """A value above ``rule(mean, std, count)`` is a spike.

    The function is called from the third value on. It returns NaN or inf for no threshold. It is tried once, with
    a mean of 1, a standard deviation of 0.1 and a count of 100, when the rule is made.

    Args:
        rule: function of three 0-dim tensors that returns a number or a 0-dim tensor.

    Raises:
        TypeError: if ``rule`` is no function of three tensors that returns a number.
        ValueError: if it raises an error.
    """

    def __init__(self, rule: Callable[[Tensor, Tensor, Tensor], Tensor | float]) -> None:
        if not callable(rule) or isinstance(rule, type):
            hint = f": give an instance, {rule.__name__}(…)" if isinstance(rule, type) else ""
            raise TypeError(
                f"Argument threshold should be a threshold rule, a number or a function, but given {rule}{hint}"
            )
        super().__init__(warmup=2)
        try:
            answer = rule(*torch.tensor([1.0, 0.1, 100.0], dtype=torch.float64, device="cpu").unbind())
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                f"Argument threshold should be a function of mean, std and count, but {rule} raised {error!r}"
            ) from error
        if not (isinstance(answer, Real) or (isinstance(answer, Tensor) and answer.ndim == 0)):
            raise TypeError(
                f"Argument threshold should return a number or a 0-dim tensor, but {rule} returned {type(answer)}"
            )
        self.rule = rule

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor | float:
        return self.rule(mean, std, count)


Threshold = ThresholdRule | Callable[[Tensor, Tensor, Tensor], Tensor | float] | float | None


def as_rule(threshold: Threshold) -> ThresholdRule:
    """Make a rule of a ``threshold`` argument: a copy of a rule, one for a function or a number, the default for None.

    Raises:
        TypeError: if it is no rule, no number, and no function of three tensors that returns a number.
        ValueError: if the function raises an error, or the number is not greater than 0.
    """
    if threshold is None:
        return MeanStdThreshold()
    if isinstance(threshold, Real) and not isinstance(threshold, bool):
        return StaticThreshold(check_real("threshold", threshold, above=0.0))
    if isinstance(threshold, ThresholdRule):
        return copy.deepcopy(threshold)
    return CallableThreshold(cast(Any, threshold))

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

_MOMENTS = ("count", "weight", "mean", "spread")

NEGLIGIBLE = 1e-6
"""A standard deviation below this times the mean is rounding: in float32 norms have a relative error of about 1e-7."""


class ThresholdRule:
    r"""Base class of threshold rules: running moments, warm-up, and a state for checkpoints.

    A subclass overrides :meth:`__call__`; one that needs more than the moments also extends :meth:`empty` and
    :meth:`include`. The state is a dictionary of tensors on the device of the values, and nothing reads it on the host.
    If all of them are 0-dim, the rule can also follow many values side by side: tensors that are 0-dim below then have
    the shape of the values.

    The moments weigh the i-th of n values by :math:`w_i = d^{\,n-i}` with the decay d (Welford 1962, in the weighted
    form of D. H. D. West, "Updating mean and variance estimates: an improved method", CACM 22(9), 1979). The divisor
    of the sample variance, :math:`\sum w_i - \sum w_i^2 / \sum w_i`, equals :math:`2 (\sum w_i - 1) / (1 + d)`.

    Args:
        warmup: number of values before the first threshold.
        decay: factor of all earlier weights at every new value, in (0, 1); None gives all values the same weight.

    Attributes:
        state: ``count`` n, ``weight`` :math:`\sum w_i`, ``mean`` :math:`\mu`, ``spread``
            :math:`\frac{1 + d}{2} \sum w_i (x_i - \mu)^2`, and what a subclass adds.

    Examples:
        .. code-block:: python

            class TwiceTheMean(ThresholdRule):
                def __call__(self, mean, std, count):
                    return 2 * mean

            GradMonitor(model, optimizer, threshold=TwiceTheMean(warmup=50))
    """

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
        return {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in _MOMENTS}

    def include(self, state: State, value: Tensor) -> State:
        """Return the state after one more value, as new tensors of the same shapes.

        Args:
            state: the state before the value.
            value: the value, 0-dim.
        """
        weight, spread = state["weight"], state["spread"]
        if self.decay != 1.0:
            weight, spread = foreach_mul((weight, spread), self.decay)
        count, weight = foreach_add((state["count"], weight), 1.0)
        delta = value - state["mean"]
        mean = torch.addcdiv(state["mean"], delta, weight)
        spread = torch.addcmul(spread, delta, value - mean, value=(1.0 + self.decay) / 2.0)
        return dict(zip(_MOMENTS, (count, weight, mean, spread), strict=True))

    def entry(self, limit: Tensor) -> Tensor:
        """Return the value that updates the statistics in place of a spike: the limit.

        Args:
            limit: the threshold that the spike exceeded, 0-dim.
        """
        return limit

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return threshold, mean and sample standard deviation, 0-dim.

        The threshold is NaN during the warm-up, the mean before the first value, the deviation before the second.
        """
        weight, mean = self.state["weight"], self.state["mean"]
        # NaN before the first value, by 0 / 0.
        freedom, known_mean = foreach_addcdiv((weight, mean), (weight, mean), (weight, weight), (-1.0, 0.0))
        std = (self.state["spread"] / freedom).sqrt()
        limit = self(mean, std, self.state["count"])
        limit = limit.to(mean) if isinstance(limit, Tensor) else torch.full_like(mean, float(limit))
        return limit.masked_fill(self.state["count"] < self.warmup, math.nan), known_mean, std

    def threshold(self) -> Tensor:
        """Return the largest value that is no spike, 0-dim; inf if there is no threshold."""
        return self.statistics()[0].nan_to_num(math.inf, math.inf, -math.inf)

    def observe(self, value: Tensor, when: Tensor | None = None, reset: Tensor | None = None) -> None:
        """Update the statistics with one value.

        Args:
            value: the value, 0-dim; if it is used, its powers are finite.
            when: 0-dim bool: do so only if it is True; None for True.
            reset: 0-dim bool: discard all earlier values first; None for False.
        """
        before = self.state if reset is None else _where(reset, self._initial, self.state)
        after = self.include(before, value)
        self.state = after if when is None else _where(when, after, before)

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

        self.state, self._initial = moved(self.state), _Packed(moved(self._initial), reference)

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
        own_shapes, shapes = ({name: tuple(v.shape) for name, v in state.items()} for state in (self.state, given))
        if shapes != own_shapes:
            raise ValueError(
                f"Argument state_dict should hold {own_shapes} for {type(self).__name__}, but given {shapes}: "
                "was it saved with another threshold rule?"
            )
        self.state = {name: move_like(given[name], value).clone() for name, value in self.state.items()}

    def __repr__(self) -> str:
        given = vars(self) | {"decay": None if self.decay == 1.0 else self.decay}
        names = [name for name in inspect.signature(type(self)).parameters if name in given]
        return f"{type(self).__name__}({', '.join(f'{name}={given[name]!r}' for name in names)})"


class _Packed(State):
    """A state whose tensors are views of one, so that one operation selects all of them."""

    def __init__(self, state: State, flag: Tensor, rows: Tensor | None = None) -> None:
        parts = [value.reshape(-1, *flag.shape) for value in state.values()]
        self.rows = torch.cat(parts) if rows is None else rows
        views = self.rows.split([len(part) for part in parts])
        super().__init__({name: view.view_as(state[name]) for name, view in zip(state, views, strict=True)})


def _where(flag: Tensor, some: State, others: State) -> State:
    """Select each tensor of two states by a flag."""
    if [*some] != [*others]:
        some = {name: some[name] for name in others}
    packed, rows = (s.rows if isinstance(s, _Packed) else _Packed(s, flag).rows for s in (some, others))
    return _Packed(others, flag, torch.where(flag, packed, rows))


class MeanStdThreshold(ThresholdRule):
    r"""A value above :math:`\mu + k \sigma` is a spike.

    :math:`\mu` and :math:`\sigma` are mean and sample standard deviation of the earlier values, exponentially weighted
    with ``decay``. There is no threshold while :math:`\sigma \le 10^{-6} |\mu|`. ``docs/detection.md`` reports false
    alarms and recall.

    Args:
        k: number of standard deviations above the mean.
        warmup: number of values before the first threshold, at least 2.
        decay: factor of all earlier weights at every new value, in (0, 1); None gives all values the same weight.

    Raises:
        TypeError: if an argument is not a number of the required kind.
        ValueError: if an argument is out of range.
    """

    def __init__(self, k: float = 6.0, warmup: int = 20, decay: float | None = 0.99) -> None:
        self.k = check_real("k", k, above=0.0)
        super().__init__(warmup=check_count("warmup", warmup, least=2), decay=decay)

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        return torch.add(mean, std, alpha=self.k).masked_fill(std <= NEGLIGIBLE * mean.abs(), math.nan)


class StaticThreshold(ThresholdRule):
    """A value above a fixed number is a spike, from the first one on.

    Args:
        value: the number, greater than 0.
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
    """Make a rule of a ``threshold`` argument; rules are copied."""
    if threshold is None:
        return MeanStdThreshold()
    if isinstance(threshold, Real) and not isinstance(threshold, bool):
        return StaticThreshold(check_real("threshold", threshold, above=0.0))
    if isinstance(threshold, ThresholdRule):
        return copy.deepcopy(threshold)
    return CallableThreshold(cast(Any, threshold))

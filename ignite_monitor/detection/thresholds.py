"""Threshold rules: from the gradient norms seen so far, how large the next one may be."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ignite_monitor.checks import check_count, check_real
from ignite_monitor.model._torch import foreach_add, foreach_addcdiv, foreach_mul
from ignite_monitor.model.devices import move_like

State = dict[str, Tensor]


class Moments(NamedTuple):
    r"""Weighted mean and spread of the numbers seen so far, five tensors of one shape.

    The i-th of n numbers weighs :math:`w_i = d^{\,n-i}` with the decay :math:`d \in (0, 1]`; at
    :math:`d = 1` all weigh the same, and the formulas are Welford's (1962) in West's weighted form
    (D. H. D. West, "Updating mean and variance estimates: an improved method", CACM 22(9), 1979).

    Attributes:
        count: n, how many numbers went in.
        weight: :math:`\sum w_i`.
        weight_squared: :math:`\sum w_i^2`.
        mean: :math:`\mu = \sum w_i x_i / \sum w_i`.
        spread: :math:`\sum w_i (x_i - \mu)^2`.
    """

    count: Tensor  # type: ignore[assignment]  # in place of tuple.count
    weight: Tensor
    weight_squared: Tensor
    mean: Tensor
    spread: Tensor

    @classmethod
    def empty(cls) -> Moments:
        """The state before the first number, on the CPU."""
        return cls(*torch.zeros(len(cls._fields), dtype=torch.float64, device="cpu").unbind())

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Moments:
        """Those in a rule's state."""
        return cls(*(state[name] for name in cls._fields))

    def include(self, x: Tensor, decay: float = 1.0, delta: Tensor | None = None) -> Moments:
        """The state after one more number.

        Args:
            x: the number, a finite 0-dim tensor; or one number each for as many moments as there are.
            decay: what the weight of every earlier number is multiplied by.
            delta: x less the mean, where that is known.
        """
        count, weight, weight_squared, mean, spread = self
        if decay != 1.0:
            earlier = (weight, weight_squared, spread)
            weight, weight_squared, spread = foreach_mul(earlier, (decay, decay**2, decay))
        count, weight, weight_squared = foreach_add((count, weight, weight_squared), 1.0)
        delta = x - mean if delta is None else delta
        mean = torch.addcdiv(mean, delta, weight)
        return Moments(count, weight, weight_squared, mean, torch.addcmul(spread, delta, x - mean))

    def mean_and_std(self) -> tuple[Tensor, Tensor]:
        r"""The mean, NaN before the first number, and the sample standard deviation, NaN before the second.

        The latter is :math:`\sqrt{\sum w_i (x_i - \mu)^2 / (\sum w_i - \sum w_i^2 / \sum w_i)}`, which for equal
        weights divides by :math:`n - 1`.
        """
        _, weight, weight_squared, mean, spread = self
        # 0 / 0 where there is no number.
        freedom, mean = foreach_addcdiv((weight, mean), (weight_squared, mean), (weight, weight), (-1.0, 0.0))
        return mean, (spread / freedom).sqrt()

    @property
    def std(self) -> Tensor:
        """The sample standard deviation, see :meth:`mean_and_std`."""
        return self.mean_and_std()[1]


class ThresholdRule:
    """What every threshold rule shares: the running moments of the norms, warm-up, and a state that checkpoints.

    A rule of your own overrides :meth:`__call__`; one that remembers more than the moments also extends
    :meth:`empty` and :meth:`include`. All of a rule's state is one floating-point tensor on the norms' device, and no
    method reads it on the host, so that judging a norm never waits for the device.

    A rule whose state is numbers alone judges many values at once too, each by its own statistics: every tensor that
    is 0-dim below then has their shape.

    Args:
        warmup: how many norms go in before any is judged.
        decay: weight of the past at every new norm, in (0, 1); None weighs all norms the same.

    Raises:
        TypeError: if an argument is not a number of the kind it should be.
        ValueError: if an argument is out of its range.

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
        empty = self.empty()
        self._shapes = {name: value.shape for name, value in empty.items()}
        self.only_numbers = not any(self._shapes.values())
        self._empty = self._pack(empty)
        self._set(self._empty)

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor | float:
        """The largest norm that is no spike.

        Args:
            mean: (weighted) mean of the norms so far, 0-dim.
            std: their (weighted) sample standard deviation, 0-dim; NaN before the second.
            count: how many they are, 0-dim.

        Raises:
            NotImplementedError: if the rule does not override it.
        """
        raise NotImplementedError

    def empty(self) -> State:
        """The state before the first norm: name -> float64 tensor of any shape on the CPU."""
        return Moments.empty()._asdict()

    def include(self, state: State, norm: Tensor) -> State:
        """The state after one more norm, as new tensors of the same shapes.

        Args:
            state: the state before it.
            norm: the norm, 0-dim.
        """
        return Moments.of(state).include(norm, self.decay)._asdict()

    def entry(self, limit: Tensor) -> Tensor:
        """The most that enters the statistics of a norm above the limit: the limit.

        Args:
            limit: the largest norm that is no spike, 0-dim; inf, of which inf is to become, where a norm enters whole;
                NaN, of which NaN is to become, where it does not enter.
        """
        return limit

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a norm is judged by, 0-dim each.

        The largest norm that is no spike, inf as long as nothing is judged; the mean of the norms that went in, NaN
        before the first; their sample standard deviation, NaN before the second.
        """
        moments = self.moments
        mean, std = moments.mean_and_std()
        limit = self(moments.mean, std, moments.count)
        limit = limit.to(mean) if isinstance(limit, Tensor) else torch.full_like(mean, float(limit))
        limit = limit.masked_fill(moments.count < self.warmup, math.inf)
        if "_is_number" not in vars(type(self)):
            limit = limit.nan_to_num(nan=math.inf, posinf=math.inf)
        return limit, mean, std

    @property
    def moments(self) -> Moments:
        """Running mean and spread of the norms that went in."""
        return Moments.of(self.state)

    def threshold(self) -> Tensor:
        """The largest norm that is no spike, 0-dim; inf as long as nothing is judged."""
        return self.statistics()[0]

    def observe(self, norm: Tensor, restart: Tensor | None = None) -> None:
        """Take in one norm; one that is not finite, or above 1e92 so that powers of it are not, is left out.

        Args:
            norm: the norm, 0-dim.
            restart: 0-dim bool: whether to forget all earlier norms first.
        """
        before, state = self._values, self.state
        # What lies on the CPU can be looked at without waiting for anything.
        if restart is not None and (restart.ndim or not restart.is_cpu or torch.is_nonzero(restart)):
            before = torch.where(restart, self._empty, self._values)
            state = self._unpack(before)
        after = self._pack(self.include(state, norm))
        self._set(torch.where(norm <= torch.finfo(norm.dtype).max ** 0.3, after, before))

    def go_back(self, earlier: ThresholdRule, when: Tensor) -> None:
        """Forget the norms that a rule of the same kind has not taken in.

        Args:
            earlier: the rule.
            when: 0-dim bool: whether to.
        """
        self._set(torch.where(when, earlier._values.to(self._values), self._values))

    def forget(self) -> None:
        """Start afresh, as before the first norm."""
        self._set(self._empty)

    def to(self, reference: Tensor) -> None:
        """Move the state to where a tensor is.

        Args:
            reference: a floating-point tensor of the device and dtype to compute in. If it is not 0-dim, the state
                becomes that of as many values.
        """
        self._empty, values = move_like(self._empty, reference), move_like(self._values, reference)
        if self.only_numbers and reference.shape != values.shape[1:]:
            self._empty, values = (
                each.reshape(-1, *(1,) * reference.ndim).expand(-1, *reference.shape) for each in (self._empty, values)
            )
            self._shapes = dict.fromkeys(self._shapes, reference.shape)
        self._set(values)

    def state_dict(self) -> State:
        """The state, name -> tensor."""
        return {name: value.clone() for name, value in self.state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned for a rule of the same kind.

        Raises:
            ValueError: if names or shapes differ from this rule's own.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"Argument state_dict should be a dictionary of tensors, but given {type(state_dict)}")
        values = {name: torch.as_tensor(value) for name, value in state_dict.items()}
        own = {name: tuple(shape) for name, shape in self._shapes.items()}
        given = {name: tuple(value.shape) for name, value in values.items()}
        if own != given:
            raise ValueError(
                f"Argument state_dict should hold {own} for {type(self).__name__}, but given {given}: "
                "was it saved with another threshold rule?"
            )
        self._set(move_like(self._pack({name: values[name] for name in own}), self._empty))

    def _set(self, values: Tensor) -> None:
        self._values = values
        self.state = self._unpack(values)

    def _pack(self, state: State) -> Tensor:
        values = list(state.values())
        return torch.stack(values) if self.only_numbers else torch.cat([value.reshape(-1) for value in values])

    def _unpack(self, values: Tensor) -> State:
        if self.only_numbers:
            return dict(zip(self._shapes, values.unbind(), strict=True))
        parts = values.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def __repr__(self) -> str:
        given = vars(self) | {"decay": None if self.decay == 1.0 else self.decay}
        names = [name for name in inspect.signature(type(self)).parameters if name in given]
        return f"{type(self).__name__}({', '.join(f'{name}={given[name]!r}' for name in names)})"


class MeanStdThreshold(ThresholdRule):
    r"""A norm above :math:`\mu + k \sigma` is a spike.

    :math:`\mu` and :math:`\sigma` are the mean and the sample standard deviation of the norms so far (Welford), with
    ``decay`` exponentially weighted; see :class:`Moments`.

    (``docs/detection.md`` has how often that is wrong, and how much of the harm of faults it finds.)

    Args:
        k: how many standard deviations above the mean.
        warmup: how many norms go in before any is judged, 2 at least.
        decay: weight of the past at every new norm, in (0, 1); None weighs all norms the same.

    Raises:
        TypeError: if an argument is not a number of the kind it should be.
        ValueError: if an argument is out of its range.
    """

    def __init__(self, k: float = 6.0, warmup: int = 20, decay: float | None = 0.99) -> None:
        self.k = check_real("k", k, above=0.0)
        super().__init__(warmup=check_count("warmup", warmup, least=2), decay=decay)

    _is_number = True  # after the warm-up; of subclasses nobody knows

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        return torch.add(mean, std, alpha=self.k)


class StaticThreshold(ThresholdRule):
    """A norm above a fixed number is a spike, from the first one on.

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
    """A norm above ``rule(mean, std, count)`` is a spike.

    The function is asked from the third norm on, when a standard deviation exists; a longer warm-up is its own
    business (it is given ``count``). It may return NaN or inf where it has no opinion. It is tried once, with a mean
    of 1, a deviation of 0.1 and a count of 100, when the rule is made.

    Args:
        rule: function of three 0-dim tensors that returns a number or a 0-dim tensor.

    Raises:
        TypeError: if ``rule`` is no function of three tensors that returns a number.
        ValueError: if it raises an error.
    """

    def __init__(self, rule: Callable[[Tensor, Tensor, Tensor], Tensor | float]) -> None:
        if not callable(rule) or isinstance(rule, type):
            hint = ""
            if isinstance(rule, type) and issubclass(rule, ThresholdRule):
                hint = f": give one of these, {rule.__name__}(…)"
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

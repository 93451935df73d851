"""Judging the gradient of every parameter by its own norms: what the norm of all of them does not show."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import Detection, SpikeDetector
from ignite_monitor.model.devices import move_like, upload
from ignite_monitor.model.names import named_parameters, tags


class PerParameterJudge:
    r"""Judges one norm per tensor, each by a :class:`RobustThreshold` of its own, all of them in one vector.

    What all tensors share is no sign of a fault in one of them, and is judged by the norm of all. So where most norms
    are above their means, each is divided by :math:`\max(1, m)^{0.7}`, with the median m of norm / mean, before it is
    judged and enters. (``docs/detection.md`` has what this gains.)

    A tensor is known by its name. A norm of zero, as that of a tensor without a gradient, is not judged and does not
    enter: it says nothing of how large the next one may be. The number of operations does not depend on the number of
    tensors, and nothing is read on the host.

    Args:
        k: how many upper spreads above its mean a tensor's norm is a spike.
        max_consecutive_spikes: how many spikes of one tensor in a row mean that its level has changed.
        overflow_is_spike: whether a non-finite norm is a spike.

    Raises:
        TypeError: if an argument is not a number of the kind it should be.
        ValueError: if an argument is out of its range.
    """

    _SHARED = 0.7
    _MOST, _LEAST = 3, 0.05  # tensors are told of, and the smallest share

    def __init__(self, k: float = 8.0, *, max_consecutive_spikes: int = 10, overflow_is_spike: bool = True) -> None:
        self._k, self._patience, self._overflow_is_spike = k, max_consecutive_spikes, overflow_is_spike
        self.names: tuple[str, ...] = ()
        self._given: tuple[str, ...] = ()  # the last ones
        self._named: tuple[Sequence[nn.Parameter], tuple[str, ...]] = ((), ())  # the last ones, and theirs
        self._detector = self._make(torch.zeros(0, dtype=torch.float64, device="cpu"))

    def judge(self, names: tuple[str, ...], norms: Tensor) -> Detection:
        """Compare norms with what earlier ones of the same tensors allow.

        Args:
            names: of the tensors.
            norms: the norms of their gradients, one-dimensional; 0 where there is none.

        Returns:
            Of every tensor known, in the order of :attr:`names`, whose first are those given. What is judged, ``norm``,
            is divided by what all share; ``given`` is not.
        """
        if names is not self._given:
            if names != self.names[: len(names)]:
                known = set(names)
                self._arrange((*names, *(name for name in self.names if name not in known)), norms)
            self._given = names
            self._detector.to(norms.new_empty(len(self.names)))
        missing = len(self.names) - len(names)
        norms = pad(norms, (0, missing)) if missing else norms
        means = self._detector.rule.state["mean"]  # 0 before the first
        ratios = (norms / means).masked_fill(torch.minimum(norms, means) <= 0.0, math.nan)
        common = ratios.nanmedian().nan_to_num(1.0).clamp(min=1.0)
        return self._detector.judge(norms / common**self._SHARED)._replace(given=norms)

    def judge_gradients(self, model: nn.Module, parameters: Sequence[nn.Parameter], norms: Tensor) -> Detection:
        """As :meth:`judge`, of the gradients of a model's parameters.

        Args:
            parameters: the parameters, the same list as long as they are the same.
            norms: of those that have a gradient.
        """
        if self._named[0] is not parameters:
            name_of = {id(parameter): name for name, parameter, _ in named_parameters(model)}
            self._named = parameters, tuple(name_of[id(parameter)] for parameter in parameters)
        if len(norms) < len(parameters):
            each, none = iter(norms.unbind()), torch.zeros_like(norms[0])
            norms = torch.stack([none if parameter.grad is None else next(each) for parameter in parameters])
        return self.judge(self._named[1], norms)

    def forget(self) -> None:
        """Let go of the parameters."""
        self._named, self._given = ((), ()), ()

    def observe(self, detection: Detection, when: Tensor | None = None) -> None:
        """Let judged norms enter, where a 0-dim bool tensor is True; None is true."""
        if len(detection.norm) == len(self.names):  # else another state has been loaded since
            there = detection.norm != 0
            self._detector.observe(detection, there if when is None else there & when)

    def culprits(self, detection: Detection, told: Tensor | bool = True) -> Tensor:
        """Which tensors hold most of the excess, without waiting.

        Args:
            detection: of an iteration with a spike.
            told: 0-dim bool: whether to tell of any.

        Returns:
            A vector: the largest shares of the excess, then the tensors' indices, what :meth:`named` takes.
        """
        shares, indices = excess_shares(detection).topk(min(self._MOST, len(detection.norm)))
        return torch.cat((shares * told, indices))

    def named(self, culprits: Sequence[float]) -> dict[str, float]:
        """Of what :meth:`culprits` gave, name -> share, of those that hold a share worth telling."""
        half = len(culprits) // 2
        shares = zip(culprits[half:], culprits[:half], strict=True)
        return {self.names[int(index)]: share for index, share in shares if share >= self._LEAST}

    def keys(self, culprits: Sequence[float]) -> dict[str, float]:
        """As :meth:`named`, by the keys that are published."""
        tag_of = dict(zip(self.names, tags(self.names), strict=True))
        return {f"culprit/{tag_of[name]}": share for name, share in self.named(culprits).items()}

    def go_back(self, earlier: PerParameterJudge, when: Tensor | None = None) -> None:
        """Forget the norms since a copy was made, where a 0-dim bool tensor is True; None is true."""
        earlier = copy.copy(earlier)
        if earlier.names != self.names:
            earlier._arrange(self.names, self._detector.counts[0])
        if when is None:
            self._detector = earlier._detector
        else:
            self._detector.go_back(earlier._detector, when)

    def reset_threshold(self) -> None:
        """Forget the level; the counts go on."""
        self._detector.reset_threshold()

    def __copy__(self) -> PerParameterJudge:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _detector=copy.copy(self._detector))
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Names, and the state of all tensors: vectors."""
        return {"names": list(self.names), "detector": self._detector.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; another one is a ValueError."""
        if set(state_dict) != {"names", "detector"}:
            raise ValueError(f"Argument state_dict should hold names and detector, but given {[*state_dict]}")
        names = tuple(state_dict["names"])
        detector = self._make(torch.zeros(len(names), dtype=torch.float64, device="cpu"))
        detector.load_state_dict(state_dict["detector"])
        self._detector, self.names, self._given = detector, names, ()

    def _make(self, reference: Tensor) -> SpikeDetector:
        detector = SpikeDetector(
            RobustThreshold(k=self._k),
            max_consecutive_spikes=self._patience,
            overflow_is_spike=self._overflow_is_spike,
        )
        detector.to(reference)
        return detector

    def _arrange(self, names: tuple[str, ...], reference: Tensor) -> None:
        """Have the state of tensors of these names, in which nothing is known of those that are new."""
        index_of = {name: i for i, name in enumerate(self.names)}
        index = upload(
            torch.tensor([index_of.get(name, len(index_of)) for name in names], device="cpu"), reference.device
        )

        def arranged(values: Tensor) -> Tensor:
            return pad(move_like(values, reference), (0, 1))[index]

        state = self._detector.state_dict()
        rule = {name: arranged(value) for name, value in state.pop("rule").items()}
        self._detector, self.names = self._make(reference.new_zeros(len(names))), names
        self._detector.load_state_dict({name: arranged(value) for name, value in state.items()} | {"rule": rule})


def excess_shares(detection: Detection) -> Tensor:
    """Each tensor's share of what all norms, as they came, are above their thresholds, without waiting for the device.

    Norms that are not finite share it among them. Where all norms are within their thresholds, the share of what they
    are above their means. NaN where that is nothing.

    Args:
        detection: of a vector of norms.
    """
    huge = torch.finfo(detection.norm.dtype).max ** 0.5
    allowed = torch.stack(
        (detection.threshold, detection.mean.nan_to_num(math.inf))
    )  # of a new tensor nothing is known
    excess, beyond = (detection.given - allowed).nan_to_num(nan=huge, posinf=huge).clamp(min=0.0).unbind()
    excess = torch.where(excess.any(), excess, beyond)
    return excess / excess.sum()


def described(what: str, value: float, threshold: float, culprits: Mapping[str, float]) -> str:
    """A spike in words.

    Args:
        what: what has been judged.
        value: its value, the norm of the whole gradient for one.
        threshold: its threshold.
        culprits: name of a parameter -> its share of the excess.
    """
    text = f"{what} {value:.3g}"
    if value <= threshold < math.inf:
        text += f", within its threshold {threshold:.3g}"
    elif 0 < threshold < math.inf > value:
        text += f", {value / threshold:.3g} x its threshold"
    shares = ", ".join(f"{100 * share:.0f} % of the excess in {name}" for name, share in culprits.items())
    return f"{text}; {shares}" if shares else text

"""Train steps made of drawn operations: running them, and recording what happens in them.

A program is run twice: with monitors on one model, and without on another. Of the second run :class:`Training` keeps a
list of events, of which :mod:`tests._truth` has what monitors are to publish.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from ignite.engine import Engine
from torch import Tensor, nn

from tests._helpers import PUT
from tests._models import TwoHeads
from tests._truth import Event


def make_net(frozen: str) -> TwoHeads:
    torch.manual_seed(0)
    model = TwoHeads(nn.Linear(3, 4), nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
    for name, parameter in model.named_parameters():
        if frozen and name.startswith(frozen):
            parameter.requires_grad_(False)
    return model.double()


class Operation:
    """A call of a method of :class:`Training`, which gets the batch and these arguments."""

    def __init__(self, kind: str, *args: Any, **kwargs: Any) -> None:
        self.kind, self.args, self.kwargs = kind, args, kwargs

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"{self.kind}({', '.join([*map(repr, self.args), *named])})"


KINDS = ("backward", "by_hand", "estimated", "zero", "clip", "replace", "step", "closure", "sam", "aside")
Backward, ByHand, Estimated, Zero, Clip, Replace, Step, Closure, Sam, Aside = (
    functools.partial(Operation, kind) for kind in KINDS
)


_LOSSES = st.sampled_from(["a", "b", "ab"])
_BACKWARDS = st.builds(
    Backward,
    _LOSSES,
    st.booleans(),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([1.0, 1.0, 30.0]),
    st.sampled_from([False, False, True]),
)
_WHICH = st.integers(0, 2)
_STEPS = st.builds(Step, _WHICH, st.sampled_from([None, 0.01, 1e6]))
OPERATIONS = st.one_of(
    _BACKWARDS,
    _BACKWARDS,
    _STEPS,
    _STEPS,
    st.builds(
        Zero, st.sampled_from([None, None, 0, 1, 2]), st.sampled_from(["none", "zero", "zero_", "data", "numpy"])
    ),
    st.builds(Clip, _WHICH, st.sampled_from([0.01, 1e6])),
    st.builds(Replace, _WHICH, st.sampled_from([0.0, 0.01, 1.0, 30.0]), st.sampled_from([*PUT, "noise"])),
    st.builds(ByHand, _LOSSES, st.sampled_from([None, *PUT])),
    st.builds(Estimated, _WHICH),
    st.builds(Closure, _WHICH, _LOSSES),
    st.builds(Sam, _WHICH, _LOSSES),
    st.builds(Aside, st.sampled_from(["no_grad", "evaluator", "trainer"])),
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting in which a program is run."""

    frozen: str  # what the names of frozen parameters start with
    optimizers: tuple[str, ...]  # their kinds: one for all parameters, or one for body and a, one for b
    watched: int | None  # the optimizer that the monitors are given
    zeroing: bool | None  # how an iteration starts: zero_grad(set_to_none=...), or not at all
    other: bool = False  # whether there is a second model with an optimizer and a monitor of its own
    every: int = 1  # which iterations are monitored


SETTINGS = st.builds(
    Setting,
    st.sampled_from(["", "", "a.bias", "b.0", "body"]),
    st.sampled_from([("sgd",), ("sgd", "adamw"), ("adamw", "sgd"), ("lbfgs",), ("fused",)]),
    st.sampled_from([None, 0, 0, 1]),
    st.sampled_from([True, False, None]),
    st.sampled_from([False, True]),
    st.sampled_from([1, 1, 2, 3]),
)
PROGRAMS = st.lists(st.lists(OPERATIONS, max_size=5), min_size=2, max_size=6)
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda group: torch.optim.SGD(group, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda group: torch.optim.AdamW(group, lr=0.01),
    "fused": lambda group: torch.optim.AdamW(group, lr=0.01, fused=True),
    "lbfgs": lambda group: torch.optim.LBFGS(group, lr=0.1, max_iter=3),
}


class Training:
    """A model that a program trains, beside another one whose output may be its input.

    A program has operations in any order, which ``make_step`` has not.

    Args:
        setting: how.
        program: the operations of each iteration.
        at_moment: is called at each moment.

    Attributes:
        events: what has happened.
        optimizers: those of the model and, last, that of the other one where there is one.
    """

    def __init__(
        self, setting: Setting, program: list[list[Any]], at_moment: Callable[[], None] = lambda: None
    ) -> None:
        self.setting, self.program, self.at_moment = setting, program, at_moment
        self.model = make_net(setting.frozen)
        self.other = nn.Linear(3, 3).double()
        groups = [list(self.model.parameters())]
        if len(setting.optimizers) > 1:
            groups = [[*self.model.body.parameters(), *self.model.a.parameters()], list(self.model.b.parameters())]
        self.optimizers = [OPTIMIZERS[kind](group) for kind, group in zip(setting.optimizers, groups, strict=True)]
        self.kinds = [*setting.optimizers]
        if setting.other:
            self.optimizers.append(OPTIMIZERS["sgd"](list(self.other.parameters())))
            self.kinds.append("sgd")
        self.parameters = dict(self.model.named_parameters())
        self.parameters |= {f"other.{name}": item for name, item in self.other.named_parameters()}
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(5, 3, generator=generator).double() for _ in program]
        self.events: list[Event] = []
        self._evaluating: int | None = None
        self.engine = Engine(self.train_step)

    @property
    def watched(self) -> int | None:
        """The place of the optimizer that the monitors are given."""
        return None if self.setting.watched is None else self.setting.watched % len(self.setting.optimizers)

    def run(self) -> None:
        self.engine.run(self.batches, max_epochs=1)

    def train_step(self, engine: Engine, x: Tensor) -> None:
        self._happens("iteration", weights=self._weights())
        self.moment()
        if self.setting.zeroing is not None:
            self._zero(x, None, "none" if self.setting.zeroing else "zero")
        for operation in self.program[engine.state.iteration - 1]:
            getattr(self, f"_{operation.kind}")(x, *operation.args, **operation.kwargs)
            self.moment()
        self._happens("returned", weights=self._weights())

    def moment(self) -> None:
        self._happens("moment")
        self.at_moment()

    def held_by(self, optimizer: int) -> list[nn.Parameter]:
        return [item for group in self.optimizers[optimizer].param_groups for item in group["params"]]

    def names_of(self, parameters: Any) -> frozenset[str]:
        return frozenset(self.names[id(item)] for item in parameters if item.requires_grad)

    def _happens(self, kind: str, **what: Any) -> None:
        gradients = {name: item.grad for name, item in self.parameters.items()}
        gradients = {name: item.detach().clone() for name, item in gradients.items() if item is not None}
        self.events.append(Event(kind, gradients=gradients, **what))

    def _weights(self) -> dict[str, Tensor]:
        return {name: item.detach().clone() for name, item in self.parameters.items()}

    def _nonzero(self) -> frozenset[str]:
        return frozenset(
            name for name, item in self.parameters.items() if item.grad is not None and bool(item.grad.count_nonzero())
        )

    def _place(self, optimizer: int) -> int:
        return optimizer % len(self.optimizers)

    def _with_gradient(self, optimizer: int) -> list[nn.Parameter]:
        return [item for item in self.held_by(self._place(optimizer)) if item.grad is not None]

    def _reached(self, heads: str, body: bool) -> frozenset[str]:
        modules = [*([self.model.body] if body else []), *(getattr(self.model, head) for head in heads)]
        return self.names_of(parameter for module in modules for parameter in module.parameters())

    def _loss(self, x: Tensor, heads: str, body: bool = True) -> Tensor:
        return sum(output.square().mean() for output in self.model(x, heads, body).values())  # type: ignore[return-value]

    def _run_backward(self, loss: Tensor, reached: frozenset[str], **options: Any) -> None:
        before = self._nonzero()
        loss.backward(**options)
        self._happens("backward", optimizer=self._evaluating, reached=reached, before=before)
        self.moment()

    # Operations

    def _backward(
        self,
        x: Tensor,
        heads: str,
        body: bool = True,
        times: int = 1,
        create_graph: bool = False,
        penalty: bool = False,
        factor: float = 1.0,
        through: bool = False,
    ) -> None:
        """Backward passes on the losses of some heads, of the heads alone or with the body.

        With ``through`` the input comes from the other model, as in a GAN; where there is none it makes no difference.
        """
        reached = self._reached(heads, body)
        through = through and body and self.setting.other
        if through:
            reached |= self.names_of(self.other.parameters())
        if not reached:
            return
        x = self.other(x) if through else x
        loss = self._loss(x, heads, body) * factor
        if penalty:
            inputs = [self.parameters[name] for name in sorted(reached)]
            slopes = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = loss + 0.1 * sum(slope.square().sum() for slope in slopes)
        for time in range(times):
            retained = time + 1 < times
            self._run_backward(loss, reached, retain_graph=retained, create_graph=create_graph)

    def _by_hand(self, x: Tensor, heads: str, put: str | None) -> None:
        """``torch.autograd.grad``, with what it gives put in the gradients' place or not."""
        reached = self._reached(heads, True)
        if not reached:
            return
        inputs = [self.parameters[name] for name in sorted(reached)]
        slopes = torch.autograd.grad(self._loss(x, heads), inputs)
        if put:
            for parameter, slope in zip(inputs, slopes, strict=True):
                PUT["=" if parameter.grad is None else put](parameter, slope)

    def _estimated(self, x: Tensor, optimizer: int) -> None:
        """A step with gradients made in inference mode, as evolution strategies do, which are taken away after it."""
        place = self._place(optimizer)
        if self.kinds[place] == "lbfgs":
            return
        with torch.inference_mode():
            for parameter in self.held_by(place):
                parameter.grad = 0.1 * torch.ones_like(parameter) if parameter.requires_grad else None
        self._make_step(place)
        for parameter in self.held_by(place):
            parameter.grad = None

    def _zero(self, x: Tensor, optimizer: int | None, how: str) -> None:
        """Call zero_grad() of an optimizer or of the whole model."""
        whole = self.model if optimizer is None else self.optimizers[self._place(optimizer)]
        if how in ("none", "zero"):
            whole.zero_grad(set_to_none=how == "none")
            return
        held = self.model.parameters() if optimizer is None else self._with_gradient(optimizer)
        for parameter in held:
            if parameter.grad is not None:
                place = {"zero_": "copy_", "data": "data.copy_", "numpy": "numpy"}[how]
                PUT[place](parameter, torch.zeros_like(parameter.grad, requires_grad=False).detach())

    def _replace(self, x: Tensor, optimizer: int, factor: float, how: str) -> None:
        """Gradients made larger or smaller, or noised, in place or not."""
        for parameter in self._with_gradient(optimizer):
            gradient = parameter.grad.detach()
            if how == "noise":
                PUT["="](parameter, gradient + factor * torch.linspace(-1, 1, gradient.numel()).view_as(gradient))
            else:
                PUT[how](parameter, gradient * factor)

    def _step(self, x: Tensor, optimizer: int, clip: float | None = None) -> None:
        place = self._place(optimizer)
        if self.kinds[place] == "lbfgs":
            self._closure(x, place, "ab")
            return
        if clip is not None:
            self._clip(x, place, clip)
        self._make_step(place)

    def _make_step(self, place: int) -> None:
        self._happens("step", optimizer=place)
        self.optimizers[place].step()
        self._happens("stepped", optimizer=place)

    def _clip(self, x: Tensor, optimizer: int, norm: float) -> None:
        nn.utils.clip_grad_norm_(self.held_by(self._place(optimizer)), norm)

    def _closure(self, x: Tensor, optimizer: int, heads: str) -> None:
        """A step with a closure that makes its gradients."""
        place = self._place(optimizer)
        reached = self._reached(heads, True)
        if not reached:
            return
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            self.optimizers[place].zero_grad()
            loss = self._loss(x, heads)
            self._run_backward(loss, reached)
            if evaluations == 1:
                self._happens("step", optimizer=place)
                self._evaluating = place
            return loss

        self.optimizers[place].step(closure)
        self._evaluating = None
        self._happens("stepped", optimizer=place)

    def _sam(self, x: Tensor, optimizer: int, heads: str) -> None:
        """Sharpness-aware minimization: the gradient at a neighbouring point."""
        place = self._place(optimizer)
        reached = self._reached(heads, True)
        if not reached or self.kinds[place] == "lbfgs":
            return
        self.model.zero_grad()
        self._run_backward(self._loss(x, heads), reached)
        moves = {name: 0.1 * item.grad.clone() for name, item in self.parameters.items() if item.grad is not None}
        with torch.no_grad():
            for name, move in moves.items():
                self.parameters[name].add_(move)
        self.model.zero_grad()
        self._run_backward(self._loss(x, heads), reached)
        with torch.no_grad():
            for name, move in moves.items():
                self.parameters[name].sub_(move)
        self._make_step(place)

    def _aside(self, x: Tensor, kind: str) -> None:
        """Run code without gradients: a pass under no_grad, or another engine."""
        if kind == "no_grad":
            with torch.no_grad():
                self.model(x)
        elif kind == "evaluator":
            Engine(lambda engine, batch: self._loss(batch, "ab").item()).run([x])
        else:
            other = nn.Linear(3, 1).double()
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

            def train_step(engine: Engine, batch: Tensor) -> None:
                optimizer.zero_grad()
                other(batch).mean().backward()
                optimizer.step()

            Engine(train_step).run([x, x])

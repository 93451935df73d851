"""Train steps made of drawn operations: running them, and recording what happens in them.

A program is run twice: with monitors on one model, and without on another. Of the second run :class:`Training` keeps a
list of events, of which :mod:`tests.stress._truth` has what monitors are to publish.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from ignite.engine import Engine
from torch import Tensor, nn

from tests.stress._truth import Event

HEADS = ("a", "b")


class Net(nn.Module):
    """A body and two heads, each with a loss of its own."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4)
        self.a = nn.Linear(4, 2)
        self.b = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        for name, parameter in self.named_parameters():
            if frozen and name.startswith(frozen):
                parameter.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor, heads: str = "ab", body: bool = True) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        hidden = hidden if body else hidden.detach()
        return {head: getattr(self, head)(hidden).square().mean() for head in heads}


@dataclasses.dataclass(frozen=True)
class Backward:
    """One backward pass or two, on the losses of some heads, of the heads alone or with the body.

    With ``through`` the input comes from the other model, as in a GAN; where there is none it makes no difference.
    """

    heads: str
    body: bool = True
    times: int = 1
    create_graph: bool = False
    penalty: bool = False
    factor: float = 1.0
    through: bool = False


@dataclasses.dataclass(frozen=True)
class ByHand:
    """``torch.autograd.grad``, with what it gives put in the gradients' place or not."""

    heads: str
    put: str | None


@dataclasses.dataclass(frozen=True)
class Estimated:
    """A step with gradients made in inference mode, as evolution strategies do, which are taken away after it."""

    optimizer: int


@dataclasses.dataclass(frozen=True)
class Zero:
    optimizer: int | None  # None for the whole model
    how: str


@dataclasses.dataclass(frozen=True)
class Clip:
    optimizer: int
    norm: float


@dataclasses.dataclass(frozen=True)
class Replace:
    """Gradients made larger or smaller, or noised, in place or not."""

    optimizer: int
    factor: float
    how: str


@dataclasses.dataclass(frozen=True)
class Step:
    optimizer: int
    clip: float | None = None


@dataclasses.dataclass(frozen=True)
class Closure:
    """A step with a closure that makes its gradients."""

    optimizer: int
    heads: str


@dataclasses.dataclass(frozen=True)
class Sam:
    """Sharpness-aware minimization: the gradient at a neighbouring point."""

    optimizer: int
    heads: str


@dataclasses.dataclass(frozen=True)
class Aside:
    """What has nothing to do with gradients: a pass under no_grad, or another engine."""

    kind: str


def replaced_out_of_place(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.clone()


def written_in_place(parameter: nn.Parameter, gradient: Tensor) -> None:
    with torch.no_grad():
        parameter.grad.copy_(gradient)


def copied_into_data(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad.data.copy_(gradient)


def given_as_data(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad.data = gradient.clone()


def written_by_numpy(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad.detach().numpy()[...] = gradient.numpy()


PUT: dict[str, Callable[[nn.Parameter, Tensor], None]] = {
    "=": replaced_out_of_place,
    "copy_": written_in_place,
    "data.copy_": copied_into_data,
    "data=": given_as_data,
    "numpy": written_by_numpy,
}

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
    """How a program is run."""

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
KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda group: torch.optim.SGD(group, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda group: torch.optim.AdamW(group, lr=0.01),
    "fused": lambda group: torch.optim.AdamW(group, lr=0.01, fused=True),
    "lbfgs": lambda group: torch.optim.LBFGS(group, lr=0.1, max_iter=3),
}


class Training:
    """A model that a program trains, beside another one whose output may be its input.

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
        self.model = Net(setting.frozen)
        self.other = nn.Linear(3, 3).double()
        groups = [list(self.model.parameters())]
        if len(setting.optimizers) > 1:
            groups = [[*self.model.body.parameters(), *self.model.a.parameters()], list(self.model.b.parameters())]
        self.optimizers = [KINDS[kind](group) for kind, group in zip(setting.optimizers, groups, strict=True)]
        self.kinds = [*setting.optimizers]
        if setting.other:
            self.optimizers.append(KINDS["sgd"](list(self.other.parameters())))
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
            self._zero(Zero(None, "none" if self.setting.zeroing else "zero"))
        for operation in self.program[engine.state.iteration - 1]:
            getattr(self, f"_{type(operation).__name__.lower()}")(operation, x)
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

    def _run_backward(self, loss: Tensor, reached: frozenset[str], **options: Any) -> None:
        before = self._nonzero()
        loss.backward(**options)
        self._happens("backward", optimizer=self._evaluating, reached=reached, before=before)
        self.moment()

    # Operations

    def _backward(self, operation: Backward, x: Tensor) -> None:
        reached = self._reached(operation.heads, operation.body)
        through = operation.through and operation.body and self.setting.other
        if through:
            reached |= self.names_of(self.other.parameters())
        if not reached:
            return
        x = self.other(x) if through else x
        loss = sum(self.model(x, operation.heads, operation.body).values()) * operation.factor
        if operation.penalty:
            inputs = [self.parameters[name] for name in sorted(reached)]
            slopes = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = loss + 0.1 * sum(slope.square().sum() for slope in slopes)
        for time in range(operation.times):
            retained = time + 1 < operation.times
            self._run_backward(loss, reached, retain_graph=retained, create_graph=operation.create_graph)

    def _byhand(self, operation: ByHand, x: Tensor) -> None:
        reached = self._reached(operation.heads, True)
        if not reached:
            return
        inputs = [self.parameters[name] for name in sorted(reached)]
        slopes = torch.autograd.grad(sum(self.model(x, operation.heads).values()), inputs)
        if operation.put:
            for parameter, slope in zip(inputs, slopes, strict=True):
                PUT["=" if parameter.grad is None else operation.put](parameter, slope)

    def _estimated(self, operation: Estimated, x: Tensor) -> None:
        place = self._place(operation.optimizer)
        if self.kinds[place] == "lbfgs":
            return
        with torch.inference_mode():
            for parameter in self.held_by(place):
                parameter.grad = 0.1 * torch.ones_like(parameter) if parameter.requires_grad else None
        self._make_step(place)
        for parameter in self.held_by(place):
            parameter.grad = None

    def _zero(self, operation: Zero, x: Tensor | None = None) -> None:
        whole = self.model if operation.optimizer is None else self.optimizers[self._place(operation.optimizer)]
        if operation.how in ("none", "zero"):
            whole.zero_grad(set_to_none=operation.how == "none")
            return
        held = self.model.parameters() if operation.optimizer is None else self._with_gradient(operation.optimizer)
        for parameter in held:
            if parameter.grad is not None:
                how = {"zero_": "copy_", "data": "data.copy_", "numpy": "numpy"}[operation.how]
                PUT[how](parameter, torch.zeros_like(parameter.grad, requires_grad=False).detach())

    def _replace(self, operation: Replace, x: Tensor) -> None:
        for parameter in self._with_gradient(operation.optimizer):
            gradient = parameter.grad.detach()
            if operation.how == "noise":
                PUT["="](
                    parameter, gradient + operation.factor * torch.linspace(-1, 1, gradient.numel()).view_as(gradient)
                )
            else:
                PUT[operation.how](parameter, gradient * operation.factor)

    def _step(self, operation: Step, x: Tensor) -> None:
        place = self._place(operation.optimizer)
        if self.kinds[place] == "lbfgs":
            self._closure(Closure(place, "ab"), x)
            return
        if operation.clip is not None:
            self._clip(Clip(place, operation.clip))
        self._make_step(place)

    def _make_step(self, place: int) -> None:
        self._happens("step", optimizer=place)
        self.optimizers[place].step()
        self._happens("stepped", optimizer=place)

    def _clip(self, operation: Clip, x: Tensor | None = None) -> None:
        nn.utils.clip_grad_norm_(self.held_by(self._place(operation.optimizer)), operation.norm)

    def _closure(self, operation: Closure, x: Tensor) -> None:
        place = self._place(operation.optimizer)
        reached = self._reached(operation.heads, True)
        if not reached:
            return
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            self.optimizers[place].zero_grad()
            loss = sum(self.model(x, operation.heads).values())
            self._run_backward(loss, reached)
            if evaluations == 1:
                self._happens("step", optimizer=place)
                self._evaluating = place
            return loss

        self.optimizers[place].step(closure)
        self._evaluating = None
        self._happens("stepped", optimizer=place)

    def _sam(self, operation: Sam, x: Tensor) -> None:
        place = self._place(operation.optimizer)
        reached = self._reached(operation.heads, True)
        if not reached or self.kinds[place] == "lbfgs":
            return
        self.model.zero_grad()
        self._run_backward(sum(self.model(x, operation.heads).values()), reached)
        moves = {name: 0.1 * item.grad.clone() for name, item in self.parameters.items() if item.grad is not None}
        with torch.no_grad():
            for name, move in moves.items():
                self.parameters[name].add_(move)
        self.model.zero_grad()
        self._run_backward(sum(self.model(x, operation.heads).values()), reached)
        with torch.no_grad():
            for name, move in moves.items():
                self.parameters[name].sub_(move)
        self._make_step(place)

    def _aside(self, operation: Aside, x: Tensor) -> None:
        if operation.kind == "no_grad":
            with torch.no_grad():
                self.model(x)
        elif operation.kind == "evaluator":
            Engine(lambda engine, batch: {head: loss.item() for head, loss in self.model(batch).items()}).run([x])
        else:
            other = nn.Linear(3, 1).double()
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

            def train_step(engine: Engine, batch: Tensor) -> None:
                optimizer.zero_grad()
                other(batch).mean().backward()
                optimizer.step()

            Engine(train_step).run([x, x])

"""Train steps made of drawn operations: running them, and what the contract says of each moment in them.

A program is run twice: with monitors on one model, and without on another. :class:`Truth` follows the second one, told
by the program itself what it does, and computes in float64.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import strategies as st
from ignite.engine import Engine
from torch import Tensor, nn

from tests.hard_use._judge import Judge, Rule, Verdict

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
    """One backward pass or two, on the losses of some heads, of the heads alone or with the body."""

    heads: str
    body: bool = True
    times: int = 1
    create_graph: bool = False
    penalty: bool = False
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class ByHand:
    """``torch.autograd.grad``, with what it gives put in the gradients' place or not."""

    heads: str
    put: bool


@dataclasses.dataclass(frozen=True)
class Zero:
    optimizer: int | None  # None for the whole model
    set_to_none: bool


@dataclasses.dataclass(frozen=True)
class Clip:
    optimizer: int
    norm: float


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
class Aside:
    """What has nothing to do with gradients: a pass under no_grad, or another engine."""

    kind: str


_LOSSES = st.sampled_from(["a", "b", "ab"])
_BACKWARDS = st.builds(
    Backward,
    _LOSSES,
    st.booleans(),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([1.0, 1.0, 30.0]),
)
_WHICH = st.integers(0, 1)
OPERATIONS = st.one_of(
    _BACKWARDS,
    _BACKWARDS,
    st.builds(Step, _WHICH, st.sampled_from([None, 0.01, 1e6])),
    st.builds(Step, _WHICH, st.sampled_from([None, 0.01, 1e6])),
    st.builds(Zero, st.sampled_from([None, None, 0, 1]), st.just(True)),
    st.builds(Clip, _WHICH, st.sampled_from([0.01, 1e6])),
    st.builds(ByHand, _LOSSES, st.booleans()),
    st.builds(Closure, _WHICH, _LOSSES),
    st.builds(Aside, st.sampled_from(["no_grad", "evaluator", "trainer"])),
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a program is run."""

    frozen: str  # what the names of frozen parameters start with
    optimizers: tuple[str, ...]  # their kinds: one for all parameters, or one for body and a, one for b
    watched: int | None  # the optimizer that the monitors are given
    zeroing: bool | None  # how an iteration starts: zero_grad(set_to_none=...), or not at all


SETTINGS = st.builds(
    Setting,
    st.sampled_from(["", "", "a.bias", "b.0", "body"]),
    st.sampled_from([("sgd",), ("sgd", "adamw"), ("adamw", "sgd"), ("lbfgs",), ("fused",)]),
    st.sampled_from([None, 0, 0]),
    st.sampled_from([True, False, None]),
)
PROGRAMS = st.lists(st.lists(OPERATIONS, max_size=5), min_size=2, max_size=6)


def make_optimizers(model: Net, setting: Setting) -> list[torch.optim.Optimizer]:
    groups = [list(model.parameters())]
    if len(setting.optimizers) > 1:
        groups = [[*model.body.parameters(), *model.a.parameters()], list(model.b.parameters())]
    kinds = {
        "sgd": lambda group: torch.optim.SGD(group, lr=0.05, momentum=0.9, weight_decay=0.01),
        "adamw": lambda group: torch.optim.AdamW(group, lr=0.01),
        "fused": lambda group: torch.optim.AdamW(group, lr=0.01, fused=True),
        "lbfgs": lambda group: torch.optim.LBFGS(group, lr=0.1, max_iter=3),
    }
    return [kinds[kind](group) for kind, group in zip(setting.optimizers, groups, strict=True)]


class Watcher:
    """Is told what a program does."""

    def iteration_started(self) -> None: ...
    def backward_ended(self, reached: set[str], create_graph: bool) -> None: ...
    def put_by_hand(self, names: set[str]) -> None: ...
    def zeroed(self, names: set[str], to_none: bool) -> None: ...
    def clipped(self, names: set[str]) -> None: ...
    def step_started(self, optimizer: int) -> None: ...
    def step_completed(self, optimizer: int) -> None: ...
    def moment(self) -> None: ...
    def iteration_completed(self) -> None: ...


class Training:
    """A model that a program trains.

    Args:
        setting: how.
        program: the operations of each iteration.
        watcher: is told of them.
    """

    def __init__(self, setting: Setting, program: list[list[Any]], watcher: Watcher) -> None:
        self.setting, self.program, self.watcher = setting, program, watcher
        self.model = Net(setting.frozen)
        self.optimizers = make_optimizers(self.model, setting)
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(5, 3, generator=generator).double() for _ in program]
        self.engine = Engine(self.train_step)

    @property
    def watched(self) -> torch.optim.Optimizer | None:
        return None if self.setting.watched is None else self.optimizers[self.setting.watched]

    def run(self) -> None:
        self.engine.run(self.batches, max_epochs=1)

    def train_step(self, engine: Engine, x: Tensor) -> None:
        self.watcher.iteration_started()
        if self.setting.zeroing is not None:
            self._zero(Zero(None, self.setting.zeroing))
        for operation in self.program[engine.state.iteration - 1]:
            getattr(self, f"_{type(operation).__name__.lower()}")(operation, x)
            self.watcher.moment()

    def held_by(self, optimizer: int) -> list[nn.Parameter]:
        return [each for group in self.optimizers[optimizer].param_groups for each in group["params"]]

    def _names_of(self, parameters: Any) -> set[str]:
        return {self.names[id(each)] for each in parameters if each.requires_grad}

    def _reached(self, heads: str, body: bool) -> set[str]:
        modules = [*([self.model.body] if body else []), *(getattr(self.model, head) for head in heads)]
        return self._names_of(parameter for module in modules for parameter in module.parameters())

    def _backward(self, operation: Backward, x: Tensor) -> None:
        reached = self._reached(operation.heads, operation.body)
        if not reached:
            return
        loss = sum(self.model(x, operation.heads, operation.body).values()) * operation.factor
        if operation.penalty:
            inputs = [each for name, each in self.model.named_parameters() if name in reached]
            slopes = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = loss + 0.1 * sum(slope.square().sum() for slope in slopes)
        for time in range(operation.times):
            loss.backward(retain_graph=time + 1 < operation.times, create_graph=operation.create_graph)
            self.watcher.backward_ended(reached, operation.create_graph)
            self.watcher.moment()

    def _byhand(self, operation: ByHand, x: Tensor) -> None:
        reached = self._reached(operation.heads, True)
        if not reached:
            return
        inputs = [each for name, each in self.model.named_parameters() if name in reached]
        slopes = torch.autograd.grad(sum(self.model(x, operation.heads).values()), inputs)
        if operation.put:
            for parameter, slope in zip(inputs, slopes, strict=True):
                parameter.grad = slope
            self.watcher.put_by_hand(reached)

    def _zero(self, operation: Zero, x: Tensor | None = None) -> None:
        if operation.optimizer is None:
            parameters = list(self.model.parameters())
            self.model.zero_grad(operation.set_to_none)
        else:
            parameters = self.held_by(operation.optimizer % len(self.optimizers))
            self.optimizers[operation.optimizer % len(self.optimizers)].zero_grad(operation.set_to_none)
        self.watcher.zeroed(self._names_of(parameters), operation.set_to_none)

    def _step(self, operation: Step, x: Tensor) -> None:
        place = operation.optimizer % len(self.optimizers)
        if self.setting.optimizers[place] == "lbfgs":
            self._closure(Closure(place, "ab"), x)
            return
        if operation.clip is not None:
            self._clip(Clip(place, operation.clip))
        self.watcher.step_started(place)
        self.optimizers[place].step()
        self.watcher.step_completed(place)

    def _clip(self, operation: Clip, x: Tensor | None = None) -> None:
        parameters = self.held_by(operation.optimizer % len(self.optimizers))
        nn.utils.clip_grad_norm_(parameters, operation.norm)
        self.watcher.clipped(self._names_of(each for each in parameters if each.grad is not None))

    def _closure(self, operation: Closure, x: Tensor) -> None:
        place = operation.optimizer % len(self.optimizers)
        reached = self._reached(operation.heads, True)
        if not reached:
            return
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            self._zero(Zero(place, True))
            loss = sum(self.model(x, operation.heads).values())
            loss.backward()
            self.watcher.backward_ended(reached, False)
            self.watcher.moment()
            if evaluations == 1:
                self.watcher.step_started(place)
            return loss

        self.optimizers[place].step(closure)
        self.watcher.step_completed(place)

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


@dataclasses.dataclass(eq=False)
class Judged:
    """A gradient that has been judged."""

    verdict: Verdict
    used: bool = False  # a step has been made with it
    seen: bool = True  # in this iteration
    foreign: bool = False  # another optimizer has made a step since this one's own
    changed: bool = False  # in place, but by a backward
    replaced: bool = False
    accumulated: bool = False  # by one backward, since the iteration before


class Truth(Watcher):
    """What the contract says of a program.

    Args:
        rule: of GradMonitor.
        said: flag and norm that a monitor said at each moment; where rounding decides, the flag is taken from there.
    """

    def __init__(self, rule: Rule, said: list[tuple[bool, float | None]]) -> None:
        self.judge = Judge(rule)
        self.said = said
        self.moments: list[tuple[bool, float | None]] = []
        self.grad: list[dict[str, float]] = []  # what GradMonitor is to publish
        self.update: list[dict[str, float]] = []  # what WeightUpdateHandler is to
        self._judged: Judged | None = None
        self._shown: Judged | None = None
        self._stepped: Judged | None = None
        self._stepping: Judged | None = None
        self._before: Judge | None = None
        self._still: dict[str, int] = {}

    def follow(self, training: Training) -> None:
        self.training = training
        self.parameters = dict(training.model.named_parameters())
        watched = training.watched
        held = {id(each) for group in watched.param_groups for each in group["params"]} if watched else None
        self.own = {name for name, each in self.parameters.items() if held is None or id(each) in held}

    def _norm(self, names: set[str]) -> float:
        gradients = [self.parameters[name].grad for name in names]
        return math.sqrt(
            math.fsum(float(each.detach().double().square().sum()) for each in gradients if each is not None)
        )

    # GradMonitor

    def _now(self) -> Judged:
        said = self.said[len(self.moments)][0] if len(self.moments) < len(self.said) else False
        self._judged = Judged(self.judge.judge(self._norm(self.own), said))
        return self._judged

    def _settle(self, undo: bool) -> None:
        if self._before is not None and undo:
            self.judge = self._before
        self._before = None

    def _show(self, judged: Judged) -> None:
        judged.seen = True
        self._shown = judged

    def iteration_started(self) -> None:
        self._shown = self._stepped = self._stepping = None
        if self._judged is not None:
            self._judged.seen = False
        self._weights = {name: each.detach().double().clone() for name, each in self.parameters.items()}
        self._latest: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._replaced: set[str] = set()
        self._moved: set[str] = set()
        self._stepped_any = False
        self.moment()

    def backward_ended(self, reached: set[str], create_graph: bool) -> None:
        earlier = self._judged
        if reached & self.own:
            if earlier is not None:
                # With a graph gradients are not added to in place.
                earlier.replaced |= create_graph
            self._settle(undo=earlier is not None and not (earlier.used or earlier.replaced or earlier.changed))
            self._show(self._now())
        for name in (reached & self.own) | self._replaced:
            if self.parameters[name].grad is not None:
                self._latest[name] = self._norm({name})
        self._replaced = set()

    def _norm_exists(self) -> bool:
        return any(self.parameters[name].grad is not None for name in self.own)

    def put_by_hand(self, names: set[str]) -> None:
        if self._judged is not None and names & self.own:
            self._judged.replaced = True
        self._replaced |= names & self.own

    def zeroed(self, names: set[str], to_none: bool) -> None:
        if self._judged is not None and names & self.own:
            if to_none:
                self._judged.replaced = True
            elif self._norm_exists():
                self._judged.changed = True

    def clipped(self, names: set[str]) -> None:
        if self._judged is not None and names & self.own and not self._judged.replaced:
            self._judged.changed = True

    def step_started(self, optimizer: int) -> None:
        members = {
            name
            for name, each in self.parameters.items()
            if name in self.own
            and each.requires_grad
            and any(each is held for held in self.training.held_by(optimizer))
        }
        with_gradient = {name for name in members if self.parameters[name].grad is not None}
        for name in with_gradient:
            if name not in self._latest or name in self._replaced:
                self._latest[name] = self._norm({name})
        self._replaced -= with_gradient
        self._members = members, with_gradient

        self._stepping = None
        judged = self._judged
        if not self._is_own(optimizer):
            if judged is not None and self._stepped is not None:
                judged.foreign = True
            return
        if not self._norm_exists():
            return
        if judged is None or judged.replaced or (judged.changed and (judged.used or not judged.seen)):
            self._settle(undo=False)
            judged = self._now()
        else:
            self._settle(undo=True)
            judged.changed = False
        self._show(judged)
        self._stepping = judged

    def _is_own(self, optimizer: int) -> bool:
        watched = self.training.setting.watched
        return watched is None or watched == optimizer

    def step_completed(self, optimizer: int) -> None:
        members, with_gradient = self._members
        if with_gradient:
            self._moved |= members
            self._stepped_any = True
            self._used |= {name: self._latest[name] for name in with_gradient if name in self._latest}
        if not self._is_own(optimizer) or self._stepping is None or self._judged is None:
            return
        self._judged.used = self._stepping.used = True
        self._stepped, self._stepping = self._stepping, None
        if self.training.setting.watched is not None:
            self.judge.observe(self._stepped.verdict)

    def moment(self) -> None:
        shown = self._shown
        self.moments.append((False, None) if shown is None else (shown.verdict.spike, shown.verdict.norm))

    def iteration_completed(self) -> None:
        self.update.append(self._update_values())
        judged = self._judged
        if judged is None or not judged.seen:
            self.grad.append({})
            self.moment()
            return
        if self._stepped is not None and (judged.used or judged.foreign):
            judged = self._stepped
        if self.training.setting.watched is None:
            self.judge.observe(judged.verdict)
        elif not judged.used:
            self._before = self.judge.copy()
            if judged.verdict.spike:
                self.judge.observe(judged.verdict)
            judged.changed = False
        self._shown = judged
        self.grad.append(
            {f"grad/{name}": value for name, value in judged.verdict.statistics().items()}
            | {
                "grad/spike_count": float(self.judge.spike_count),
                "grad/skipped_count": 0.0,
                "grad/nonfinite_count": float(self.judge.nonfinite_count),
            }
        )
        self.moment()

    # WeightUpdateHandler

    def _update_values(self) -> dict[str, float]:
        norms = self._latest | self._used
        values: dict[str, float] = {}
        if norms:
            values |= order_statistics("grad", list(norms.values()))
            values["vanishing_count"] = float(sum(norm < 1e-7 for norm in norms.values()))
            values["exploding_count"] = float(sum(norm > 1e2 for norm in norms.values()))
        if self._stepped_any:
            ratios = {}
            for name in sorted(self._moved):
                before, after = self._weights[name], self.parameters[name].detach().double()
                ratios[name] = float((after - before).norm()) / (float(before.norm()) + 1e-12)
                self._still[name] = self._still.get(name, 0) + 1 if ratios[name] <= 1e-12 else 0
            values |= order_statistics("update_ratio", list(ratios.values()))
            values["frozen_count"] = float(sum(self._still[name] >= 3 for name in ratios))
        return {f"monitor/{name}": value for name, value in values.items()}


def order_statistics(name: str, values: list[float]) -> dict[str, float]:
    values = sorted(values)
    count = len(values)
    median = (values[(count - 1) // 2] + values[count // 2]) / 2
    return {
        f"{name}_median": median,
        f"{name}_p95": values[math.ceil(0.95 * count) - 1],
        f"{name}_min": values[0],
        f"{name}_max": values[-1],
    }

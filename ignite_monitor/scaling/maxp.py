"""MaxPScheduler: learning rates that are as large as the measured alignment allows."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_count, check_real, check_type
from ignite_monitor.keys import MAXP
from ignite_monitor.model.names import tags
from ignite_monitor.model.optimizers import check_optimizer
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.reference.monitor import ReferenceMonitor
from ignite_monitor.scaling.alignment import AlignmentCalls, find_layers
from ignite_monitor.scaling.graph import Alignment
from ignite_monitor.scaling.parametrization import Parametrization
from ignite_monitor.scaling.solver import Solution


class MaxPScheduler(ReferenceMonitor, schema=MAXP):
    r"""Sets each layer's learning rate to the largest with which, as its layers are aligned now, nothing grows.

    A :class:`Parametrization` supposes an alignment and solves for exponents c once. This handler measures the
    alignment while the model trains, as :class:`AlignmentHandler` does, solves anew, and sets the learning rate of each
    of the optimizer's groups to

    .. math:: \mathtt{lr\_prefactor} \cdot n^{-c}

    for the next train step (arXiv:2407.05872). A term that is not defined, as all of them before the first update,
    keeps its value. Layers whose c was given keep it, and so do those that can't be measured keep their alignment.

    {keys}

    **Smoothing.** With ``alignment_ema`` e, an alignment becomes e times what it was plus 1 - e times what is measured,
    starting from that of the parametrization, and likewise with ``c_ema`` an exponent.

    **Schedules.** ``lr_prefactor`` may be set at any time, and takes effect at once. To Ignite's parameter schedulers
    the handler is an optimizer with one group, whose "lr" it is; to schedulers of torch :meth:`as_optimizer` is. A
    schedule of the optimizer itself would be undone by the next solve, and is warned of.

    **Waiting.** Solving needs the measured alignments on the host, so that each solve waits for the device, once.
    Iterations without one only publish what is known already.

    A solve that fails, or gives what is not finite, changes nothing; it is counted, and the first one is warned of.

    Args:
        parametrization: the parametrization of the model that is trained. Where that is wrapped in
            DistributedDataParallel, or sharded, make the handler afterwards.
        optimizer: an optimizer made of its ``param_groups``, which may be divided further, and of groups of your own:
            those without "layer_name" keep their learning rates.
        warmup_steps: for how many train steps the learning rates stay as they are; of iterations that ``attach`` was
            told to leave out, none counts.
        solve_interval: after how many train steps, counted likewise, to measure and solve again.
        sample_size: how many rows of a batch to measure.
        c_ema: how much of an exponent stays at each solve, at least 0 and less than 1.
        alignment_ema: how much of an alignment stays at each measurement, likewise.
        reference: ``"init"`` for a frozen copy of the model as it is now, which is saved with the handler; or a module
            of the same structure, as a copy that was made before ``fully_shard``.

    Attributes:
        alignment: name -> :class:`Alignment`, as it is now.
        solution: the exponents as they are now, a :class:`Solution`.
        failed_count: how often there was no solution.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, or the optimizer has other groups.

    Examples:
        .. code-block:: python

            scheduler = MaxPScheduler(parametrization, optimizer, warmup_steps=100, solve_interval=10)
            scheduler.attach(trainer)
            # A schedule of the prefactor:
            cosine = CosineAnnealingScheduler(scheduler, "lr", 0.1, 0.0, cycle_size=1000)
            trainer.add_event_handler(Events.ITERATION_STARTED, cosine)
    """

    _state_dict_all_req_keys = ("steps", "lr_prefactor", "alignment", "c", "bias_c", "failed_count", "reference")

    def __init__(
        self,
        parametrization: Parametrization,
        optimizer: Optimizer,
        *,
        warmup_steps: int = 0,
        solve_interval: int = 1,
        sample_size: int = 32,
        c_ema: float = 0.0,
        alignment_ema: float = 0.0,
        reference: str | nn.Module = "init",
    ) -> None:
        check_type("parametrization", parametrization, Parametrization, "Parametrization")
        check_optimizer(optimizer)
        super().__init__(parametrization.model, "maxp")
        self.parametrization = parametrization
        self.optimizer = optimizer
        self._warmup_steps = check_count("warmup_steps", warmup_steps)
        self._solve_interval = check_count("solve_interval", solve_interval, least=1)
        sample_size = check_count("sample_size", sample_size, least=1)
        self._c_ema = check_real("c_ema", c_ema, least=0.0, below=1.0)
        self._alignment_ema = check_real("alignment_ema", alignment_ema, least=0.0, below=1.0)
        self._rates = LayerRates(parametrization, optimizer)
        self.alignment = dict(parametrization.alignment)
        self.solution = parametrization.solution
        self.failed_count = 0
        self._lr_prefactor = parametrization.lr_prefactor
        self._steps = 0
        self._names: list[str] = []
        self._tags: list[str] = []
        if isinstance(reference, str) and reference != "init":
            raise ValueError(f"Argument reference should be 'init' or a module, but given {reference!r}")
        made = self._set_reference(reference)
        layers = find_layers(made.root, parametrization)
        self._calls = AlignmentCalls(made, layers, sample_size)
        self._compare(self._calls.rows, self._calls)

    @property
    def lr_prefactor(self) -> float:
        """What all learning rates are proportional to; to set it sets them."""
        return self._lr_prefactor

    @lr_prefactor.setter
    def lr_prefactor(self, value: float) -> None:
        self._lr_prefactor = check_real("lr_prefactor", value, least=0.0)
        self._set_learning_rates()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group, whose "lr" is ``lr_prefactor``, for Ignite's parameter schedulers."""
        return [PrefactorGroup(self)]

    def as_optimizer(self) -> Optimizer:
        """An optimizer whose only group is that of :attr:`param_groups`, for schedulers of torch.

        Ignite's ``LRScheduler`` and ``ReduceLROnPlateauScheduler`` are around one of these.
        """
        return PrefactorOptimizer(self)

    def state_dict(self) -> OrderedDict[str, Any]:
        """The alignments and exponents as they are now, the number of steps, and the reference's weights."""
        return OrderedDict(
            super().state_dict(),
            steps=self._steps,
            lr_prefactor=self._lr_prefactor,
            alignment={name: list(alignment) for name, alignment in self.alignment.items()},
            c=dict(self.solution.c),
            bias_c=dict(self.solution.bias_c),
            failed_count=self.failed_count,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, and set the learning rates.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping.
            ValueError: if it was saved by a monitor of another kind, or with another model.
        """
        Monitor.load_state_dict(self, state_dict)
        alignment = {name: Alignment(*each) for name, each in state_dict["alignment"].items()}
        if alignment.keys() != self.alignment.keys() or state_dict["c"].keys() != self.solution.c.keys():
            raise ValueError("Argument state_dict should be of a model with the same layers")
        super().load_state_dict(state_dict)
        self._steps = int(state_dict["steps"])
        self.failed_count = int(state_dict["failed_count"])
        self.alignment = alignment
        self.solution = Solution(dict(state_dict["c"]), self.solution.r, dict(state_dict["bias_c"]))
        self.lr_prefactor = state_dict["lr_prefactor"]

    # What it listens to

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        return super().train_step_contexts() if self._is_due() else []

    def _is_due(self) -> bool:
        steps = self._steps - self._warmup_steps
        return steps >= 0 and steps % self._solve_interval == 0

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        if self._rates.are_changed():
            self._warn(
                "something else sets learning rates of the optimizer, which the next solve will undo: let it set "
                "lr_prefactor of this handler"
            )
        if self._is_due():
            super()._on_train_step_completed(engine)
        self._steps += 1
        values = {f"c/{name}": c for name, c in self.solution.c.items()}
        values |= {f"lr/{name}": lr for name, lr in self._rates.values().items()}
        values["failed_count"] = self.failed_count
        if [*values] != self._names:
            self._names, self._tags = [*values], tags(values)
        self.publish(**dict(zip(self._tags, values.values(), strict=True)))

    def _compared(self, incomplete: set[str]) -> None:
        measured = self._calls.result(incomplete).tolist()
        if all(math.isnan(value) for row in measured for value in row):
            return
        for name, row in zip(self._calls.layers, measured, strict=True):
            self.alignment[name] = Alignment(*map(self._smoothed_alignment, self.alignment[name], row))
        try:
            self.solution = self._smoothed(self.parametrization.solve(self.alignment))
        except (ValueError, ArithmeticError) as error:
            self.failed_count += 1
            if self.failed_count == 1:
                self._warn(f"no solution for the measured alignment, so the exponents stay as they are: {error}")
        self._set_learning_rates()

    def _smoothed_alignment(self, before: float, measured: float) -> float:
        kept = self._alignment_ema
        return before if math.isnan(measured) else kept * before + (1 - kept) * measured

    def _smoothed(self, solution: Solution) -> Solution:
        c, bias_c = (
            {name: self._c_ema * before[name] + (1 - self._c_ema) * value for name, value in after.items()}
            for before, after in ((self.solution.c, solution.c), (self.solution.bias_c, solution.bias_c))
        )
        if not all(map(math.isfinite, [*c.values(), *bias_c.values()])):
            raise ArithmeticError("an exponent is not finite")
        return Solution(c, solution.r, bias_c)

    def _set_learning_rates(self) -> None:
        self._rates.set(self.solution, self._lr_prefactor)


class LayerRates:
    """Learning rates of the groups that belong to a parametrization; others, without "layer_name", are left alone."""

    def __init__(self, parametrization: Parametrization, optimizer: Optimizer) -> None:
        self._parametrization = parametrization
        self._optimizer = optimizer
        names = {group["layer_name"] for group in self._groups}
        if not names or not names <= {*parametrization.layers, "_other"}:
            raise ValueError("Argument optimizer should be made of the parametrization's param_groups")
        self._rates = self._computed(parametrization.solution, parametrization.lr_prefactor)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for group in self._optimizer.param_groups if group.get("layer_name") is not None]

    def _computed(self, solution: Solution, prefactor: float) -> list[tuple[float, float]]:
        """(c, lr) of each group."""
        rates = []
        for group in self._groups:
            name, layers = group["layer_name"], self._parametrization.layers
            c = self._parametrization.exponent(name, bias=group.get("bias", False), solution=solution)
            rates.append((c, prefactor * (layers[name].fan_in if name in layers else 1) ** -c))
        return rates

    def _now(self) -> list[tuple[dict[str, Any], float]]:
        """Each group, and the learning rate that it was given; groups may have been added since."""
        return [(group, lr) for group, (_, lr) in zip(self._groups, self._rates, strict=False)]

    def set(self, solution: Solution, prefactor: float) -> None:
        """Set each group's "lr" to prefactor * fan_in ** -c, and its "c"."""
        self._rates = self._computed(solution, prefactor)
        for group, (c, lr) in zip(self._groups, self._rates, strict=True):
            group["c"] = c
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def are_changed(self) -> bool:
        """Whether someone else has set one since; of those that are tensors it is not known without waiting."""
        return any(not isinstance(group["lr"], Tensor) and group["lr"] != lr for group, lr in self._now())

    def values(self) -> dict[str, float]:
        """The learning rates, of ``{layer}``, ``{layer}.bias`` and ``_other``."""
        return {
            f"{group['layer_name']}{'.bias' * bool(group.get('bias'))}": (
                lr if isinstance(group["lr"], Tensor) else group["lr"]
            )
            for group, lr in self._now()
        }


class PrefactorGroup(dict[str, Any]):
    """A group of an optimizer, whose "lr" is the scheduler's prefactor."""

    def __init__(self, owner: MaxPScheduler) -> None:
        super().__init__(lr=owner.lr_prefactor)
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return self._owner.lr_prefactor if name == "lr" else super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name == "lr":
            self._owner.lr_prefactor = value


class PrefactorOptimizer(Optimizer):
    """An optimizer with nothing to optimize, and one group, whose "lr" is the scheduler's prefactor."""

    def __init__(self, owner: MaxPScheduler) -> None:
        super().__init__([torch.zeros(1)], {"lr": owner.lr_prefactor})
        self.param_groups = [PrefactorGroup(owner)]
        self._opt_called = True  # torch's schedulers warn of steps of theirs before one of the optimizer's

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""
        return None

"""MaxPScheduler: learning rates as large as the measured alignment allows."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ignite_monitor.checks import check_count, check_real, check_type
from ignite_monitor.events.hooks import register_first, weak_method
from ignite_monitor.keys import MAXP
from ignite_monitor.model._torch import has_step_hooks
from ignite_monitor.model.names import tags
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.reference.monitor import ReferenceMonitor
from ignite_monitor.scaling.alignment import AlignmentCalls, measurable_layers
from ignite_monitor.scaling.parametrization import Parametrization
from ignite_monitor.scaling.solver import FULL, Alignment


class MaxPScheduler(ReferenceMonitor, schema=MAXP):
    r"""Set each layer's learning rate to the largest at which, given its measured alignment, no activation grows.

    The alignment is measured as :class:`AlignmentHandler` does, a linear program gives exponents c, and the learning
    rate of each group, from the next train step on, is

    .. math:: \mathtt{lr\_prefactor} \cdot n^{-c}

    (arXiv:2407.05872). No layer is slower than under full alignment. Terms that are undefined keep their values, as do
    layers that can't be measured, and given c.

    {keys}

    ``lr_prefactor`` may be set at any time; parameter schedulers take :meth:`as_optimizer`, whose rate is read before
    each step of the optimizer while the scheduler is attached. A solve replaces rates that other code has set, and
    synchronizes host and device once. If it fails, or a prefactor is invalid, nothing changes, with one warning.

    Args:
        parametrization: the parametrization of the trained model. Wrap or shard the model first.
        optimizer: an optimizer made of its ``param_groups``; other groups keep their learning rates.
        warmup_steps: number of monitored train steps without a solve.
        solve_interval: number of monitored train steps from one solve to the next.
        freeze_after: number of monitored train steps after which the exponents stay; None for never.
        sample_size: number of rows of a batch to measure.
        c_ema: share of an exponent's old value that is kept at each solve, at least 0 and less than 1.
        reference: ``"init"`` for a frozen copy of the model as it is now, which is saved with the handler; or a module
            of the same structure, such as a copy from before ``fully_shard``.
        generators: random generators of the forward pass that its modules, their classes and files do not hold, for a
            second pass to restore.
        group: the ranks to average over, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: prefix of the keys.

    Attributes:
        alignment: name -> current (alpha, omega, u).
        solution: the current exponents; ``c`` is a mapping from the names of layers, ``{layer}.bias`` for biases.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is invalid, or the optimizer has other groups, no step hooks, or an L2 penalty for
            weight decay.

    Examples:
        .. code-block:: python

            scheduler = MaxPScheduler(parametrization, optimizer, warmup_steps=100, solve_interval=10)
            scheduler.attach(trainer)
            cosine = CosineAnnealingScheduler(scheduler.as_optimizer(), "lr", 0.1, 0.0, cycle_size=1000)
            trainer.add_event_handler(Events.ITERATION_STARTED, cosine)
    """

    _state_dict_all_req_keys = ("steps", "lr_prefactor", "applied_prefactor", "alignment", "c", "reference")

    def __init__(
        self,
        parametrization: Parametrization,
        optimizer: Optimizer,
        *,
        warmup_steps: int = 0,
        solve_interval: int = 1,
        freeze_after: int | None = None,
        sample_size: int = 128,
        c_ema: float = 0.0,
        reference: str | nn.Module = "init",
        generators: Iterable[Any] = (),
        group: Group = None,
        prefix: str = "maxp",
    ) -> None:
        check_type("parametrization", parametrization, Parametrization, "Parametrization")
        check_optimizer(optimizer)
        if not has_step_hooks(optimizer):
            raise ValueError("Argument optimizer should call step hooks (if it wraps an optimizer, give that one)")
        super().__init__(parametrization.model, prefix, reference, generators, group)
        self.parametrization = parametrization
        self.optimizer = optimizer
        self._warmup_steps = check_count("warmup_steps", warmup_steps)
        self._solve_interval = check_count("solve_interval", solve_interval, least=1)
        self._freeze_after = math.inf if freeze_after is None else check_count("freeze_after", freeze_after, least=1)
        sample_size = check_count("sample_size", sample_size, least=1)
        self._c_ema = check_real("c_ema", c_ema, least=0.0, below=1.0)
        self._check_groups()
        self.alignment = dict.fromkeys(parametrization.layers, FULL)
        self.solution = parametrization.solution
        self._steps = 0
        self._schedule = SGD([torch.zeros(1, device="cpu")], parametrization.lr_prefactor)
        # Torch's schedulers warn if they step before their optimizer does.
        self._schedule._opt_called = True  # type: ignore[attr-defined]
        self._applied_prefactor = parametrization.lr_prefactor
        self._set_rates()
        layers = measurable_layers(self._reference.root, parametrization)
        self._calls = AlignmentCalls(self._reference, layers, sample_size)
        self._compare(self._calls.layers, self._calls)

    @property
    def lr_prefactor(self) -> float:
        """The factor of all learning rates; setting it sets them."""
        try:
            return check_real("lr_prefactor", self._schedule.param_groups[0]["lr"], least=0.0)
        except (TypeError, ValueError) as error:
            self.report("invalid_prefactor", f"{error}; it remains {self._applied_prefactor:g}")
            return self._applied_prefactor

    @lr_prefactor.setter
    def lr_prefactor(self, value: float) -> None:
        self._schedule.param_groups[0]["lr"] = check_real("lr_prefactor", value, least=0.0)
        self._set_rates()

    def as_optimizer(self) -> Optimizer:
        """Return an optimizer of one group, whose "lr" is ``lr_prefactor``, for schedulers of Ignite and torch."""
        return self._schedule

    def state_dict(self) -> OrderedDict[str, Any]:
        return OrderedDict(
            super().state_dict(),
            steps=self._steps,
            lr_prefactor=self.lr_prefactor,
            applied_prefactor=self._applied_prefactor,
            alignment={name: list(alignment) for name, alignment in self.alignment.items()},
            c=dict(self.solution.c),
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        Monitor.load_state_dict(self, state_dict)
        alignment = {name: Alignment(*numbers) for name, numbers in state_dict["alignment"].items()}
        if alignment.keys() != self.alignment.keys() or state_dict["c"].keys() != self.solution.c.keys():
            raise ValueError("Argument state_dict should be of a model with the same layers")
        super().load_state_dict(state_dict)
        self._steps = int(state_dict["steps"])
        self.alignment = alignment
        self.solution = self.solution._replace(c=dict(state_dict["c"]))
        self.lr_prefactor = state_dict["lr_prefactor"]
        # The optimizer's state, which may be loaded later, has these rates.
        self._applied_prefactor = state_dict["applied_prefactor"]

    # Events

    def _connect(self, engine: Engine, event: Any) -> None:
        super()._connect(engine, event)
        # Schedulers act at any moment, and in iterations that are not monitored too.
        hook = torch.compiler.disable(weak_method(self._before_optimizer_step))
        register_first(self.optimizer.register_step_pre_hook, hook, self._engine_handles)

    def _before_optimizer_step(self, *_: Any) -> None:
        if self.lr_prefactor != self._applied_prefactor:
            self._set_rates()

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        return super().train_step_contexts() if self._is_due() else []

    def _is_due(self) -> bool:
        steps = self._steps - self._warmup_steps
        return steps >= 0 and steps % self._solve_interval == 0 and self._steps < self._freeze_after

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        if self._is_due():
            super()._on_train_step_completed(engine)
        self._steps += 1
        values = {f"c/{name}": self.solution.c[name] for name in self.parametrization.layers}
        values |= {f"lr/{key}": group["lr"] for key, group in self._groups()}
        self.publish(**dict(zip(tags(values), values.values(), strict=True)))

    def _compared(self, incomplete: set[str]) -> None:
        measured = self._calls.result(incomplete, self.ranks).tolist()
        if all(math.isnan(value) for row in measured for value in row):
            return
        rows = dict(zip(self._calls.layers, measured, strict=True))
        for name, layer in self.parametrization.layers.items():
            if layer.module in rows:
                pairs = zip(self.alignment[name], rows[layer.module], strict=True)
                self.alignment[name] = Alignment(*(old if math.isnan(new) else new for old, new in pairs))
        try:
            solution = self.parametrization.solve(self.alignment)
        except ValueError as error:
            self.report("no_exponents", f"no solution for the measured alignment; exponents are unchanged: {error}")
            return
        kept = self._c_ema
        c = {key: kept * old + (1 - kept) * solution.c[key] for key, old in self.solution.c.items()}
        self.solution = solution._replace(c=c)
        self._set_rates()

    # Learning rates

    def _groups(self) -> list[tuple[str, dict[str, Any]]]:
        """The optimizer's groups that are of the parametrization, with their keys in the solution."""
        groups = [group for group in self.optimizer.param_groups if group.get("layer_name") is not None]
        return [(f"{group['layer_name']}{'.bias' if group.get('bias') else ''}", group) for group in groups]

    def _check_groups(self) -> None:
        groups = [group for _, group in self._groups()]
        is_known = {group["layer_name"] for group in groups} <= {*self.parametrization.layers, "_other"}
        trained = {parameter for group in groups for parameter in group["params"]}
        if not groups or not is_known or not trained <= {*self.model.parameters()}:
            raise ValueError("Argument optimizer should be made of the parametrization's param_groups")
        has_penalty = any(group.get("decoupled_weight_decay") is False for group in groups)
        if self.parametrization.weight_decay and has_penalty:
            raise ValueError(
                "Argument optimizer should decay weights apart from gradients, as AdamW does, for a parametrization "
                f"with weight_decay, but {type(self.optimizer).__name__} adds an L2 penalty to gradients"
            )

    def _set_rates(self) -> None:
        """Set each group's "lr" to prefactor * n^-c, its "c", and its "weight_decay" inversely."""
        layers, decay = self.parametrization.layers, self.parametrization.weight_decay
        self._applied_prefactor = prefactor = self.lr_prefactor
        for key, group in self._groups():
            layer = layers.get(group["layer_name"])
            group["c"] = self.solution.c.get(key, 0.0)
            factor = 1.0 if layer is None else layer.width ** -group["c"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(prefactor * factor)
            else:
                group["lr"] = prefactor * factor
            if decay and group.get("weight_decay"):  # not where the user has set it to 0
                group["weight_decay"] = decay / factor

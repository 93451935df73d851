"""CurvatureHandler: curvature of the loss, against the stability threshold of the learning rate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Adam, AdamW, Optimizer

from ignite_monitor.checks import check_count
from ignite_monitor.curvature.hessian import (
    Hessian,
    Product,
    flat_dtype,
    lanczos,
    largest_eigenvalue,
    length,
    start_vector,
)
from ignite_monitor.curvature.preconditioner import adam_preconditioner, makes_step_of, stability_limit
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import CURVATURE
from ignite_monitor.model.isolation import is_from_signal_handler
from ignite_monitor.model.names import parameters_of, unwrapped
from ignite_monitor.monitor import transfer
from ignite_monitor.monitor.arguments import check_generators, check_loss, check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.handle import MonitorHandle
from ignite_monitor.monitor.ranks import NOT_REDUCED, Group, Ranks
from ignite_monitor.reference.reference import evaluate, isolated_copy, user_forward_hooks

_MAX_RESIDUAL = 0.1  # of an eigenvalue that is reported, relative to it


class CurvatureHandler(Monitor, schema=CURVATURE):
    r"""Measure the curvature of the loss, and the stability threshold of the optimizer.

    {keys}

    With the gradient g and the Hessian H of the loss of one batch, ``along_gradient`` is :math:`g^\top H g / g^\top g`.
    In training the largest eigenvalue tends to rise to the threshold :math:`2 / \eta` (arXiv:2103.00065). For Adam the
    preconditioned Hessian :math:`P^{-1/2} H P^{-1/2}` counts, :math:`P = \sqrt{\hat v} + \epsilon` (arXiv:2207.14484).

    Before a monitored train step, ``loss`` is evaluated on a copy of the model, with the RNG state of the train step.
    The Hessian is only multiplied by vectors: ``1 + lanczos_steps`` products, with Adam twice as many, of about two
    backward passes. If the loss can't be differentiated twice, or the model has forward hooks of yours, nothing is
    reported, with one warning.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: the optimizer whose parameters count.
        loss: function of a model, without wrappers, and the batch that returns the loss of a train step, a tensor with
            one element. It runs under ``sdpa_kernel(SDPBackend.MATH)``.
        lanczos_steps: number of products for each eigenvalue.
        generators: random generators of the forward pass that its modules, their classes and files do not hold, for a
            second pass to restore.
        group: the ranks that hold the same weights, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: start of the keys.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has an invalid value, the optimizer holds none of the model's parameters, or they are
            sharded.

    Examples:
        .. code-block:: python

            def loss(model, batch):
                return mse_loss(model(batch[0]), batch[1])

            curvature = CurvatureHandler(model, optimizer, loss=loss)
            curvature.attach(trainer, Events.ITERATION_STARTED(every=500))
            curvature.log_to(tensorboard_logger, trainer)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Callable[[nn.Module, Any], Tensor],
        lanczos_steps: int = 20,
        generators: Iterable[Any] = (),
        group: Group = None,
        prefix: str = "curvature",
    ) -> None:
        super().__init__(model, prefix, group=group)
        check_optimizer(optimizer, model)
        check_loss(loss, model)
        self.optimizer = optimizer
        self.loss = loss
        self.lanczos_steps = check_count("lanczos_steps", lanczos_steps, least=1)
        self._generators = check_generators(generators)
        self._values: dict[str, Tensor] = {}
        self._tridiagonals: dict[str, Tensor] = {}  # by the name of their largest eigenvalue

    def attach(self, engine: Engine, event: Any = None) -> MonitorHandle:
        """Attach to an engine, as :meth:`Monitor.attach`.

        Args:
            engine: the engine that trains the model.
            event: ``Events.ITERATION_STARTED``, with any filter; None for one iteration in 2,000.
        """
        return super().attach(engine, Events.ITERATION_STARTED(every=2000) if event is None else event)

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def start_iteration(self, engine: Engine) -> None:
        self.reset_run_state()

    def reset_run_state(self) -> None:
        self._values = {}

    def clear(self, engine: Engine) -> None:
        super().clear(engine)
        self._tridiagonals = {}  # values of a run's last iteration may be read after its end

    def before_train_step(self, engine: Engine) -> None:
        parameters = [parameter for parameter in parameters_of(self.optimizer) if parameter.requires_grad]
        if not self.ranks.all_present:
            return
        if not self.ranks.reduces(parameters):
            self.report("not_measured", f"nothing is reported: {NOT_REDUCED}")
            return
        is_adam = makes_step_of(self.optimizer, Adam, AdamW)
        try:
            with rank_mean(self.ranks, parameters, 1 + (1 + self.lanczos_steps) * (1 + is_adam)) as mean:
                self._measure(engine, parameters, is_adam, mean)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            self._values, self._tridiagonals = {}, {}
            reason = str(error).partition("\n")[0] or type(error).__name__
            self.report("not_measured", f"nothing is reported, since the loss can't be measured: {reason}")

    def _measure(self, engine: Engine, parameters: list[nn.Parameter], is_adam: bool, mean: Product) -> None:
        root = unwrapped(self.model)
        for module in user_forward_hooks(root.modules()):
            raise RuntimeError(f"a {type(module).__name__} has a forward hook, which a copy of the model does not run")
        originals = list(root.parameters())
        second_derivatives = sdpa_kernel(SDPBackend.MATH)
        with isolated_copy(root, self.loss, self._generators) as model, second_derivatives:
            copies = {id(original): copy for original, copy in zip(originals, model.parameters(), strict=True)}
            if not copies.keys() >= set(map(id, parameters)):
                raise RuntimeError("the optimizer holds parameters of another model")
            copied = [copies[id(parameter)] for parameter in parameters]
            hessian = Hessian(evaluate(self.loss, model, engine.state.batch), copied)
            gradient = mean(hessian.gradient())
            scales = {"": torch.ones_like(gradient)}
            if is_adam:
                scales["_preconditioned"] = adam_preconditioner(self.optimizer, parameters, gradient).sqrt()
            for kind, scale in scales.items():

                def product(vector: Tensor, scale: Tensor = scale) -> Tensor:
                    return mean(hessian.times(vector / scale)) / scale

                direction = gradient / scale
                unit = direction / length(direction)
                self._values[f"along_gradient{kind}"] = unit @ product(unit)
                start = start_vector(direction, seed=0)
                self._tridiagonals[f"hessian_max_eigenvalue{kind}"] = lanczos(product, start, self.lanczos_steps)
        if is_adam or makes_step_of(self.optimizer, SGD):
            self._values["stability_threshold"] = stability_limit(self.optimizer, parameters)

    def _on_train_step_completed(self, engine: Engine) -> None:
        self.publish(**self._values)
        tridiagonals = self.deferred_tensors()
        if all(map(transfer.is_cpu, tridiagonals)):
            self.publish(**self.resolve_deferred([tensor.tolist() for tensor in tridiagonals]))

    def deferred_tensors(self) -> list[Tensor]:
        return [tridiagonal.flatten() for tridiagonal in self._tridiagonals.values()]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, elements in zip(self._tridiagonals, extra, strict=False):
            if all(map(math.isfinite, elements)):
                value, residual = largest_eigenvalue(elements[: self.lanczos_steps], elements[self.lanczos_steps :])
                if residual <= _MAX_RESIDUAL * abs(value):
                    values |= {name: value, f"{name}_residual": residual / abs(value) if value else 0.0}
        return values


@contextlib.contextmanager
def rank_mean(ranks: Ranks, parameters: Sequence[Tensor], count: int) -> Iterator[Product]:
    """Yield a function that returns the mean of flat vectors over ranks, with ``count`` collectives on every rank.

    A rank with an error takes part in the rest of them with NaN, so that no rank blocks.
    """
    left = count if ranks.size > 1 else 0
    size = sum(parameter.numel() for parameter in parameters) if left else 0
    device = parameters[0].device if parameters else None
    missing = torch.full((size,), math.nan, dtype=flat_dtype(parameters), device=device)  # before memory can run out

    def mean(vector: Tensor) -> Tensor:
        nonlocal left
        left -= 1
        return ranks.sum(vector) / ranks.size

    try:
        yield mean
    finally:
        while left > 0:
            mean(missing)

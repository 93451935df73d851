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
from torch.optim import SGD, Optimizer

from ignite_monitor.checks import check_count
from ignite_monitor.curvature.hessian import Hessian, Product, curvatures, flat_dtype, largest_eigenvalue
from ignite_monitor.keys import CURVATURE
from ignite_monitor.model.devices import move
from ignite_monitor.model.names import parameters_of, unwrapped
from ignite_monitor.monitor import transfer
from ignite_monitor.monitor.arguments import check_generators, check_loss, check_optimizer
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.handle import MonitorHandle
from ignite_monitor.monitor.ranks import NOT_REDUCED, Group, Ranks
from ignite_monitor.reference.reference import evaluate, isolated_copy, user_forward_hooks

_MAX_RESIDUAL = 0.1  # of an eigenvalue that is reported, relative to it


class CurvatureHandler(Monitor, schema=CURVATURE):
    r"""Measure the curvature of the loss, and the stability threshold of SGD.

    {keys}

    With the gradient g and the Hessian H of the loss of one batch, ``along_gradient`` is :math:`g^\top H g / g^\top g`.
    In training with SGD the largest eigenvalue tends to rise to the threshold :math:`2 / \eta` (arXiv:2103.00065).

    Before a monitored train step, ``loss`` is evaluated on a copy of the model, with the RNG state of the train step.
    The Hessian is only multiplied by vectors: ``1 + lanczos_steps`` products of about two backward passes. If the loss
    can't be differentiated twice, or the model has forward hooks of yours, nothing is reported, with one warning.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: the optimizer whose parameters count.
        loss: function of a model, without wrappers, and the batch that returns the loss of a train step, a tensor with
            one element. It runs under ``sdpa_kernel(SDPBackend.MATH)``.
        lanczos_steps: number of products for the eigenvalue.
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
        self._tridiagonal: Tensor | None = None  # of the Lanczos recurrence, on a device

    def attach(self, engine: Engine, event: Any = None) -> MonitorHandle:
        """Attach to an engine, as :meth:`Monitor.attach`.

        Args:
            engine: the engine that trains the model.
            event: ``Events.ITERATION_STARTED``, with any filter; None for one iteration in 2,000.
        """
        return super().attach(engine, Events.ITERATION_STARTED(every=2000) if event is None else event)

    def clear(self, engine: Engine) -> None:
        super().clear(engine)
        self._tridiagonal = None  # the value of a run's last iteration may be read after its end

    def before_train_step(self, engine: Engine) -> None:
        parameters = [parameter for parameter in parameters_of(self.optimizer) if parameter.requires_grad]
        if not self.ranks.all_present:
            return
        if not self.ranks.reduces(parameters):
            self.report("not_measured", f"nothing is reported: {NOT_REDUCED}")
            return
        with self._training_continues("not_measured", "nothing is reported, since the curvature can't be measured"):
            with rank_mean(self.ranks, parameters, 2 + self.lanczos_steps) as mean:
                along_gradient, tridiagonal = self._measure(engine.state.batch, parameters, mean)
            self.publish(along_gradient=along_gradient)
            if type(self.optimizer) is SGD:
                self.publish(stability_threshold=stability_threshold(self.optimizer, parameters))
            if transfer.is_cpu(tridiagonal):
                self.publish(**self.resolve_deferred([tridiagonal.tolist()]))
            else:
                self._tridiagonal = tridiagonal

    def _measure(self, batch: Any, parameters: Sequence[Tensor], mean: Product) -> tuple[Tensor, Tensor]:
        root = unwrapped(self.model)
        for module in user_forward_hooks(root.modules()):
            raise RuntimeError(f"a {type(module).__name__} has a forward hook, which a copy of the model does not run")
        originals = list(root.parameters())  # isolated_copy hides them
        with isolated_copy(root, self.loss, self._generators) as model, sdpa_kernel(SDPBackend.MATH):
            copies = {id(own): copy for own, copy in zip(originals, model.parameters(), strict=True)}
            if not copies.keys() >= set(map(id, parameters)):
                raise RuntimeError("the optimizer holds parameters of another model")
            hessian = Hessian(evaluate(self.loss, model, batch), [copies[id(item)] for item in parameters])
            return curvatures(mean(hessian.gradient()), lambda vector: mean(hessian.times(vector)), self.lanczos_steps)

    def deferred_tensors(self) -> list[Tensor]:
        return [] if self._tridiagonal is None else [self._tridiagonal]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        for elements in extra:
            if all(map(math.isfinite, elements)):
                value, residual = largest_eigenvalue(elements[: self.lanczos_steps], elements[self.lanczos_steps :])
                if residual <= _MAX_RESIDUAL * abs(value):
                    relative = residual / abs(value) if value else 0.0
                    return {"hessian_max_eigenvalue": value, "hessian_max_eigenvalue_residual": relative}
        return {}


def stability_threshold(optimizer: SGD, parameters: Sequence[Tensor]) -> Tensor:
    r"""Curvature above which SGD diverges on a quadratic loss, for the group with the smallest threshold.

    :math:`2 / \eta`, with momentum :math:`(2 + 2\beta) / \eta`, and with Nesterov's :math:`(2 + 2\beta) / ((1 +
    2\beta)\,\eta)` (arXiv:2103.00065, section 2), less the weight decay, which adds to each curvature; infinite if all
    learning rates are 0, NaN if a group maximizes.
    """
    ids, thresholds = set(map(id, parameters)), []
    for group in optimizer.param_groups:
        if ids.intersection(map(id, group["params"])):
            momentum = group["momentum"]
            dampening = group["dampening"] if momentum else 0.0  # SGD without momentum ignores it
            damped = 1 + 2 * momentum if group["nesterov"] else 1 - dampening
            rate = torch.as_tensor(math.nan if group["maximize"] else group["lr"], dtype=flat_dtype(parameters))
            threshold = (2 + 2 * momentum) / (damped * rate.detach().reshape(())) - group["weight_decay"]
            thresholds.append(move(threshold.clamp(min=0), parameters[0].device))
    return torch.stack(thresholds).min()


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

"""CurvatureHandler: how sharply the loss bends, beside what the learning rate stands."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from ignite.engine import Engine, Events, EventsList
from ignite.engine.events import CallableEventWithFilter
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ignite_monitor.checks import check_count, check_function, check_type
from ignite_monitor.curvature.hessian import Hessian, Tridiagonal, lanczos, largest_eigenvalue
from ignite_monitor.curvature.preconditioner import adam_preconditioner, is_kind, stability_limit
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import CURVATURE
from ignite_monitor.model._torch import buffers_of_each
from ignite_monitor.model.eager import Eager
from ignite_monitor.model.isolation import reference_run
from ignite_monitor.model.names import unwrapped
from ignite_monitor.model.norms import any_sharded, total_norm
from ignite_monitor.model.optimizers import check_holds, check_optimizer, parameters_of
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.monitor import publisher
from ignite_monitor.monitor.base import Handlers, Monitor, MonitorHandle
from ignite_monitor.monitor.ranks import all_take_part, sum_over_ranks, world_size
from ignite_monitor.reference.isolation import put_back
from ignite_monitor.reference.rng import preserved_rng_state

_REMEDY = "; attention can under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which the argument loss is run under"
_WORST = 0.1  # how far from an eigenvalue, for its size, what is published may be


class CurvatureHandler(Monitor, schema=CURVATURE):
    r"""Measures the curvature of the loss at the weights that the train step starts with, and what a step stands.

    {keys}

    With the gradient g and the Hessian H of the loss of one batch, ``along_gradient`` is

    .. math:: \frac{g^\top H g}{g^\top g}.

    A step of gradient descent along an eigenvector overshoots by more than it gains once the eigenvalue exceeds
    :math:`2 / \eta` for the learning rate :math:`\eta`. The largest eigenvalue tends to rise to this limit and to stay
    there (arXiv:2103.00065). For Adam the preconditioned Hessian :math:`P^{-1/2} H P^{-1/2}` counts, :math:`P =
    \sqrt{\hat v} + \epsilon` (arXiv:2207.14484); losses spike where it exceeds the limit for long (arXiv:2506.04805).
    ``limit`` is that of SGD, Adam or AdamW, with momentum, at the largest learning rate; of other optimizers none is
    known. It is exact where a batch holds all items; with small batches, momentum and Adam the loss rises before.

    The Hessian is only multiplied by vectors, through the graph of the loss on which the train step calls
    ``backward()``: the same batch, the same dropout masks, and no further forward pass. A product costs about two
    backward passes, and there are ``1 + lanczos_steps`` of them, with Adam as many again; with the defaults one
    iteration in two thousand is looked at. Gradients, buffers, random numbers and the optimizer are not touched; hooks
    of yours on tensors and modules run in these products too. Of DistributedDataParallel the mean over the ranks'
    batches counts.

    Where an operation has no second derivative nothing is published, and a warning names it. The quick kernels of
    ``scaled_dot_product_attention`` are such: run the train step under ``sdpa_kernel(SDPBackend.MATH)``, or give
    ``loss``, which is run under it.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: the optimizer whose parameters count.
        loss: function of the model, without wrappers, and the batch that returns the loss, a tensor with one element;
            None for the loss of the iteration's first ``backward()``. It runs before the train step, with the same
            random numbers, and leaves no trace.
        scaler: the GradScaler of the train step.
        micro_batches: how many backward passes an optimizer step is made from, where the loss of each is divided by
            that; the curvature is that of the first one's batch.
        lanczos_steps: how many products to look for the largest eigenvalue with; of a few the second largest may be
            taken for it, which the error does not show.
        prefix: what the values' names start with.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, the optimizer holds none of the model's parameters, or
            they are sharded.

    Examples:
        .. code-block:: python

            curvature = CurvatureHandler(model, optimizer)
            curvature.attach(trainer, Events.ITERATION_STARTED(every=500))
            curvature.log_to(tensorboard_logger, trainer)
    """

    _state_dict_all_req_keys = ("looks",)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        scaler: GradScaler | None = None,
        micro_batches: int = 1,
        lanczos_steps: int = 20,
        prefix: str = "curvature",
    ) -> None:
        super().__init__(model, prefix)
        check_whole(model)
        check_optimizer(optimizer)
        check_holds(optimizer, model)
        if any_sharded(model.parameters()):
            raise ValueError("Argument model should not be sharded: give a model whose ranks hold whole parameters")
        check_function("loss", loss, "the model", "the batch")
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        self.optimizer = optimizer
        self.loss = loss
        self.scaler = scaler
        self.micro_batches = check_count("micro_batches", micro_batches, least=1)
        self.lanczos_steps = check_count("lanczos_steps", lanczos_steps, least=1)
        self._over_ranks = any(isinstance(each, DistributedDataParallel) for each in model.modules())
        self._found: dict[str, Tridiagonal] = {}
        self._values: dict[str, Tensor] = {}
        self._warned = False
        self._looks = 0
        self.reset_run_state()

    def state_dict(self) -> OrderedDict[str, Any]:
        """How many looks there have been: each starts in a direction of its own."""
        return OrderedDict(looks=self._looks)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._looks = check_count("looks", state_dict["looks"])

    def attach(self, engine: Engine, event: CallableEventWithFilter | EventsList | None = None) -> MonitorHandle:
        """Start to watch an engine's iterations.

        Args:
            engine: the engine that trains the model.
            event: ``Events.ITERATION_STARTED``, with any filter; None for one iteration in two thousand.

        Returns:
            A handle whose ``remove()`` detaches again; a ``with`` block does it at its end.

        Raises:
            TypeError: if ``engine`` is no Engine, or ``event`` no event.
            ValueError: if ``event`` is another event, the monitor is attached already, or the names that it needs in
                the engine's state are taken.
        """
        return super().attach(engine, Events.ITERATION_STARTED(every=2000) if event is None else event)

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def start_iteration(self, engine: Engine) -> None:
        self.reset_run_state()
        self._looks += 1

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        engine = self._attached_to()
        if not self._is_running or engine is None:
            return []
        if self.loss is not None:
            self._measure_apart(engine, self.loss)
            return []
        return [Eager(self.model), _BackwardCalls(weakref.WeakMethod(self._measure_call))]

    def reset_run_state(self) -> None:
        self._found, self._values = {}, {}
        self._kept: Tensor | None = None
        self._is_done = False

    def _on_gradients_ready(self, engine: Engine, ready: GradientsReady) -> None:
        if self.loss is None and not (self._is_done or self._values) and ready.reaches(self.optimizer):
            self._say_nothing("no backward() of a tensor with one element was seen: give the argument loss")

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        self._is_done = self._is_done or step.is_of(self.optimizer)

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running or not self._values:
            return
        if self._kept is not None:
            self._values = {name: torch.where(self._kept, each, math.nan) for name, each in self._values.items()}
            self._found = {
                name: found._replace(diagonal=torch.where(self._kept, found.diagonal, math.nan))
                for name, found in self._found.items()
            }
        self.publish(**self._values)
        if publisher.is_on_host(self._found["hessian_max_eigenvalue"].diagonal):
            self.publish(**self.resolve_deferred([each.tolist() for found in self._found.values() for each in found]))

    # The loss

    def _measure_apart(self, engine: Engine, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        model = unwrapped(self.model)
        with reference_run(), Eager(model), sdpa_kernel(SDPBackend.MATH):
            self._measure(lambda: loss(model, engine.state.batch), 1.0)

    def _measure_call(self, loss: Tensor, gradient: Tensor | None) -> None:
        present = [each.grad for each in parameters_of(self.optimizer) if each.grad is not None]
        if self._is_done or (self._values and present):
            if not self._is_done:  # what was measured may have been zeroed in place
                kept = total_norm((each.detach() for each in present), 2.0) != 0
                self._kept = kept if self._kept is None else self._kept & kept
            return
        factor: float | Tensor = float(self.micro_batches)
        if self.scaler is not None:
            factor = factor / self.scaler.scale(torch.ones((), device=loss.device))
        self._measure(lambda: loss, factor if gradient is None else factor * gradient.detach().reshape(()))

    def _say_nothing(self, reason: str) -> None:
        self._is_done = True
        if not self._warned:
            self._warned = True
            self.logger.warning("%s: nothing is published: %s", self.prefix, reason)

    # The curvature

    def _measure(self, loss: Callable[[], Tensor], factor: float | Tensor) -> None:
        if self._over_ranks and not all_take_part(self.model):
            self._is_done = True
            return
        modules = list(self.model.modules())
        devices = {each.device for each in self.model.parameters()}
        # Checkpointed parts run once more.
        with preserved_rng_state(devices), put_back(modules, buffers_of_each(modules)), torch.enable_grad():
            parameters = [each for each in parameters_of(self.optimizer) if each.requires_grad]
            hessian = Hessian(loss, parameters, factor, self._mean_over_ranks)
            if hessian.reached or hessian.error:  # else the loss is another model's
                try:
                    self._look_at(hessian)
                except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                    hessian.error = f"{type(error).__name__}: {error}".partition("\n")[0]
        if hessian.error:
            self._values = {}
            attention = "scaled_dot_product" in hessian.error
            self._say_nothing(f"the loss can't be differentiated twice: {hessian.error}{_REMEDY * attention}")

    def _look_at(self, hessian: Hessian) -> None:
        gradient = hessian.gradient()
        scales = {"": torch.ones_like(gradient)}
        preconditioner = adam_preconditioner(self.optimizer, hessian.parameters, gradient)
        if preconditioner is not None:
            scales["_preconditioned"] = preconditioner.sqrt()
        for kind, scale in scales.items():
            direction, product = gradient / scale, partial(_product, hessian, scale)
            self._values[f"along_gradient{kind}"] = direction @ product(direction) / (direction @ direction)
            self._found[f"hessian_max_eigenvalue{kind}"] = lanczos(
                product, _start_of(direction, self._looks), self.lanczos_steps
            )
        knows = preconditioner is not None or is_kind(self.optimizer, "SGD")
        limit = stability_limit(self.optimizer, hessian.parameters) if knows else None
        if limit is not None:
            self._values["stability_threshold"] = (
                limit.to(gradient) if isinstance(limit, Tensor) else gradient.new_full((), limit)
            )

    def _mean_over_ranks(self, vector: Tensor) -> Tensor:
        return sum_over_ranks(vector) / world_size() if self._over_ranks else vector

    # Values on the host

    def deferred_tensors(self) -> list[Tensor]:
        return [each for found in self._found.values() for each in found] if self._values else []

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, diagonal, beside in zip(self._found, extra[::2], extra[1::2], strict=False):
            if all(map(math.isfinite, (*diagonal, *beside))):
                value, error = largest_eigenvalue(diagonal, beside)
                if error <= _WORST * abs(value):
                    values |= {name: value, f"{name}_error": error / abs(value) if value else 0.0}
        return values


def _product(hessian: Hessian, scale: Tensor, vector: Tensor) -> Tensor:
    return hessian.times(vector / scale) / scale


def _start_of(direction: Tensor, seed: int) -> Tensor:
    """Half of it in a direction, half of it random: what the direction has nothing of is found too."""
    generator = torch.Generator(direction.device).manual_seed(seed)
    other = torch.randn(direction.shape, generator=generator, dtype=direction.dtype, device=direction.device)
    tiny = torch.finfo(direction.dtype).tiny
    return torch.add(direction / direction.norm().clamp(min=tiny), other / other.norm())


class _BackwardCalls(TorchFunctionMode):
    """Tells of tensors that ``backward()`` is called on, and what they are multiplied by, before it runs."""

    def __init__(self, tell: weakref.WeakMethod[Callable[[Tensor, Tensor | None], None]]) -> None:
        super().__init__()
        self._tell = tell
        self._retaining: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and args[0].numel() == 1 and (tell := self._tell()) is not None:
            before = [(each, each.grad) for each in self._retaining]
            tell(args[0], kwargs.get("gradient", args[1] if len(args) > 1 else None))
            for each, gradient in before:
                each.grad = gradient
        elif func is Tensor.retain_grad:
            self._retaining.append(args[0])
        return func(*args, **kwargs)

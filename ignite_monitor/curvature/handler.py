"""CurvatureHandler: how sharply the loss bends, beside what the learning rate stands."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
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

from ignite_monitor.checks import check_count, check_type
from ignite_monitor.curvature.hessian import Hessian, Tridiagonal, lanczos, largest_eigenvalue
from ignite_monitor.curvature.preconditioner import adam_preconditioner, stability_limit
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import CURVATURE
from ignite_monitor.model._torch import buffers_of_each
from ignite_monitor.model.eager import Eager
from ignite_monitor.model.names import unwrapped
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.optimizers import check_holds, check_optimizer, parameters_of
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.monitor import publisher
from ignite_monitor.monitor.base import Handlers, Monitor, MonitorHandle
from ignite_monitor.monitor.ranks import all_take_part, sum_over_ranks, world_size
from ignite_monitor.reference.rng import drawn_again
from ignite_monitor.reference.unnoticed import marked, put_back

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
    ``limit`` is that of the optimizer's kind, with its momentum, and of the largest learning rate.

    The Hessian is only multiplied by vectors, through the graph of the loss on which the train step calls
    ``backward()``: the same batch, the same dropout masks, and no further forward pass. A product costs about two
    backward passes, and there are ``1 + lanczos_steps`` of them, with Adam another ``lanczos_steps``; with the defaults
    one iteration in a thousand is looked at. Gradients, buffers, random numbers and the optimizer are not touched;
    hooks of yours on tensors and modules run in these products too. Of DistributedDataParallel the mean over the ranks'
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
        if loss is not None and not callable(loss):
            raise TypeError(f"Argument loss should be a function of model and batch, or None, but given {type(loss)}")
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        self.optimizer = optimizer
        self.loss = loss
        self.scaler = scaler
        self.micro_batches = check_count("micro_batches", micro_batches, least=1)
        self.lanczos_steps = check_count("lanczos_steps", lanczos_steps, least=1)
        self._over_ranks = any(isinstance(each, DistributedDataParallel) for each in model.modules())
        self._found: dict[str, Tridiagonal] = {}
        self._measured = self._warned = False
        self._looks = 0

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
            event: ``Events.ITERATION_STARTED``, with any filter; None for one iteration in a thousand.

        Returns:
            A handle whose ``remove()`` detaches again; a ``with`` block does it at its end.

        Raises:
            TypeError: if ``engine`` is no Engine, or ``event`` no event.
            ValueError: if ``event`` is another event, the monitor is attached already, or the names that it needs in
                the engine's state are taken.
        """
        return super().attach(engine, Events.ITERATION_STARTED(every=1000) if event is None else event)

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def start_iteration(self, engine: Engine) -> None:
        self._found = {}
        self._measured = False

    def contexts(self) -> list[AbstractContextManager[Any]]:
        engine = self._attached_to()
        if not self._is_running or engine is None:
            return []
        if self.loss is not None:
            self._measure_apart(engine, self.loss)
            return []
        return [Eager(self.model), _BackwardCalls(weakref.WeakMethod(self._measure_call))]

    def release(self) -> None:
        self._found = {}

    def _on_train_step_completed(self, engine: Engine) -> None:
        if self._is_running and self._found and publisher.is_on_host(next(iter(self._found.values())).diagonal):
            tables = [each.tolist() for found in self._found.values() for each in found]
            self.publish(**self.on_transfer(tables))

    # The loss

    def _measure_apart(self, engine: Engine, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        model = unwrapped(self.model)
        modules = list(model.modules())
        devices = {each.device for each in model.parameters()}
        with drawn_again(devices), put_back(modules, buffers_of_each(modules)), marked():  # noqa: SIM117
            with Eager(model), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
                self._attempt(lambda: self._measure(loss(model, engine.state.batch).reshape(()), 1.0))

    def _measure_call(self, loss: Tensor) -> None:
        if self._measured:
            return
        factor: float | Tensor = float(self.micro_batches)
        if self.scaler is not None:
            factor = factor / self.scaler.scale(torch.ones((), device=loss.device))
        modules = list(self.model.modules())
        # Checkpointed parts run once more.
        with drawn_again({loss.device}), put_back(modules, buffers_of_each(modules)), torch.enable_grad():
            self._attempt(lambda: self._measure(loss.reshape(()), factor))

    def _attempt(self, measure: Callable[[], None]) -> None:
        try:
            measure()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._found = {}
            self._measured = True
            self.retract()
            if not self._warned:
                self._warned = True
                self.logger.warning(
                    "%s: nothing is published, since the loss can't be differentiated twice: %s; attention can under "
                    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which the argument loss is run under",
                    self.prefix,
                    str(error).partition("\n")[0],
                )

    # The curvature

    def _measure(self, loss: Tensor, factor: float | Tensor) -> None:
        if self._over_ranks and not all_take_part(self.model):
            return
        parameters = [each for each in parameters_of(self.optimizer) if each.requires_grad]
        hessian = Hessian(loss, parameters, factor, self._mean_over_ranks)
        gradient = hessian.gradient
        if not len(gradient):
            return  # the loss is another model's
        self._measured = True
        square = torch.dot(gradient, gradient)
        self.publish(along_gradient=torch.dot(gradient, hessian.times(gradient)) / square)
        limit = stability_limit(self.optimizer, hessian.parameters)
        if limit is not None:
            self.publish(limit=limit)
        self._looks += 1
        start = _start_of(gradient, self._looks)
        self._found = {"largest": lanczos(hessian.times, start, self.lanczos_steps)}
        scales = adam_preconditioner(self.optimizer, hessian.parameters, gradient)
        if scales is not None:
            roots = scales.sqrt()
            start = _start_of(gradient / roots, self._looks)
            self._found["largest_preconditioned"] = lanczos(
                lambda vector: hessian.times(vector / roots) / roots, start, self.lanczos_steps
            )

    def _mean_over_ranks(self, vector: Tensor) -> Tensor:
        return sum_over_ranks(vector) / world_size() if self._over_ranks else vector

    # Values on the host

    def extra_transfer(self) -> list[Tensor]:
        return [each for found in self._found.values() for each in found]

    def on_transfer(self, extra: list[list[float]]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, diagonal, beside in zip(self._found, extra[::2], extra[1::2], strict=True):
            if all(map(_is_finite, (*diagonal, *beside))):
                value, error = largest_eigenvalue(diagonal, beside)
                if error <= _WORST * abs(value):
                    values |= {name: value, f"{name}_error": error / abs(value) if value else 0.0}
        return values


def _start_of(direction: Tensor, seed: int) -> Tensor:
    """Half of it in a direction, half of it random: what the direction has nothing of is found too."""
    generator = torch.Generator(direction.device).manual_seed(seed)
    other = torch.randn(direction.shape, generator=generator, dtype=direction.dtype, device=direction.device)
    tiny = torch.finfo(direction.dtype).tiny
    return torch.add(direction / direction.norm().clamp(min=tiny), other / other.norm())


def _is_finite(number: float) -> bool:
    return number - number == 0


class _BackwardCalls(TorchFunctionMode):
    """Tells of tensors that ``backward()`` is called on, before it runs."""

    def __init__(self, tell: weakref.WeakMethod[Callable[[Tensor], None]]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward and args[0].numel() == 1 and (tell := self._tell()) is not None:
            tell(args[0])
        return func(*args, **(kwargs or {}))

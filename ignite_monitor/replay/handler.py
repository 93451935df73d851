"""ReplayCheckHandler: a second pass of the train step, compared with the first one bit by bit."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ignite_monitor.events.hooks import after_each_backward
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.events.source import EventSource
from ignite_monitor.keys import REPLAY
from ignite_monitor.model import isolation
from ignite_monitor.model._torch import backward_number, buffers_in, in_backward, version
from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.dtensor import local, reshard
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import listed, named_parameters, parameters_of
from ignite_monitor.model.tensors import bits_of, tensors_in
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import all_take_part, max_over_ranks, world_size


class SecondPassEnded(BaseException):
    """Ends a second pass; no ``except Exception`` of a train step catches it."""


class FirstPass:
    """State before a train step, and its gradients; earlier gradients are copied in monitored iterations only."""

    def __init__(self, model: nn.Module, train_step: Any, random: Any, is_monitored: bool) -> None:
        self.count, self.backward = 0, -1  # backward passes; number of the one that gave the gradients
        self.gradients: dict[str, Tensor] = {}  # copies
        self._model, self._train_step, self._random, self._is_monitored = model, train_step, random, is_monitored
        self.state = train_step.args[0].state
        self._attributes = {**vars(self.state), "metrics": dict(self.state.metrics)}
        self._restore_rng = isolation.rng_restorer(*random)
        copies: dict[Any, Tensor] = {item: item.clone() for item in model.buffers() if not nn.parameter.is_lazy(item)}
        self._buffers = [{key: copies.get(item) for key, item in buffers_in(own).items()} for own in model.modules()]
        earlier = {item: item.grad for item in model.parameters() if item.grad is not None}
        self._earlier = {key: item.clone() if is_monitored else item for key, item in earlier.items()}
        batch = [item for _, item in tensors_in(self.state.batch)]
        self._inputs = [*batch, *model.parameters(), *self._earlier.values()]
        self.fingerprint = self.measure()

    def measure(self) -> list[Any]:
        """Version counters of batch, weights and earlier gradients; in monitored iterations sums of weights' bits."""
        weights = map(local, self._model.parameters() if self._is_monitored else ())
        return [list(map(version, self._inputs)), *(bits_of(item).sum() for item in weights if has_local_data(item))]

    def repeat(self, source: EventSource, others: list[Any]) -> Tensor:
        """Run the train step again, restore the model and what ``others`` hold, and compare the gradients: (n, 2)."""
        second: dict[str, Tensor] = {}

        def backward_ended() -> None:
            if all(getattr(module, "require_backward_grad_sync", True) for module in self._model.modules()):
                self.count -= 1
            if not self.count:
                second.update(copied_gradients(self._model))
                raise SecondPassEnded

        modules = [item for item in others if isinstance(item, nn.Module) and getattr(item, "training", False)]
        held = [item for other in others if isinstance(other, Optimizer) for item in parameters_of(other)]
        parameters, current, cached = [*self._model.parameters()], vars(self.state), torch.is_autocast_cache_enabled()
        with (
            suppress(SecondPassEnded),
            isolation.preserved_parameters(parameters, held),
            isolation.preserved_rng_state(*self._random),
            isolation.isolated_pass(self._model),
            isolation.preserved_buffers(modules),
            after_each_backward(parameters, backward_ended),
            torch.enable_grad(),
        ):
            torch.set_autocast_cache_enabled(cached)  # gradients of shared weights depend on it
            for registry, buffers in zip(map(buffers_in, self._model.modules()), self._buffers, strict=True):
                registry.update(buffers)
            for item, gradient in self._earlier.items():
                item.grad = gradient.clone()
            self._restore_rng()
            try:
                self.state.__dict__, source.running = self._attributes, False  # no other monitor measures this pass
                self._train_step()
            finally:
                self.state.__dict__, source.running = current, True
                reshard(self._model)
        rows = [difference(self.gradients[name], second[name]) for name in self.gradients | second]
        return torch.stack([move(row, device_of(self._model)) for row in rows])


def copied_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients of a model, by name."""
    gradients = {name: item.grad for name, item, _ in named_parameters(model) if item.grad is not None}
    return {name: local(item).detach().to_dense().clone() for name, item in gradients.items()}


def difference(first: Tensor, second: Tensor) -> Tensor:
    """Return whether two gradients of one parameter differ in any bit, and their largest difference."""
    exact = torch.promote_types(first.dtype, torch.float32)
    differences = (second.to(exact) - first.to(exact)).abs().flatten()
    largest = nn.functional.pad(differences, (0, 1)).amax()  # a rank may hold no element
    return torch.stack([(bits_of(first) != bits_of(second)).any().float(), largest.float()])


class ReplayCheckHandler(Monitor, schema=REPLAY):
    """Run the train step once more, and compare the gradients of both passes bit by bit.

    In monitored iterations, and at every spike of ``GradMonitor``, the train step runs again before the first optimizer
    step: same batch, weights and RNG state. It ends with its last backward, before any step of an optimizer, scheduler
    or scaler; then everything is restored. Other side effects happen twice. A warning names the tensors that differ.

    A difference is not reported if the second pass may have started from another state, nor at a spike between
    monitored iterations before a second pass has been the same. Attach the handler on all ranks.

    {keys}

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped), with all modules that it trains.
        optimizer: its optimizer.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument is of another type.

    Examples:
        .. code-block:: python

            replay = ReplayCheckHandler(model, optimizer)
            replay.attach(trainer, Events.ITERATION_STARTED(every=1000))
    """

    _state_dict_all_req_keys = ("same_count",)

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, prefix: str = "replay") -> None:
        super().__init__(model, prefix)
        check_optimizer(optimizer)
        self._same_count = 0  # second passes that gave the same gradients
        self.reset_run_state()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Number of second passes that gave the same gradients."""
        return OrderedDict(same_count=self._same_count)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._same_count = int(state_dict["same_count"])

    def handlers(self) -> Handlers:
        return [(MonitorEvents.GRADIENTS_READY, self._on_gradients), (MonitorEvents.SPIKE_DETECTED, self._on_gradients)]

    def reset_run_state(self) -> None:
        self._first: FirstPass | None = None  # until it is replayed
        self._random: tuple[Any, Any] | None = None  # devices and generators with an RNG state
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()  # modules and optimizers of this process

    def _start(self, engine: Engine) -> None:
        super()._start(engine)
        self._is_due = self._monitored  # by the filters
        self._monitored |= any(hasattr(monitor, "flag") for monitor in EventSource.of(engine).monitors)  # of spikes

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        source = self._source
        if source is None or source.train_step is None:
            return []
        is_first = self._random is None
        if is_first or self._is_due:  # a train step may create generators later
            devices = {item.device for item in (*self.model.parameters(), *self.model.buffers())}
            self._random = devices, isolation.generators_used_by(source.train_step.func, self.model)
        # In the first train step DistributedDataParallel sets up its buckets.
        return [] if is_first and world_size() > 1 else [self._watched(source.train_step)]

    @contextmanager
    def _watched(self, train_step: Any) -> Iterator[None]:
        """Replay the train step before its first optimizer step, or at its end if it makes none."""
        reshard(self.model)
        self._first = FirstPass(self.model, train_step, self._random, self._is_due)
        with register_optimizer_step_pre_hook(torch.compiler.disable(self._replay)):
            yield
            self._replay()

    def _on_gradients(self, engine: Engine, ready: Any = None) -> None:
        """Copy the gradients, once per backward: handlers of a spike may change them."""
        first, number, is_spike = self._first, backward_number(), ready is None
        if first is not None:
            first.count += not is_spike
            if (is_spike or self._is_due or first.gradients) and number not in (-1, first.backward):
                first.backward, first.gradients = number, copied_gradients(self.model)

    def _replay(self, *step: Any) -> None:
        if isolation.in_second_pass():
            raise SecondPassEnded
        first, source, self._first = self._first, self._source, None
        if first is None or source is None or not (self._is_due or first.gradients):
            return
        device, error = device_of(self.model), ""
        # An autocast can't be entered again before it is left.
        is_inside = in_backward() or any(map(torch.is_autocast_enabled, {"cpu", device.type}))
        if is_inside or not (first.gradients and first.count and all_take_part(self.model)):
            place = "before any backward, or inside of backward, autocast or join()"
            self._warn_once(f"not reported: the first optimizer step is made {place}")
            return
        has_handlers = source.listened or any(callable(getattr(item, "on_spike", None)) for item in source.monitors)
        is_unknown = (has_handlers and first.count > 1) or not (self._is_due or self._same_count)
        if not self._others:
            objects, kinds = gc.get_objects(), (nn.Module, Optimizer)
            self._others = weakref.WeakSet(item for item in objects if issubclass(type(item), kinds))
        try:
            table = first.repeat(source, list(self._others))
        except Exception as raised:  # noqa: BLE001 - of the user's train step, which was not written to run twice
            error, table = f"{type(raised).__name__}: {raised}", torch.ones(1, 2, device=device)
        changes = [before != now for before, now in zip(first.fingerprint, first.measure(), strict=False)]
        # Without a step a GradScaler may have changed its scale.
        causes = [*changes, is_unknown, bool(error), ~table.isfinite().all() & (not step)]
        unknown = torch.stack([move(torch.as_tensor(cause), device) for cause in causes]).any()
        flags = max_over_ranks(torch.stack((table[:, 0].any(), unknown)).float()) > 0
        self.publish(reproducible=torch.where(flags.all(), torch.nan, (~flags[0]).float()))
        differs = bool(flags[0])  # the only synchronization of a second pass that gave the same gradients
        pairs = zip(first.gradients, table.tolist() if differs else (), strict=False)
        text = listed([f"{name} (by up to {largest:.3g})" for name, (is_other, largest) in pairs if is_other], 8)
        text = error or text or "none of this rank"
        if not differs:
            self._same_count += 1
        elif flags[1]:
            self._warn_once("a difference (%s) is not reported: the second pass may have had another state", text)
        else:
            self.logger.warning(
                "%s: iteration %d: a second pass gave other gradients: %s. %d earlier ones were the same. If most are, "
                "a hardware fault is likely, else a nondeterministic operation or a state that the train step keeps.",
                *(self._title, first.state.iteration, text, self._same_count),
            )

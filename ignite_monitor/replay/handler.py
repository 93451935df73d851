"""ReplayCheckHandler: a second pass of the train step, compared with the first one bit by bit."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ignite_monitor.events.hooks import after_each_backward
from ignite_monitor.events.source import EventSource
from ignite_monitor.keys import REPLAY
from ignite_monitor.model import isolation
from ignite_monitor.model._torch import buffers_in, in_backward, parameters_in, version
from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.dtensor import local, reshard
from ignite_monitor.model.names import listed, named_parameters, parameters_of
from ignite_monitor.model.tensors import bits_of, tensors_in
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.replay.kept_state import KeptState

_INPUTS = ("batch", "dataloader")  # attributes of the state that no train step keeps
_MIN_SAME = 3  # second passes with the same gradients, before another one is taken for a fault


class SecondPassEnded(BaseException):
    """Ends a second pass; no ``except Exception`` of a train step catches it."""


class FirstPass:
    """State before a train step, and the gradients after each of its backward passes."""

    def __init__(self, model: nn.Module, train_step: Any) -> None:
        self.passes = self._left = 0  # backward passes, and those left in a second pass
        self.is_replayed = False
        self.gradients: dict[str, Tensor] = {}  # copies
        self._second: dict[str, Tensor] = {}
        self._model, self._train_step = model, train_step
        devices = {item.device for item in (*model.parameters(), *model.buffers())}
        self._random = devices, isolation.generators_used_by(train_step.func, model)
        self.state = train_step.args[0].state
        self._attributes = {**vars(self.state), "metrics": dict(self.state.metrics)}
        self._restore_rng = isolation.rng_restorer(*self._random)
        copies: dict[Any, Tensor] = {item: item.clone() for item in model.buffers() if not nn.parameter.is_lazy(item)}
        self._buffers = [{key: copies.get(item) for key, item in buffers_in(own).items()} for own in model.modules()]
        self._earlier = {item: item.grad.clone() for item in model.parameters() if item.grad is not None}
        self._members, self._buffer_names, self._versions = self._structure(), self._names(), self._batch_versions()

    def backward_ended(self) -> None:
        """Copy the gradients; end a second pass after as many backward passes as in the first one."""
        if not self.is_replayed:
            self.passes += 1
            self.gradients = copied_gradients(self._model)
        elif self._left:
            self._left -= 1
            if not self._left:
                self._second = copied_gradients(self._model)
                raise SecondPassEnded

    def obstacle(self, others: Iterable[Any]) -> str:
        """Copy what the train step and other modules and optimizers keep; return why it can't be run again now."""
        # An autocast can't be entered again before it is left.
        if in_backward() or any(map(torch.is_autocast_enabled, {"cpu", device_of(self._model).type})):
            return "the first optimizer step is made inside of backward or autocast"
        if not self.gradients:
            return "the first optimizer step is made before any backward"
        if list(map(id, self._members)) != list(map(id, self._structure())) or self._names() != self._buffer_names:
            return "the train step adds, removes or replaces modules, parameters or buffers"
        if self._batch_versions() != self._versions:
            return "the train step changes its batch"
        self._modules = [item for item in others if isinstance(item, nn.Module)]
        self._optimizers = [item for item in others if isinstance(item, Optimizer)]
        reached = [self._train_step.func, {key: value for key, value in vars(self.state).items() if key not in _INPUTS}]
        self._kept = KeptState(reached, self._modules, self._optimizers)
        iterators = self._kept.iterators
        return f"a second pass may draw from an iterator: {listed(iterators, 4)}" if iterators else ""

    def repeat(self, source: EventSource) -> tuple[Tensor, list[str]]:
        """Run the train step again, and restore everything.

        Returns:
            For every parameter whether its gradients differ, and by how much: (n, 2). State that the step has kept.

        Raises:
            RuntimeError: if it made fewer backward passes.
        """
        held = [item for optimizer in self._optimizers for item in parameters_of(optimizer)]
        training = [item for item in self._modules if getattr(item, "training", False)]
        own, current, cached = {*self._model.parameters()}, vars(self.state), torch.is_autocast_cache_enabled()
        outside = (item for module in self._modules for item in module.parameters() if not item.is_meta)
        others = list(dict.fromkeys(item for item in outside if item not in own))
        before = [item.detach().clone() for item in others]
        self._left, moved = self.passes, []
        try:
            with (
                suppress(SecondPassEnded),
                isolation.preserved_parameters([*own, *others], held),
                isolation.preserved_rng_state(*self._random),
                isolation.isolated_pass(self._model),
                isolation.preserved_buffers(training),
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
                    compared = zip(others, before, strict=True)
                    moved = [move((item.detach() != copy).any(), torch.device("cpu")) for item, copy in compared]
        finally:
            self._left, changed = 0, self._kept.restore()
        if moved and torch.stack(moved).any():
            changed.append("parameters of a module outside of the model")
        if not self._second:
            raise RuntimeError("it ended before the last backward")
        names, device = self.gradients | self._second, device_of(self._model)
        pairs = [(self.gradients.get(name), self._second.get(name)) for name in names]
        return torch.stack([move(difference(*pair), device) for pair in pairs]), changed

    def _structure(self) -> list[Any]:
        return [*self._model.modules(), *self._model.parameters()]

    def _names(self) -> list[list[str]]:
        return [[*parameters_in(module), *buffers_in(module)] for module in self._model.modules()]

    def _batch_versions(self) -> list[int]:
        return [version(item) for _, item in tensors_in(self.state.batch)]


def copied_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients of a model, by name."""
    gradients = {name: item.grad for name, item, _ in named_parameters(model) if item.grad is not None}
    return {name: local(item).detach().to_dense().clone() for name, item in gradients.items()}


def difference(first: Tensor | None, second: Tensor | None) -> Tensor:
    """Return whether two gradients of one parameter differ in any bit, and their largest difference."""
    if first is None or second is None:
        return torch.tensor([1.0, torch.inf], device="cpu")
    exact = torch.promote_types(first.dtype, torch.float32)
    differences = (second.to(exact) - first.to(exact)).abs().flatten()
    largest = nn.functional.pad(differences, (0, 1)).amax()  # a rank may hold no element
    return torch.stack([(bits_of(first) != bits_of(second)).any().float(), largest.float()])


class ReplayCheckHandler(Monitor, schema=REPLAY):
    """Run the train step once more, and compare the gradients of both passes bit by bit.

    In monitored iterations the train step runs again before its first optimizer step: same batch, weights and RNG
    state. The second pass ends with its last backward, before any step of an optimizer or scaler; then everything is
    restored. Other side effects, such as an item drawn from an iterator, happen twice.

    The handler switches itself off for the rest of the run, and reports the reason, after the first train step that
    keeps state or can't be repeated, and after a difference that fewer than three equal passes of this run precede.
    Attach it on all ranks.

    {keys}

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped), with all modules that it trains.
        optimizer: its optimizer.
        group: the ranks that replay together, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument is of another type.

    Examples:
        .. code-block:: python

            replay = ReplayCheckHandler(model, optimizer)
            replay.attach(trainer, Events.ITERATION_STARTED(every=1000))
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, group: Group = None, prefix: str = "replay") -> None:
        super().__init__(model, prefix, group=group)
        check_optimizer(optimizer)
        self.reset_run_state()

    def reset_run_state(self) -> None:
        self.is_finished, self._same_count = False, 0  # second passes that gave the same gradients
        self._others: weakref.WeakSet[Any] | None = None  # modules and optimizers of this process

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        source = self._source
        if source is None or source.train_step is None:
            return []
        is_first, self._others = self._others is None, self._others or weakref.WeakSet()
        # In the first train step DistributedDataParallel sets up its buckets.
        return [] if is_first and self.ranks.size > 1 else [self._watched(source)]

    @contextmanager
    def _watched(self, source: EventSource) -> Iterator[None]:
        """Replay the train step before its first optimizer step, or at its end if it makes none."""
        reshard(self.model)
        first = FirstPass(self.model, source.train_step)

        def replay(*step: Any) -> None:
            if isolation.in_second_pass():
                raise SecondPassEnded
            if not first.is_replayed:
                first.is_replayed = True
                self._replay(first, source, bool(step))

        with (
            after_each_backward(self.model.parameters(), first.backward_ended),
            register_optimizer_step_pre_hook(torch.compiler.disable(replay)),
        ):
            yield
            replay()

    def _replay(self, first: FirstPass, source: EventSource, makes_step: bool) -> None:
        if not self.ranks.all_present:
            self._switch_off("ranks may have run out of data under join()")
            return
        if not self._others:
            objects, kinds = gc.get_objects(), (nn.Module, Optimizer)
            self._others = weakref.WeakSet(item for item in objects if issubclass(type(item), kinds))
        obstacle, device = first.obstacle(self._others), device_of(self.model)
        if source.listened and first.passes > 1:
            obstacle = "handlers of MonitorEvents may change gradients between the backward passes"
        # After an overflow, which makes no step, a GradScaler has changed its scale.
        is_skipped = not makes_step and not (first.passes and all(map(_is_finite, first.gradients.values())))
        if self.ranks.size > 1:
            refused, is_skipped = self._on_any_rank(bool(obstacle), is_skipped)
            obstacle = obstacle or ("another rank can't repeat its train step" if refused else "")
        if is_skipped or obstacle:
            if not is_skipped:
                self._switch_off(obstacle)
            return
        error, kept, table = "", list[str](), torch.ones(1, 2, device=device)
        try:
            table, kept = first.repeat(source)
        except Exception as raised:
            if is_from_signal_handler(raised):
                raise
            error = f"{type(raised).__name__}: {raised}"  # of a train step that was not written to run twice
        differs, fails, keeps = self._on_any_rank(table[:, 0].any(), bool(error), bool(kept))
        if fails or keeps:
            state = f"the train step keeps state, which a second pass changes: {listed(kept, 4) or 'on another rank'}"
            self._switch_off(f"the second pass raised {error or 'an error on another rank'}" if fails else state)
            return
        self.publish(reproducible=move(torch.tensor(float(not differs), device="cpu"), device))
        if not differs:
            self._same_count += 1
            return
        pairs = zip(first.gradients, table.tolist(), strict=False)
        text = listed([f"{name} (by up to {largest:.3g})" for name, (is_other, largest) in pairs if is_other], 8)
        text = f"a second pass gave other gradients: {text or 'on another rank'}. {self._same_count} earlier ones of "
        if self._same_count >= _MIN_SAME:
            text += "this run gave the same: test the machine for a hardware fault"
            self.report("gradients_differ", text, severity="problem", once=False)
        else:
            self._switch_off(f"{text}this run gave the same, too few to tell a fault from a nondeterministic operation")

    def _on_any_rank(self, *flags: bool | Tensor) -> list[bool]:
        """Return for every flag whether it is set on any rank; the only synchronization of a second pass."""
        device = device_of(self.model)
        values = torch.stack([move(torch.as_tensor(flag), device) for flag in flags]).float()
        return (self.ranks.max(values) > 0).tolist()

    def _switch_off(self, reason: str) -> None:
        self.is_finished = True
        self.report("switched_off", f"off for the rest of the run: {reason}", once=False)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def is_from_signal_handler(error: BaseException) -> bool:
    """Return True if a handler of a signal raised an error, which is not one of the code that it interrupted."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))

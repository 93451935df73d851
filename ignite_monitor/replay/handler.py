"""ReplayCheckHandler: the loss of a batch back-propagated twice, and the gradients compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_monitor.keys import REPLAY
from ignite_monitor.model._torch import version
from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.hashes import hashes_of
from ignite_monitor.model.isolation import capture_rng_state, generator_state, generators_of, is_from_signal_handler
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import listed, named_parameters, unwrapped
from ignite_monitor.model.tensors import bits_of
from ignite_monitor.monitor.arguments import check_generators, check_loss
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.reference.reference import evaluate, isolated_copy

_MIN_SAME = 3  # equal pairs of passes, before a different one is taken for a fault
_NAMED = 8


class _Pass(NamedTuple):
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]  # buffers of the copy, and hashes of generators, when it ended
    moved: dict[str, Tensor]  # by parameter, True if the copy's is no longer the model's


class ReplayCheckHandler(Monitor, schema=REPLAY):
    """Evaluate and back-propagate a loss twice, and compare the gradients of both passes bit by bit.

    Before a monitored train step, each pass runs on a copy of the model of its own, with the batch and the RNG state of
    the train step. ``loss`` must depend on its arguments and random numbers only, and change nothing else.

    After a difference, and after a pass that raises an error or changes the model that trains, the handler is off for
    the rest of the run, and reports why. The report of a difference names the parameters, buffers and generators that
    the passes changed or left different. Attach it on all ranks.

    {keys}

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        loss: function of a model, without wrappers and your forward hooks, and the batch that returns the loss of a
            train step, a tensor with one element.
        generators: random generators that neither ``loss`` nor the model's modules, their classes and files hold.
        group: the ranks that are checked together, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has an invalid value, or the model's parameters are sharded.

    Examples:
        .. code-block:: python

            def loss(model, batch):
                return mse_loss(model(batch[0]), batch[1])

            replay = ReplayCheckHandler(model, loss=loss)
            replay.attach(trainer, Events.ITERATION_STARTED(every=1000))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[[nn.Module, Any], Tensor],
        generators: Iterable[Any] = (),
        group: Group = None,
        prefix: str = "replay",
    ) -> None:
        super().__init__(model, prefix, group=group)
        check_loss(loss, model)
        self.loss = loss
        self._generators = check_generators(generators)
        self.reset_run_state()

    def reset_run_state(self) -> None:
        self._is_off, self._same_count = False, 0

    def before_train_step(self, engine: Engine) -> None:
        if self._is_off:
            return
        present = self.ranks.all_present
        reason = self._check(engine.state.batch) if present else "ranks may have run out of data under join()"
        if reason:
            self._is_off = True
            self.report("switched_off", f"off for the rest of the run: {reason}", once=False)

    def _check(self, batch: Any) -> str:
        """Publish the result; return the reason to switch off, if there is one."""
        error, differing = "", dict[str, Tensor]()
        try:
            tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
            versions = [(name, item, version(item)) for name, item in tensors]
            first, second = self._make_pass(batch), self._make_pass(batch)
            if changed := [name for name, item, before in versions if version(item) != before]:
                raise RuntimeError(f"it changes the model that trains, in {listed(changed, _NAMED)}")
            differing = _differences(first.gradients, second.gradients)
        except Exception as raised:
            if is_from_signal_handler(raised):
                raise
            error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
        device = device_of(self.model)
        flags = [move(flag, device) for flag in differing.values()]
        own_status = torch.full((), 2.0, device=device) if error else torch.stack(flags).any().float()
        # 0 for equal gradients, 1 for different ones, 2 for an error, on any rank: the only synchronization.
        [status] = self.ranks.max(own_status.reshape(1)).tolist()
        if status == 2:
            return f"the loss can't be evaluated twice: {error or 'another rank has reported an error'}"
        self.publish(reproducible=1.0 - status)
        if not status:
            self._same_count += 1
            return ""
        names = [name for name, flag in differing.items() if flag]
        place = f"{listed(names, _NAMED)}. {_describe_state(first, second)}" if names else "on another rank"
        text = f"two passes gave different gradients: {place}. "
        text += f"{self._same_count} earlier pairs of this run were equal"
        if self._same_count < _MIN_SAME:
            return f"{text}, too few to tell a fault from a nondeterministic operation or a loss that keeps state"
        self._is_off = True
        text += ": unless the loss keeps state, test the machine for a hardware fault; off for the rest of the run"
        self.report("gradients_differ", text, severity="problem", once=False)
        return ""

    def _make_pass(self, batch: Any) -> _Pass:
        root = unwrapped(self.model)
        trained = {name: item for name, item, _ in named_parameters(root)}
        with isolated_copy(root, self.loss, self._generators) as model:
            loss = evaluate(self.loss, model, batch)
            parameters = {name: item for name, item, _ in named_parameters(model)}
            trainable = {name: item for name, item in parameters.items() if item.requires_grad}
            gradients = torch.autograd.grad(loss, [*trainable.values()], allow_unused=True)
            state = {f"buffer {name}": item for name, item in model.named_buffers() if has_local_data(item)}
            generators = generators_of(model, self._generators, self.loss)
            states = (rng_state := capture_rng_state()) | rng_state.pop("devices")
            states |= {f"{i} of the model or loss": generator_state(item) for i, item in enumerate(generators, 1)}
        reached = {name: item for name, item in zip(trainable, gradients, strict=True) if item is not None}
        if not reached:
            raise RuntimeError("the loss reaches no parameter of the model that it is given")
        state |= zip((f"generator {name}" for name in states), hashes_of(states, torch.device("cpu")), strict=True)
        moved = {name: _differ(parameters.get(name), item) for name, item in trained.items() if has_local_data(item)}
        return _Pass({name: item.to_dense() for name, item in reached.items()}, state, moved)


def _describe_state(first: _Pass, second: _Pass) -> str:
    """Say what the passes are seen to have changed, beside gradients; reads flags from the device."""
    moved = [f"parameter {name}" for name in first.moved if first.moved[name] or second.moved[name]]
    differing = [name for name, flag in _differences(first.state, second.state).items() if flag]
    if not moved + differing:
        return "They left parameters, buffers and known generators the same: state that they keep is outside the model"
    changed, different = listed(moved, _NAMED) or "no parameter", listed(differing, _NAMED) or "no buffer or generator"
    return f"They changed {changed}, and left different states of {different}"


def _differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flags by name: True if bits differ, or one of the two tensors is missing."""
    return {name: _differ(first.get(name), second.get(name)) for name in {**first, **second}}


def _differ(first: Tensor | None, second: Tensor | None) -> Tensor:
    if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
        return torch.tensor(True, device="cpu")
    return (bits_of(first) != bits_of(second)).any()

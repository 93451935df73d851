"""GradMonitor: the gradient's norm, and whether it is a spike, before the optimizer makes its step."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ignite.engine import Engine, State
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.checks import check_count, check_real, check_type
from ignite_monitor.events.hooks import are_same
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.gradient.judged import JudgedGradient
from ignite_monitor.gradient.skip import StepSkipper, check_skippable
from ignite_monitor.gradient.spikes import SpikeDetector
from ignite_monitor.gradient.thresholds import CallableThreshold, MeanStdThreshold, ThresholdRule
from ignite_monitor.keys import GRADIENT
from ignite_monitor.model.backward import in_backward, users_grad_mode
from ignite_monitor.model.devices import move_like
from ignite_monitor.model.norms import any_sharded, total_norm
from ignite_monitor.model.optimizers import held_by, parameters_of
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.deferred_flag import DeferredFlag
from ignite_monitor.monitor.named_values import as_published
from ignite_monitor.monitor.ranks import gradient_norm, reduction_of, world_size


class GradMonitor(Monitor, schema=GRADIENT):
    r"""Watches the norm of the gradient, and says before the optimizer's step whether it is a spike.

    The norm is :math:`\lVert g \rVert_p` over all gradients that the coming step would use, reduced over ranks,
    unscaled and not yet clipped; with gradient accumulation, of what has been accumulated. It is compared with a
    threshold that a rule derives from earlier norms alone (by default their mean plus three standard deviations).
    As soon as ``loss.backward()`` returns, ``engine.state.unhealthy_spike`` and ``engine.state.grad_norm`` speak of
    the gradients it left:

    {keys}

    With ``optimizer`` one norm per optimizer step enters the statistics, and one per spike whose step the train step
    itself leaves out; without, one per iteration. A spike enters clipped to the threshold that it exceeded, a
    non-finite norm not at all.

    A non-finite norm is a spike, unless a ``scaler`` looks after it: then it is an overflow, counted but not
    flagged, so that ``scaler.step()`` skips the step and ``scaler.update()`` lowers the scale.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: the optimizer whose steps are judged. Its parameters alone count, where it does not hold all.
        scaler: the GradScaler of the train step.
        threshold: a threshold rule, of which a copy is taken, or a function ``(mean, std, count) -> threshold``.
            By default ``MeanStdThreshold()``.
        skip_step: whether to make the optimizer's ``step()`` do nothing at a spike: no update, no weight decay, no
            momentum, no step count. Fused optimizers skip on the device; for others the flag is read on the host.
        on_spike: function ``(engine, norm)``, called at a spike.
        max_consecutive_spikes: how many spikes in a row mean a new level, from which the rule then starts afresh.
        norm_type: p of the norm, greater than 0, ``math.inf`` allowed.
        reduction: how the norms of several ranks make one. ``"mean"``: every rank has the same gradient (DDP), and
            the result is the root mean square of the ranks' norms; ``"sum"``: each rank has another part of the
            gradient, and the result is the norm of all. DTensor gradients (FSDP2, tensor parallel) are exact in
            either. Without a process group nothing is communicated, and with DistributedDataParallel neither; of any
            other model every backward takes a collective, so all ranks have to make as many.
        prefix: what the values' names start with. Also names ``engine.state.grad_norm``: ``{prefix}_norm``.
        flag: the attribute of ``engine.state`` that says whether the gradient is a spike: False when an iteration
            starts, and the verdict from the end of backward on: a bool on the CPU, else a 0-dim bool tensor.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, the optimizer holds none of the model's parameters,
            ``skip_step`` is asked for without an optimizer or with LBFGS, or ``reduction`` is not that of the model's
            wrapper: "mean" for DistributedDataParallel, "sum" for FullyShardedDataParallel.

    Examples:
        .. code-block:: python

            def train_step(engine, batch):
                optimizer.zero_grad()
                loss = criterion(model(batch[0]), batch[1])
                loss.backward()
                if engine.state.unhealthy_spike:
                    return loss.item()  # leaves the step out
                optimizer.step()
                return loss.item()

            trainer = Engine(train_step)
            monitor = GradMonitor(model, optimizer)
            monitor.attach(trainer)
            monitor.log_to(tensorboard_logger, trainer)
    """

    _state_dict_all_req_keys = ("detector", "skipped_count", "known")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scaler: GradScaler | None = None,
        threshold: ThresholdRule | Callable[[Tensor, Tensor, Tensor], Tensor | float] | None = None,
        skip_step: bool = False,
        on_spike: Callable[[Engine, Tensor], Any] | None = None,
        max_consecutive_spikes: int = 10,
        norm_type: float = 2.0,
        reduction: str = "mean",
        prefix: str = "grad",
        flag: str = "unhealthy_spike",
    ) -> None:
        super().__init__(model, prefix)
        if optimizer is not None:
            check_type("optimizer", optimizer, Optimizer, "torch.optim.Optimizer or None")
            held = held_by(optimizer)
            if held.isdisjoint(id(parameter) for parameter in model.parameters()):
                raise ValueError("Argument optimizer should hold parameters of model, but it holds none of them")
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        check_type("skip_step", skip_step, bool, "bool")
        if skip_step:
            check_skippable(optimizer)
        if on_spike is not None and not callable(on_spike):
            raise TypeError(f"Argument on_spike should be callable or None, but given {type(on_spike)}")
        if norm_type != math.inf:
            norm_type = check_real("norm_type", norm_type, above=0.0)
        check_type("reduction", reduction, str, "str")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"Argument reduction should be 'mean' or 'sum', but given {reduction!r}")
        check_type("flag", flag, str, "str")
        if not flag.isidentifier() or hasattr(State(), flag):
            raise ValueError(f"Argument flag should name an attribute that Ignite does not use, but given {flag!r}")
        if threshold is None:
            rule: ThresholdRule = MeanStdThreshold()
        elif isinstance(threshold, ThresholdRule):
            rule = copy.deepcopy(threshold)
        else:
            rule = CallableThreshold(threshold)

        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.on_spike = on_spike
        self.norm_type = float(norm_type)
        self.reduction = reduction
        self._reduction = reduction_of(model, reduction)
        self.flag = flag
        self._norm_attribute = re.sub(r"\W", "_", prefix) + "_norm"
        if flag == self._norm_attribute:
            raise ValueError(f"Argument flag should not be {flag!r}, where the norm stands")
        self._detector = SpikeDetector(
            rule,
            max_consecutive_spikes=check_count("max_consecutive_spikes", max_consecutive_spikes, least=1),
            overflow_is_spike=self.scaler is None,
        )
        self._skipper = StepSkipper() if skip_step else None
        self._skipped_count = torch.zeros((), dtype=torch.float64, device="cpu")
        # The model's parameters, the optimizer's, and those of both.
        self._own: tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]] = ([], [], [])
        self._gradient: JudgedGradient | None = None  # the newest
        self._stepped: JudgedGradient | None = None  # what the optimizer made its last step with in this iteration
        self._stepping: JudgedGradient | None = None  # what it is making a step with
        self._before: tuple[SpikeDetector, int] | None = None  # what was known before a gradient that may still grow
        self._known = 0  # how many norms are known to have gone into the rule
        self._restarted = DeferredFlag()  # for restarts of the rule
        self._missing_reported = False

    def state_dict(self) -> OrderedDict[str, Any]:
        """Statistics and counts: tensors, dicts of tensors and a number."""
        return OrderedDict(detector=self._detector.state_dict(), skipped_count=self._skipped_count, known=self._known)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping.
            ValueError: if it was saved by another monitor, or by one with another kind of threshold rule.
        """
        super().load_state_dict(state_dict)
        skipped_count = torch.as_tensor(state_dict["skipped_count"], dtype=torch.float64)
        if skipped_count.ndim:
            raise ValueError(f"Argument state_dict should hold a number as skipped_count, but given {skipped_count}")
        known = check_count("state_dict['known']", state_dict["known"])
        self._detector.load_state_dict(state_dict["detector"])
        self._skipped_count, self._known = skipped_count, known
        self._before = None

    # What it listens to

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    @property
    def attributes(self) -> list[str]:
        return [self.flag, self._norm_attribute]

    def clear(self, engine: Engine) -> None:
        super().clear(engine)
        setattr(engine.state, self.flag, False)
        setattr(engine.state, self._norm_attribute, None)
        self._stepped = self._stepping = None
        if self._gradient is not None:
            self._gradient.seen = False

    def detach(self) -> None:
        """Undo ``attach`` and ``log_to``; statistics and counts stay."""
        super().detach()
        self._gradient = self._before = None

    def release(self) -> None:
        # What is accumulated in the gradients stays there, and is known by weak references.
        self._stepped = self._stepping = None
        self._own = ([], [], [])
        if self._skipper is not None:
            self._skipper.restore()
        self._report_restarts(wait=True)

    def backward_started(self, model: nn.Module, parameter: Tensor) -> None:
        if model is self.model and self._is_running and self._gradient is not None:
            self._gradient.backward_started(parameter)

    def _on_gradients_ready(self, engine: Engine) -> None:
        if not self._is_running or self._source is None or id(self.model) not in self._source.reached:
            return
        gradients = self._gradients()
        earlier = self._gradient
        changes = None if earlier is None else earlier.changes(gradients)
        if not gradients or changes == 0 or not self._is_reached():  # it reached other parameters of the model
            return
        scale = None
        if self.scaler is not None:
            scale = self.scaler.scale(torch.ones((), device=gradients[0].device))
        grew = earlier is not None and earlier.grew_into(gradients)
        self._settle(undo=grew)
        gradient = self._judge(engine, gradients, scale, shared=len(self._source.reached) > 1)
        if earlier is not None and grew:
            gradient.announced = earlier.announced
        # A backward that reaches other models too may be theirs: a GAN's generator sends gradients through its
        # discriminator. And what comes after the optimizer's step may be leftovers. Both wait for a step.
        # What a closure evaluates after its first time is no new gradient to step with.
        if self._stepped is None and self._stepping is None and not gradient.foreign:
            self._announce(engine, gradient)

    def _on_step_started(self, engine: Engine) -> Callable[[], None] | None:
        if not self._is_running or self._source is None:
            return None
        gradient, self._stepping = self._gradient, None
        if self._skipper is not None:
            self._skipper.restore()  # from a step that raised an error
        if not self._is_own_step():
            if gradient is not None and (gradient.foreign or self._stepped is not None):
                gradient.foreign = gradient.taken = True
            return None
        gradients = self._gradients()
        # Where optimizers make their steps inside of backward there is never a whole gradient.
        if not gradients or (self.optimizer is None and in_backward()):
            return None
        changes = None if gradient is None else gradient.changes(gradients)
        if gradient is None or changes is None or (changes and (gradient.used or not gradient.seen)):
            # Set by hand since the last backward. Fused optimizers are given what to unscale them by.
            self._settle(undo=False)
            gradient = self._judge(engine, gradients, getattr(self._source.stepping, "grad_scale", None))
        else:
            self._settle(undo=True)  # where it is left over from an iteration that made no step
            gradient.settle()
            if not gradient.seen:
                self._show(engine, gradient)
        gradient.seen = True
        self._stepping = gradient
        self._announce(engine, gradient)
        return None if self._skipper is None else functools.partial(self._skip, gradient)

    def _skip(self, gradient: JudgedGradient) -> None:
        if self._skipper is not None and self._source is not None and self._source.stepping is not None:
            skipped = self._skipper.skip(self._source.stepping, gradient.verdict.spike, gradient.is_spike)
            self._skipped_count = self._skipped_count + skipped

    def _on_step_completed(self, engine: Engine) -> Callable[[], None] | None:
        if not self._is_running or not self._is_own_step():
            return None
        gradient, self._stepping = self._stepping, None
        if gradient is not None and self._gradient is not None:
            self._gradient.used = gradient.used = True
            self._stepped = gradient
            if self.optimizer is not None:
                self._observe(gradient)
        return None if self._skipper is None else self._skipper.restore

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running or self._source is None:
            return
        gradient = self._gradient
        if gradient is None or not gradient.seen:
            if id(self.model) not in self._source.unreduced:
                self._report_missing(engine)
            return
        if self._stepped is not None and (gradient.used or gradient.foreign):
            gradient = self._stepped
        elif gradient.taken:  # and this model's own optimizer made no step
            self.clear(engine)
            return
        if self.optimizer is None:
            self._observe(gradient)
            self._announce(engine, gradient)
        elif not gradient.used:
            # No step was made with it: because it is a spike, or because more of it is to be accumulated.
            self._before = (copy.copy(self._detector), self._known)
            self._observe(gradient, gradient.verdict.spike | gradient.verdict.nonfinite)
            self._announce(engine, gradient)
            self._look_at_what_is_left(gradient)
        self._show(engine, gradient)
        self._report_restarts(wait=False)

    # Its parts

    def _gradients(self) -> list[Tensor]:
        if self._source is None:
            return []
        parameters = self._source.parameters(self.model)
        if self.optimizer is not None:
            held = parameters_of(self.optimizer)
            if parameters is not self._own[0] or not are_same(held, self._own[1]):
                ids = set(map(id, held))
                self._own = (parameters, held, [each for each in parameters if id(each) in ids])
            parameters = self._own[2]
        return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]

    def _is_reached(self) -> bool:
        parameters, _, own = self._own
        if self._source is None or self.optimizer is None or len(own) == len(parameters):
            return True
        return any(id(parameter) in self._source.reached_parameters for parameter in own)

    def _judge(
        self, engine: Engine, gradients: list[Tensor], scale: Tensor | None, shared: bool = False
    ) -> JudgedGradient:
        norm = gradient_norm(gradients, self.norm_type, self._reduction)
        if scale is not None:
            norm = norm / scale.to(norm.device)
        if self._skipped_count.device != norm.device:
            self._skipped_count = move_like(self._skipped_count, norm)
        verdict = self._detector.judge(norm)
        gradient = self._gradient = JudgedGradient(verdict, gradients, shared=shared)
        gradient.statistics = {
            "norm": norm,
            "spike": verdict.spike.to(norm.dtype),
            "threshold": verdict.threshold,
            "mean": verdict.mean,
            "std": verdict.std,
        }
        self._show(engine, gradient)
        return gradient

    def _observe(self, gradient: JudgedGradient, when: Tensor | None = None) -> None:
        verdict, restarts = gradient.verdict, self._detector.restarts
        self._detector.observe(verdict, when)
        if self._detector.restarts is not restarts:
            self._restarted.set(self._detector.restarts > restarts)
        if verdict.norm.device.type == "cpu":
            self._known += len((~verdict.nonfinite if when is None else when & ~verdict.nonfinite).nonzero())
        elif when is None:
            self._known += 1

    def _look_at_what_is_left(self, gradient: JudgedGradient) -> None:
        left = self._gradients()
        if not gradient.changes(left):  # it is as it was, or gone
            return
        # Clipped, or set to zero in place. Where that can't be known without waiting, or might be decided otherwise on
        # another rank, it does not count as growing any more: an observation is never taken back wrongly.
        gradient.settle()
        gradient.touched = True
        if gradient.verdict.norm.device.type == "cpu" and not any_sharded(left) and world_size() == 1:
            gradient.touched = False
            if not len(total_norm(left, math.inf).nonzero()):
                self._gradient = self._before = None

    def _settle(self, undo: bool) -> None:
        """The last iteration left a gradient without a step: take back that it was observed, or let it stand."""
        if self._before is not None and undo:
            self._detector, self._known = self._before
        self._before = None

    def _show(self, engine: Engine, gradient: JudgedGradient) -> None:
        verdict = gradient.verdict
        setattr(engine.state, self.flag, as_published(verdict.spike))
        setattr(engine.state, self._norm_attribute, as_published(verdict.norm))
        self.retract()
        self.publish(
            **gradient.statistics,
            spike_count=self._detector.spike_count,
            skipped_count=self._skipped_count,
            nonfinite_count=self._detector.nonfinite_count,
        )

    def _is_own_step(self) -> bool:
        if self._source is None or self._source.stepping is None:
            return False
        if self.optimizer is None:
            return self._source.shares(self.model)
        # An optimizer that wraps another one has its param_groups.
        return self._source.stepping.param_groups is self.optimizer.param_groups

    def _announce(self, engine: Engine, gradient: JudgedGradient) -> None:
        if gradient.announced or self._source is None:
            return
        listened = self._source.has_handlers(MonitorEvents.SPIKE_DETECTED)
        if (listened or self.on_spike is not None) and gradient.is_spike():
            gradient.announced = True
            if self.on_spike is not None:
                with users_grad_mode():
                    self.on_spike(engine, gradient.verdict.norm)
            self._source.fire(MonitorEvents.SPIKE_DETECTED)

    def _report_restarts(self, wait: bool) -> None:
        if self._restarted.take(wait):
            self.logger.warning(
                "%s: %d spikes in a row mean that the gradient norm has a new level: the rule starts afresh from it",
                self.prefix,
                self._detector.max_consecutive_spikes,
            )

    def _report_missing(self, engine: Engine) -> None:
        if self._missing_reported:
            return
        self._missing_reported = True
        self.logger.warning(
            "%s: no gradient of the model was seen in iteration %d, so nothing is published. Either no backward() "
            "reached the parameters that are watched, and model or optimizer is not the one that the train step "
            "uses; or the model is not trained in every iteration: then attach with a filter.",
            self.prefix,
            engine.state.iteration,
        )

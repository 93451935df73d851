"""GradMonitor: the gradient's norm, and whether it is a spike, before the optimizer makes its step."""

from __future__ import annotations

import functools
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.checks import check_count, check_real, check_type
from ignite_monitor.detection.spikes import Detection, SpikeDetector, may_be_true
from ignite_monitor.detection.thresholds import Threshold, as_rule
from ignite_monitor.events.accumulation_probe import AccumulationProbe
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.gradient.judge import GradientJudge
from ignite_monitor.gradient.loss import LossSource
from ignite_monitor.gradient.reaction import Reaction
from ignite_monitor.gradient.telling import GradientTelling
from ignite_monitor.gradient.unstepped import Unstepped
from ignite_monitor.gradient.window import GradientWindow
from ignite_monitor.keys import GRADIENT
from ignite_monitor.model.modes import in_backward
from ignite_monitor.model.optimizers import check_holds, check_optimizer
from ignite_monitor.monitor.base import Handlers, check_flag
from ignite_monitor.nonfinite.locator import NonFiniteLocator


class GradMonitor(GradientTelling, schema=GRADIENT):
    r"""Watches the norm of the gradient, and says before the optimizer's step whether it is a spike.

    The norm is :math:`\lVert g \rVert_p` over all gradients that the coming step would use, reduced over ranks,
    unscaled and not yet clipped; with gradient accumulation, of what has been accumulated. It is compared with a
    threshold that a rule derives from earlier norms alone: by default their mean plus six standard deviations, both
    exponentially weighted with 0.99. (``docs/detection.md`` has what that finds, and how often it is wrong.)
    As soon as ``loss.backward()`` returns, ``engine.state.unhealthy_spike`` and ``engine.state.grad_norm`` speak of
    the gradients it left:

    {keys}

    With ``optimizer`` one norm per optimizer step enters the statistics, and one per spike whose step the train step
    itself leaves out; without, one per iteration. A spike enters clipped to the threshold that it exceeded, a
    non-finite norm not at all. With gradient accumulation over iterations flag and norm speak of each partial gradient,
    and what is published and counted is one value per optimizer step, and per spike that the train step leaves out.

    What becomes of a gradient between backward and step, clipping for one, makes no difference: the norm is that of
    what backward has left. Gradients that no backward has made are judged when the step starts.

    A non-finite norm is a spike, unless a ``scaler`` looks after it: then it is an overflow, counted but not
    flagged, so that ``scaler.step()`` skips the step and ``scaler.update()`` lowers the scale.

    Of the first non-finite gradient in a row the log says, in one line, what has produced it: the model is run once
    more on the same inputs with the same random numbers, and the first module is named whose inputs are finite and
    whose output is not; if forward is finite, the module whose backward makes the gradient non-finite, or the loss
    (with a ``scaler`` this is an overflow, of which nothing is said). ``engine.state.spike.source`` has it too. Nothing
    of the training is changed by that, but for functions of your own that hooks call once more. It is looked for where
    the detection is known on the host: on the CPU, and on an accelerator where ``on_spike`` or a handler of
    SPIKE_DETECTED waits for it.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: the optimizer whose steps are judged. Its parameters alone count, where it does not hold all.
        scaler: the GradScaler of the train step.
        threshold: a threshold rule, of which a copy is taken, a function ``(mean, std, count) -> threshold``, or a
            number for a static threshold. By default ``MeanStdThreshold()``.
        loss: a second sign of a spike, which finds harm that the norm does not show: a criterion module whose output is
            the loss, or a function of the engine that returns it when a backward has ended (``engine.state.output`` is
            still that of the iteration before). A step is then a spike as well where the logarithm of its loss is more
            than 4.5 standard deviations above where the trend of those before leads, exponentially weighted with 0.99.
            What counts is the mean over the micro-batches of a step, and over ranks: one small collective per backward,
            without which the ranks would not agree; none under ``join()``, where losses are not judged.
        per_parameter: whether to judge every parameter's gradient too, by its own earlier norms
            (:class:`RobustThreshold` with k = 8). A step is then a spike as well where one of them is above its own
            threshold, which the norm of all often does not show. At a spike the few tensors are named that hold most
            of what is above the thresholds, or above the means where no tensor is above its threshold: with their
            shares in the values, in ``engine.state.spike.culprits``, and in the log once the values are on the host.
            ``"clip"`` leaves no tensor above its threshold. No collective is added; with ``reduction="sum"`` each rank
            judges and names what it holds, and all agree on what is a spike.
        on_spike: the action at a spike. None: report it only. ``"skip"``: the optimizer's ``step()`` does nothing, no
            update, no weight decay, no momentum, no step count. Fused optimizers skip on the device; for others the
            flag is read on the host. Of optimizers outside ``torch.optim`` the step is not run, so it has to be called
            as ``optimizer.step()``, without a closure: a ValueError says so at the first step. ``"clip"``: when the
            step of any optimizer starts, the gradients are multiplied by threshold / norm in place, whatever has been
            done with them since backward, on the device without synchronization. (Where a step evaluates its closure
            again, those gradients are not clipped.) Non-finite gradients can't be clipped: their step is skipped on the
            CPU and by fused optimizers, if these are of ``torch.optim``, and is made elsewhere. Each skip and clip is
            logged at INFO: the first ten of a run, then every hundredth. A function ``(engine, norm)`` is called at a
            spike.
        max_consecutive_spikes: how many spikes in a row mean a new level, from which the rule then starts afresh.
        norm_type: p of the norm, greater than 0, ``math.inf`` allowed.
        reduction: how the norms of several ranks make one. ``"mean"``: every rank has the same gradient (DDP), and
            the result is the root mean square of the ranks' norms; ``"sum"``: each rank has another part of the
            gradient, and the result is the norm of all. DTensor gradients (FSDP2, tensor parallel) are exact in
            either. Without a process group nothing is communicated, and with DistributedDataParallel neither; of any
            other model every backward takes a collective, so all ranks have to make as many.
        prefix: what the values' names start with. Also names ``engine.state.grad_norm``: ``{prefix}_norm``.
        flag: the attribute of ``engine.state`` that says whether the gradient is a spike: False when an iteration
            starts, and the detection from the end of backward on: a bool on the CPU, else a 0-dim bool tensor.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, the optimizer holds none of the model's parameters,
            skipping or clipping is requested without an optimizer, skipping with one that needs a closure (LBFGS,
            SAM), or ``reduction`` is not that of the model's wrapper: "mean" for DistributedDataParallel, "sum" for
            FullyShardedDataParallel.

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
        threshold: Threshold = None,
        loss: LossSource | None = None,
        per_parameter: bool = False,
        on_spike: str | Callable[[Engine, float | Tensor], Any] | None = None,
        max_consecutive_spikes: int = 10,
        norm_type: float = 2.0,
        reduction: str = "mean",
        prefix: str = "grad",
        flag: str = "unhealthy_spike",
    ) -> None:
        super().__init__(model, prefix)
        if optimizer is not None:
            check_optimizer(optimizer, optional=True)
            check_holds(optimizer, model)
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        self._reaction = Reaction(on_spike, optimizer)
        if norm_type != math.inf:
            norm_type = check_real("norm_type", norm_type, above=0.0)
        check_type("reduction", reduction, str, "str")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"Argument reduction should be 'mean' or 'sum', but given {reduction!r}")
        check_flag(flag)

        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scale = None
        self.on_spike = on_spike
        self.norm_type = float(norm_type)
        self.reduction = reduction
        self.flag = flag
        self._norm_attribute = re.sub(r"\W", "_", prefix) + "_norm"
        if flag == self._norm_attribute:
            raise ValueError(f"Argument flag should not be {flag!r}, where the norm stands")
        self.attributes = {flag: False, self._norm_attribute: None}
        detector = SpikeDetector(
            as_rule(threshold),
            max_consecutive_spikes=check_count("max_consecutive_spikes", max_consecutive_spikes, least=1),
            overflow_is_spike=self.scaler is None,
        )
        self.per_parameter = per_parameter
        self._judge = GradientJudge(
            model, detector, loss=loss, per_parameter=per_parameter, norm_type=self.norm_type, reduction=reduction
        )
        self._window = GradientWindow()
        self._look: AccumulationProbe | None = None  # what decides on its tentative entry
        self._seen = False  # whether there was a gradient in this iteration
        self._unstepped = Unstepped(optimizer)
        self._origins = NonFiniteLocator(model)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Statistics and counts: tensors, dicts of tensors and a number."""
        return OrderedDict(**super().state_dict(), **self._reaction.counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        counts = self._reaction.counts_of(state_dict) if isinstance(state_dict, Mapping) else {}
        super().load_state_dict(state_dict)
        self._reaction.load(counts)
        self._window.before = None

    # What it listens to

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def start_iteration(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        # Steps go unseen in iterations that are not monitored.
        unseen = iteration != self._iteration + 1
        self._window.iteration_started(unseen)
        if unseen:
            self._judge.losses.forget()
        self._iteration = iteration
        self._seen = self._stepped = False
        self._scale = self._shown = None

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if self._source is None:
            return []
        contexts: list[AbstractContextManager[Any]] = [self._origins.calls]
        if self._reaction.kind == "skip":
            contexts += self._reaction.contexts(self._source.step_completed)
        if self._judge.losses.source is not None:
            contexts.append(self._judge.losses.listening())
        # It may have looked already, in a backward under no_sync().
        if self._window.before is not None and (self._look is None or self._look.accumulates is None):
            self._look = self._source.tracker(self.model).accumulation_probe(self.optimizer)
            contexts.append(self._look)
        return contexts

    def detach(self) -> None:
        """Undo ``attach`` and ``log_to``; statistics and counts stay."""
        super().detach()
        self._window, self._look = GradientWindow(), None

    def reset_run_state(self) -> None:
        self._origins.calls.release()
        self._reaction.new_run()
        # What is accumulated in the gradients stays there.
        self._iteration = -1
        self._stepped, self._shown, self._where, self._suspect = False, None, None, None
        self._window.close()
        if self._reaction.kind is not None:
            self._reaction.restore()
        self._judge.forget()
        super().reset_run_state()

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        parameters = backward.tracker.parameters_of(self.optimizer)
        gradients = _gradients(parameters)
        is_all = parameters is backward.tracker.parameters
        if not gradients or not (is_all or backward.reaches(self.optimizer)):  # it reached others of the model
            return
        if self._window.before is not None:
            self._decide_tentative(gradients[0].device)
        if self._judge.losses.source is not None:
            self._judge.losses.backward_ended(engine)
        self._scale = None if self.scaler is None else backward.scale(self.scaler)
        detection = self._detection(parameters, gradients, self._scale)
        self._judged(engine, detection, announce=self._window.backward(detection, backward.shared))

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> Callable[[], None] | None:
        reacts = self._reaction.kind is not None
        if reacts:
            self._reaction.restore()  # from a step that raised an error
        is_own = step.is_of(self.optimizer)
        if not self._unstepped.over:
            self._unstepped.step(step.optimizer, is_own, step.tracker.shares)
        if not is_own:
            if self._window.others_step_started():
                self._show_last(engine)
            return None
        tracker = step.tracker
        # Where optimizers make their steps inside of backward there is never a whole gradient.
        is_whole = tracker.reduced and not (self.optimizer is None and in_backward())
        parameters = tracker.parameters_of(self.optimizer) if is_whole else []
        if all(each.grad is None for each in parameters):
            self._window.close()
            self._show_last(engine)
            return None
        taken = self._window.step_started(lambda: self._judge_by_hand(parameters, step.scale))
        if taken.detection is not self._shown or not self._is_calm:
            self._show(engine, taken.detection, announce=taken.enters)
        if not reacts:
            return None
        return functools.partial(
            self._reaction.start,
            step.optimizer,
            _gradients(parameters),
            taken.detection,
            taken.enters,
            lambda: self._is_known_spike(taken.detection),
        )

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> Callable[[], None] | None:
        if not step.is_of(self.optimizer):
            return None
        taken = self._window.step_completed()
        if self._judge.losses.source is not None:
            self._judge.losses.forget()
        if taken is not None:
            made = self._reaction.made(step.optimizer, taken.detection)
            self._stepped = made if self._stepped is False else self._stepped | made
            if self.optimizer is not None and taken.enters:
                self._judge.observe(taken.detection)
        return None if self._reaction.kind is None else self._reaction.restore

    def _on_train_step_completed(self, engine: Engine) -> None:
        if self._source is None:
            return
        if not self._seen:
            if self._source.tracker(self.model).reduced:
                self._report_missing(engine)
            return
        if not self._unstepped.over:
            text = self._unstepped.gradient(engine.state.iteration, self.scaler is not None)
            if text is not None:
                self.logger.warning("%s: %s", self.prefix, text)
        newest, last = self._window.returned(), self._window.last
        detection = newest if last is None else last.detection
        where: Tensor | None = None  # whether there is anything to publish
        if newest is not None:
            flagged = newest.spike if last is not None or self.optimizer is None else newest.spike | newest.nonfinite
            if last is not None:
                detection = newest.where(flagged, last.detection)
            elif self.optimizer is not None:
                where = flagged
            if self.optimizer is not None and may_be_true(flagged):
                self._window.before = self._judge.known_now()
                self._judge.losses.set_aside()
                self._judge.observe(newest, flagged)
            self._announce(engine, newest)
        if detection is None:
            self._publish_unstepped()
            return
        if self.optimizer is None:
            self._judge.observe(detection)
            self._window.close()
            self._judge.losses.forget()
        self._conclude(engine, detection, where)

    def _detection(self, parameters: list[nn.Parameter], gradients: list[Tensor], scale: Tensor | None) -> Detection:
        self._seen = True
        detection = self._judge.judge(parameters, gradients, scale)
        if self._reaction.device != detection.norm.device:
            self._reaction.to(detection.norm)
        return detection

    def _judge_by_hand(self, parameters: list[nn.Parameter], scale: Tensor | None) -> Detection:
        if self._window.before is not None:  # the norm enters in place of the tentative entry
            self._judge.go_back(self._window.before)
            self._window.before = None
        return self._detection(parameters, _gradients(parameters), scale)

    def _decide_tentative(self, device: torch.device) -> None:
        look, self._look = self._look, None
        grows = self._judge.has_grown(None if look is None else look.accumulates, device)
        # Only who has been told of a spike, and has thus waited for it, waits here.
        known = grows.device.type == "cpu" or self._window.announced
        before = self._window.decided(is_new=known and not bool(grows))
        if before is not None:
            self._judge.go_back(before, grows)


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [gradient for each in parameters if (gradient := each.grad) is not None]

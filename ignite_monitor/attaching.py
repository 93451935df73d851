"""attach_monitors: the handlers that most training runs want, in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from ignite.engine import Engine, Events
from ignite.handlers.base_logger import BaseLogger
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.activation.handler import ActivationHandler
from ignite_monitor.checks import check_choice, check_count, check_type
from ignite_monitor.detection.thresholds import ThresholdRule
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.events.source import EventSource
from ignite_monitor.gradient.handler import GradMonitor
from ignite_monitor.hdf5.logger import HDF5Logger
from ignite_monitor.histograms.handler import HistogramHandler
from ignite_monitor.keys import LOSS
from ignite_monitor.model.names import is_from_torch, tags, without_accelerate
from ignite_monitor.model.tensors import number_in
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor, NoModel
from ignite_monitor.monitor.handle import MonitorHandle
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.optimizer_state.handler import OptimizerStateHandler
from ignite_monitor.rcc.handler import RCCHandler
from ignite_monitor.replicas.handler import ReplicaCheckHandler
from ignite_monitor.rollback.handler import RollbackHandler
from ignite_monitor.setup_check.handler import SetupCheck
from ignite_monitor.spectral.handler import SpectralNormHandler
from ignite_monitor.spike_recorder.handler import SpikeRecorder
from ignite_monitor.step_stats.handler import StepStatsHandler
from ignite_monitor.weight_update.handler import WeightUpdateHandler

_FIRST = {1, 2, 3, 5, 10, 20, 50}  # iterations that are monitored as well: they show a wrong learning rate

# Of the model, its children, and members of lists that are in no other list; of outputs with a place of their own too.
_OUTLINE = r"(_root_(/.+)?/nonfinite_count|([^./]+|((?!\d+\.)[^./]+\.)*\d+)(/[^/]+)?/(std|max_abs|dead_fraction))"


class LossRecorder(Monitor, schema=LOSS):
    """Records the output of the train step: a number, a tensor of one element, or those in a mapping.

    {keys}

    Other outputs, and other items of a mapping, are not recorded.
    """

    def __init__(self, *, prefix: str = LOSS.prefix) -> None:
        super().__init__(NoModel(), prefix)

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def _on_train_step_completed(self, engine: Engine) -> None:
        output = engine.state.output
        items = output if isinstance(output, Mapping) else {"value": output}
        numbers = {str(name): number for name, value in items.items() if (number := number_in(value)) is not None}
        self.publish(**dict(zip(tags(numbers), numbers.values(), strict=True)))


def attach_monitors(
    trainer: Engine,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: GradScaler | None = None,
    loggers: BaseLogger | Iterable[BaseLogger] = (),
    every: int = 100,
    extra: str | Iterable[str] = (),
    threshold: ThresholdRule | Callable[[Tensor, Tensor, Tensor], Tensor | float] | float | None = None,
    on_spike: str | Callable[[Engine, float | Tensor], Any] | None = None,
    rollback: Mapping[str, Any] | None = None,
    record_spikes: str | os.PathLike[str] | None = None,
    group: Group = None,
    prefix: str = "",
) -> MonitorHandle:
    """Attach the monitors that most training runs want.

    ================  ===================================================  ====================
    name              monitor                                              iterations
    ================  ===================================================  ====================
    ``grad``          ``GradMonitor(model, optimizer)``                    all
    ``loss``          the train step's output, if it is a number, a        all
                      tensor of one element or a mapping of those
    ``update``        ``WeightUpdateHandler(model, optimizer)``            one in ``every``
    ``activation``    ``ActivationHandler(model)``: std, max_abs,          one in ``every``
                      dead_fraction, nonfinite_count, attention
    ``step``          ``StepStatsHandler(model, optimizer)``               one in ``every``
    ``moments``       ``OptimizerStateHandler(model, optimizer)``,         one in ``every``
                      if it is one of torch with ``betas`` or momentum
    ``rollback``      ``RollbackHandler(rollback)``, if given              all
    ``setup``         ``SetupCheck(model, optimizer)``                     the first three
    ``spike_record``  ``SpikeRecorder(grad, record_spikes)``, if given     all
    in ``extra``      ``HistogramHandler``, ``ReplicaCheckHandler``,       one in ``every``
                      ``SpectralNormHandler``, ``RCCHandler``
    ================  ===================================================  ====================

    An ``HDF5Logger`` gets all values. Other loggers get of activations ``nonfinite_count`` of the model, the others of
    the model, its children and its blocks (members of module lists), attention, and what the model records.

    Several models on one engine, as in a GAN, take one call each, with different prefixes.

    Args:
        trainer: the engine that trains.
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: its optimizer.
        scaler: the GradScaler of the train step.
        loggers: one Ignite logger or several.
        every: iterations between monitored ones, at least 1; a prime if batches repeat with a period. Of iterations 1,
            2, 3, 5, 10, 20 and 50 those below ``every`` are monitored as well.
        extra: a name or names of more monitors: ``"histograms"``, ``"replicas"``, ``"spectral"``, ``"rcc"``.
        threshold: the threshold rule of ``GradMonitor``, or a number; None for its default.
        on_spike: the reaction of ``GradMonitor``: None, ``"skip"``, ``"clip"`` or a function ``(engine, norm)``.
        rollback: name -> model, optimizer, scheduler …, to be restored when training diverges.
        record_spikes: directory for the batches and RNG states of spikes.
        group: the ranks whose optimizers step together, for ``GradMonitor`` and ``RollbackHandler``: a ProcessGroup or
            DeviceMesh. None: those of the model's wrappers, as for all other monitors.
        prefix: prefix of all names: ``"generator"`` for ``generator/grad/norm`` and for the flag
            ``engine.state.generator_unhealthy_spike``.

    Returns:
        A handle: ``remove()`` or the end of a ``with`` block detaches the monitors, ``monitors`` has them by name. For
        resuming, save it: ``to_save = {"model": model, "optimizer": optimizer, "monitors": handle}``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of its range, or a name is taken, as by monitors with the same prefix.

    Examples:
        .. code-block:: python

            logger = TensorboardLogger(log_dir="runs/first")
            with logger, attach_monitors(trainer, model, optimizer, loggers=logger):
                trainer.run(loader, max_epochs=5)
    """
    check_type("trainer", trainer, Engine, "ignite.engine.Engine")
    check_optimizer(optimizer)
    every = check_count("every", every, least=1)
    given: Any = loggers
    is_several = isinstance(given, Iterable) and not isinstance(given, (BaseLogger, str))
    loggers = [*given] if is_several else [given]
    for logger in loggers:
        check_type("loggers", logger, BaseLogger, "BaseLogger, for instance HDF5Logger('run.h5')")
    if rollback is not None:
        check_type("rollback", rollback, Mapping, "Mapping of names to models, optimizers and schedulers")
    check_type("prefix", prefix, str, "str")
    flag = re.sub(r"\W|^(?=\d)", "_", f"{prefix}_unhealthy_spike") if prefix else "unhealthy_spike"
    start = f"{prefix}/" if prefix else ""

    def is_sampled(engine: Engine, iteration: int) -> bool:
        return iteration % every == 0 or (iteration in _FIRST and iteration < every)

    always, sampled = Events.ITERATION_STARTED, Events.ITERATION_STARTED(event_filter=is_sampled)
    reaction: Any = {"threshold": threshold, "on_spike": on_spike, "scaler": scaler, "group": group}
    grad = GradMonitor(model, optimizer, **reaction, prefix=f"{start}grad", flag=flag)
    monitors: dict[str, tuple[Monitor, Any]] = {"grad": (grad, always)}
    attached = [] if (source := EventSource.on(trainer)) is None else source.monitors
    if all(other.prefix != f"{start}loss" for other in attached):
        monitors["loss"] = LossRecorder(prefix=f"{start}loss"), always
    monitors["setup"] = SetupCheck(model, optimizer, prefix=f"{start}setup"), always
    if rollback is not None:
        monitors["rollback"] = RollbackHandler(rollback, group=group, prefix=f"{start}rollback"), always
    if record_spikes is not None:
        monitors["spike_record"] = SpikeRecorder(grad, record_spikes), always
    health = dict.fromkeys(("std", "max_abs", "dead_fraction", "nonfinite_count"), True)
    activation = ActivationHandler(model, activations=health, attention=True, prefix=prefix)
    activation.warns_without_attention = False  # the user did not ask for it
    update = WeightUpdateHandler(model, optimizer, scaler=scaler, prefix=f"{start}monitor")
    monitors |= {"update": (update, sampled), "activation": (activation, sampled)}
    monitors["step"] = StepStatsHandler(model, optimizer, prefix=f"{start}step"), sampled
    if is_from_torch(without_accelerate(optimizer)) and any(
        "betas" in it or it.get("momentum") for it in optimizer.param_groups
    ):
        monitors["moments"] = OptimizerStateHandler(model, optimizer, prefix=f"{start}optimizer"), sampled
    extras: dict[str, Callable[..., Monitor]] = {
        "histograms": HistogramHandler,
        "replicas": partial(ReplicaCheckHandler, optimizer=optimizer),
        "spectral": SpectralNormHandler,
        "rcc": RCCHandler,
    }
    for name in [extra] if isinstance(extra, str) else extra:
        check_choice("extra", name, *extras)
        monitors[name] = extras[name](model, prefix=f"{start}{name}"), sampled
    shown = {
        "activation": rf"^{re.escape(start)}(recorded/|attention_|activation/{_OUTLINE}$)",
        "rcc": rf"^{re.escape(start)}rcc/(weight_share/.+|[^/]+)$",
    }

    def connect_loggers(name: str, monitor: Monitor) -> None:
        for logger in loggers:
            if isinstance(logger, HDF5Logger):  # which keeps all values, and reports
                monitor.log_to(logger, trainer)
            elif monitor.schema.keys:
                monitor.log_to(logger, trainer, include=shown.get(name))

    with ExitStack() as admissions:  # which an error undoes
        for logger in loggers:
            if isinstance(logger, HDF5Logger):
                admissions.enter_context(logger.admitted(trainer, named=True))
        return MonitorHandle(trainer, monitors, connect_loggers)

"""attach_monitors: the handlers that most training runs want, in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ignite.engine import Engine, Events
from ignite.handlers.base_logger import BaseLogger
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.activation.handler import ActivationHandler
from ignite_monitor.checks import check_choice, check_count, check_type
from ignite_monitor.detection.thresholds import ThresholdRule
from ignite_monitor.gradient.handler import GradMonitor
from ignite_monitor.gradient.loss import LossSource
from ignite_monitor.hdf5.logger import HDF5Logger
from ignite_monitor.histograms.handler import HistogramHandler
from ignite_monitor.model.names import named_modules, tags
from ignite_monitor.model.optimizers import check_optimizer
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.handles import AttachedMonitors
from ignite_monitor.optimizer_state.handler import OptimizerStateHandler
from ignite_monitor.rcc.handler import RCCHandler
from ignite_monitor.replicas.handler import ReplicaCheckHandler
from ignite_monitor.rollback.handler import RollbackHandler
from ignite_monitor.spectral.handler import SpectralNormHandler
from ignite_monitor.spike_recorder.handler import SpikeRecorder
from ignite_monitor.step_stats.handler import StepStatsHandler
from ignite_monitor.weight_update.handler import WeightUpdateHandler

_EXTRA: dict[str, Callable[[nn.Module, Optimizer, GradScaler | None, str], Monitor]] = {
    "histograms": lambda model, _, scaler, prefix: HistogramHandler(model, scaler=scaler, prefix=prefix),
    "replicas": lambda model, optimizer, _, prefix: ReplicaCheckHandler(model, optimizer, prefix=prefix),
    "spectral": lambda model, _, __, prefix: SpectralNormHandler(model, prefix=prefix),
    "rcc": lambda model, _, __, prefix: RCCHandler(model, prefix=prefix),
}

_FEW = 6
"""Largest number of members of a module list that are all shown."""


def attach_monitors(
    trainer: Engine,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: GradScaler | None = None,
    loggers: BaseLogger | Iterable[BaseLogger] = (),
    every: int = 100,
    extra: Iterable[str] = (),
    threshold: ThresholdRule | Callable[[Tensor, Tensor, Tensor], Tensor | float] | float | None = None,
    on_spike: str | Callable[[Engine, float | Tensor], Any] | None = None,
    loss: LossSource | None = None,
    rollback: Mapping[str, Any] | None = None,
    record_spikes: str | os.PathLike[str] | None = None,
    prefix: str = "",
    flag: str | None = None,
) -> AttachedMonitors:
    """Attach the monitors that most training runs want.

    ================  ===================================================  ====================
    name              monitor                                              iterations
    ================  ===================================================  ====================
    ``grad``          ``GradMonitor(model, optimizer)``                    all
    ``update``        ``WeightUpdateHandler(model, optimizer)``            one in ``every``
    ``activation``    ``ActivationHandler(model)``: std, max_abs,          one in ``every``
                      dead_fraction, nonfinite_count, attention
    ``step``          ``StepStatsHandler(model, optimizer)``               one in ``every``
    ``optimizer``     ``OptimizerStateHandler(model, optimizer)``,         one in ``every``
                      if the optimizer has ``betas`` or momentum
    ``rollback``      ``RollbackHandler(rollback)``, if given              all
    ``spike_record``  ``SpikeRecorder(grad, record_spikes)``, if given     all
    ``histograms``    ``HistogramHandler(model)``, if in ``extra``         one in ``every``
    ``replicas``      ``ReplicaCheckHandler(model, optimizer)``, if in     one in ``every``
                      ``extra``
    ``spectral``      ``SpectralNormHandler(model)``, if in ``extra``      one in ``every``
    ``rcc``           ``RCCHandler(model)``, if in ``extra``               one in ``every``
    ================  ===================================================  ====================

    An ``HDF5Logger`` gets all values. Other loggers get those of the whole model, its children and its blocks: the
    members of module lists, of more than six the first, the middle and the last. For a GPT with 6 blocks of 4 heads
    that is about 80 of 600 names.

    Calling it again with the same engine, model and prefix replaces the monitors; if that fails, the former ones stay.
    Several models on one engine, as in a GAN, take one call each, with different prefixes.

    Args:
        trainer: the engine that trains.
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: its optimizer.
        scaler: the GradScaler of the train step.
        loggers: one Ignite logger or several.
        every: distance of monitored iterations, at least 1; a prime if batches repeat with a period.
        extra: names of more monitors, from the table.
        threshold: the threshold rule of ``GradMonitor``, or a number; None for its default.
        on_spike: the reaction of ``GradMonitor``: None, ``"skip"``, ``"clip"`` or a function ``(engine, norm)``.
        loss: second spike signal of ``GradMonitor``: the criterion, or a function of the engine.
        rollback: name -> model, optimizer, scheduler …, to be restored when training diverges.
        record_spikes: directory for the batches and RNG states of spikes.
        prefix: prefix of all names: ``"generator"`` for ``generator/grad/norm``.
        flag: attribute of ``engine.state`` that says whether the gradient is a spike; None for
            ``"unhealthy_spike"``, and with a prefix for ``"{prefix}_unhealthy_spike"``.

    Returns:
        A handle with ``monitors`` by name and ``remove()``, which detaches them; so does the end of a ``with`` block.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument is out of its range, a name is taken, or the prefix is another model's.

    Examples:
        .. code-block:: python

            with attach_monitors(trainer, model, optimizer, loggers=[TensorboardLogger(log_dir="runs/first")]):
                trainer.run(loader, max_epochs=5)

            attach_monitors(trainer, generator, optimizer_g, prefix="generator", loggers=logger)
            attach_monitors(trainer, discriminator, optimizer_d, prefix="discriminator", loggers=logger)
    """
    check_type("trainer", trainer, Engine, "ignite.engine.Engine")
    check_optimizer(optimizer)
    every = check_count("every", every, least=1)
    loggers = [loggers] if isinstance(loggers, BaseLogger) else loggers
    check_type("loggers", loggers, Iterable, "ignite.handlers.base_logger.BaseLogger or a list of such")
    loggers = list(loggers)
    for logger in loggers:
        check_type("loggers", logger, BaseLogger, "ignite.handlers.base_logger.BaseLogger or a list of such")
    if isinstance(extra, str) or not isinstance(extra, Iterable):
        raise TypeError(f"Argument extra should be a list of names, but given {extra!r}")
    extra = list(extra)
    for name in extra:
        check_choice("extra", name, *_EXTRA)
    check_type("prefix", prefix, str, "str")
    if flag is None:
        flag = re.sub(r"\W", "_", f"{prefix}_unhealthy_spike") if prefix else "unhealthy_spike"
    start = f"{prefix}/" if prefix else ""

    rules: dict[str, Any] = {"threshold": threshold, "on_spike": on_spike, "loss": loss}
    health = dict.fromkeys(("std", "max_abs", "dead_fraction", "nonfinite_count"), True)
    grad = GradMonitor(model, optimizer, scaler=scaler, prefix=f"{start}grad", flag=flag, **rules)
    always: dict[str, Monitor] = {"grad": grad}
    activation = ActivationHandler(model, activations=health, attention=True, prefix=prefix)
    activation.warns_without_attention = False  # nobody has asked for it
    seldom: dict[str, Monitor] = {
        "update": WeightUpdateHandler(model, optimizer, scaler=scaler, prefix=f"{start}monitor"),
        "activation": activation,
        "step": StepStatsHandler(model, optimizer, prefix=f"{start}step"),
    }
    if any("betas" in group or group.get("momentum") for group in optimizer.param_groups):
        seldom["optimizer"] = OptimizerStateHandler(model, optimizer, prefix=f"{start}optimizer")
    seldom |= {name: _EXTRA[name](model, optimizer, scaler, f"{start}{name}") for name in extra}
    if rollback is not None:
        always["rollback"] = RollbackHandler(rollback, prefix=f"{start}rollback")
    if record_spikes is not None:
        always["spike_record"] = SpikeRecorder(grad, record_spikes)
    shares = rf"^{re.escape(start)}rcc/(?:(?!weight_share/)\w+/.+|.+\.weight)$"
    details = {"activation": _details(model, start), "rcc": shares}
    filtered = Events.ITERATION_STARTED(every=every) if every > 1 else Events.ITERATION_STARTED
    handle = AttachedMonitors(
        prefix,
        {name: (monitor, Events.ITERATION_STARTED) for name, monitor in always.items()}
        | {name: (monitor, filtered) for name, monitor in seldom.items()},
        [(logger, {} if isinstance(logger, HDF5Logger) else details) for logger in loggers],
    )
    handle.attach(trainer)
    return handle


def _details(model: nn.Module, start: str) -> str:
    """Return a regular expression for activation values that are too many for a dashboard.

    Args:
        start: the beginning of all names.
    """
    modules = dict(named_modules(model))
    outline, blocks = ["_root_"], list[str]()
    lists: list[str] = []  # the outermost module lists
    for name, module in modules.items():
        within = [other for other in modules if other and other.rpartition(".")[0] == name]
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            if any(f"{name}.".startswith(other) for other in lists):
                continue
            lists.append(f"{name}." if name else "")
            blocks += within if len(within) <= _FEW else [within[0], within[len(within) // 2], within[-1]]
        elif not name:
            outline += within
    units = [
        name
        for name, module in modules.items()
        if type(module).__module__ == nn.ReLU.__module__
        and (not blocks or any(f"{name}.".startswith(f"{block}.") for block in blocks))
    ]

    def but(names: list[str], end: str = "/") -> str:
        return f"(?!(?:{'|'.join(map(re.escape, tags(names)))}){end})" if names else ""

    details = [
        r"activation/.+/head_\d+/.+",
        rf"activation/{but([*outline, *blocks])}.+/(?:std|max_abs)",
        rf"activation/{but(['_root_'])}.+/nonfinite_count",
        rf"activation/{but(units)}.+/dead_fraction",
    ]
    if blocks:
        details.append(rf"attention_\w+/{but(blocks, '[./]')}.+")
    return f"^{re.escape(start)}(?:{'|'.join(details)})$"

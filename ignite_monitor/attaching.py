"""attach_monitors: the handlers most trainings want, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

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
from ignite_monitor.optimizer_state.handler import OptimizerStateHandler
from ignite_monitor.rcc.handler import RCCHandler
from ignite_monitor.replicas.handler import ReplicaCheckHandler
from ignite_monitor.spectral.handler import SpectralNormHandler
from ignite_monitor.step_stats.handler import StepStatsHandler
from ignite_monitor.weight_update.handler import WeightUpdateHandler

# What is attached to an engine, by prefix: what is attached once more, as by a cell of a notebook that is run again, is
# replaced.
_ATTACHED: WeakKeyDictionary[Engine, dict[str, AttachedMonitors]] = WeakKeyDictionary()

_MORE: dict[str, Callable[[nn.Module, Optimizer, GradScaler | None, str], Monitor]] = {
    "histograms": lambda model, _, scaler, prefix: HistogramHandler(model, scaler=scaler, prefix=prefix),
    "replicas": lambda model, optimizer, _, prefix: ReplicaCheckHandler(model, optimizer, prefix=prefix),
    "spectral": lambda model, _, __, prefix: SpectralNormHandler(model, prefix=prefix),
    "rcc": lambda model, _, __, prefix: RCCHandler(model, prefix=prefix),
}

_FEW = 6
"""Up to how many members of a list of modules are all shown."""


class AttachedMonitors:
    """Monitors that were attached together, and are detached together: by :meth:`remove`, or at the end of ``with``.

    Args:
        monitors: name -> monitor, each of them attached.

    Attributes:
        monitors: the same, to be read; they go into a checkpoint as ``Checkpoint({**handle.monitors, ...}, ...)``.
    """

    def __init__(self, monitors: dict[str, Monitor]) -> None:
        self.monitors = MappingProxyType(monitors)

    def remove(self) -> None:
        """Detach them all; those that are detached already stay so."""
        for monitor in self.monitors.values():
            monitor.detach()

    def __enter__(self) -> AttachedMonitors:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def attach_monitors(
    trainer: Engine,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: GradScaler | None = None,
    loggers: BaseLogger | Iterable[BaseLogger] = (),
    every: int = 100,
    also: Iterable[str] = (),
    threshold: ThresholdRule | Callable[[Tensor, Tensor, Tensor], Tensor | float] | None = None,
    reaction: str | None = None,
    skip_step: bool = False,
    loss: LossSource | None = None,
    prefix: str = "",
    flag: str | None = None,
) -> AttachedMonitors:
    """Attach the handlers most trainings want, with defaults that suit most.

    ==============  =================================================  ====================
    name            monitor                                            watches
    ==============  =================================================  ====================
    ``grad``        ``GradMonitor(model, optimizer)``                  every iteration
    ``update``      ``WeightUpdateHandler(model, optimizer)``          one in ``every``
    ``activation``  ``ActivationHandler(model)`` with the metrics      one in ``every``
                    std, max_abs, dead_fraction and nonfinite_count,
                    and attention
    ``step``        ``StepStatsHandler(model, optimizer)``             one in ``every``
    ``optimizer``   ``OptimizerStateHandler(model, optimizer)``,       one in ``every``
                    where the optimizer has ``betas`` or momentum
    ==============  =================================================  ====================

    With ``also`` costlier ones watch one iteration in ``every`` as well: ``"histograms"`` (``HistogramHandler``, for
    TensorBoard), ``"replicas"`` (``ReplicaCheckHandler``, on several ranks), ``"spectral"`` (``SpectralNormHandler``),
    ``"rcc"`` (``RCCHandler``).

    Values are written to the loggers whenever they are measured, so the norm's come to the host in every iteration if
    there is a logger. An ``HDF5Logger`` keeps them all. Others get what one can look at: std and max_abs of the whole
    model, its children and its blocks, dead units and attention in these blocks, and what the model records. Blocks are
    the members of lists of modules, of more than six the first, the middle and the last one. Of a GPT with 6 blocks of
    4 heads that is about 80 tags of 600. Of RCCHandler they get what is of all layers, and each layer's share.

    ``engine.state.unhealthy_spike`` says when a step should be left out; with a ``reaction`` the monitor does
    something about it.

    Attached once more to the same engine with the same prefix, new monitors replace those of before. Two models that
    train on one engine, as those of a GAN, take a call each, with a prefix of their own.

    Args:
        trainer: the engine that trains.
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: its optimizer.
        scaler: the GradScaler of the train step.
        loggers: an Ignite logger or several, to write to.
        every: in which iterations the costlier ones watch, at least 1.
        also: names of more monitors.
        threshold: the rule of ``GradMonitor``; None for its default.
        reaction: what ``GradMonitor`` does at a spike: None, ``"skip"`` or ``"clip"``.
        skip_step: True means ``reaction="skip"``.
        loss: a second sign of a spike for ``GradMonitor``: the criterion, or a function of the engine.
        prefix: what to put before all names: with ``"generator"`` they are ``generator/grad/norm``, and so on.
        flag: the attribute of ``engine.state`` that says whether the gradient is a spike; None for
            ``"unhealthy_spike"``, and with a prefix for ``"{prefix}_unhealthy_spike"``.

    Returns:
        A handle: its ``monitors`` by name, and ``remove()``, which detaches them and leaves the engine as it was.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, or a name that the monitors need is taken.

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
    if isinstance(loggers, BaseLogger):
        loggers = [loggers]
    check_type("loggers", loggers, Iterable, "ignite.handlers.base_logger.BaseLogger or a list of such")
    loggers = list(loggers)
    for logger in loggers:
        check_type("loggers", logger, BaseLogger, "ignite.handlers.base_logger.BaseLogger or a list of such")
    if isinstance(also, str) or not isinstance(also, Iterable):
        raise TypeError(f"Argument also should be a list of names, but given {also!r}")
    also = list(also)
    for name in also:
        check_choice("also", name, *_MORE)
    check_type("prefix", prefix, str, "str")
    if flag is None:
        flag = re.sub(r"\W", "_", f"{prefix}_unhealthy_spike") if prefix else "unhealthy_spike"
    start = f"{prefix}/" if prefix else ""

    rules: dict[str, Any] = {"threshold": threshold, "reaction": reaction, "skip_step": skip_step, "loss": loss}
    health = dict.fromkeys(("std", "max_abs", "dead_fraction", "nonfinite_count"), True)
    monitors: dict[str, Monitor] = {
        "grad": GradMonitor(model, optimizer, scaler=scaler, prefix=f"{start}grad", flag=flag, **rules),
        "update": WeightUpdateHandler(model, optimizer, scaler=scaler, prefix=f"{start}monitor"),
        "activation": ActivationHandler(model, activations=health, attention=True, prefix=prefix),
        "step": StepStatsHandler(model, optimizer, prefix=f"{start}step"),
    }
    if any("betas" in group or group.get("momentum") for group in optimizer.param_groups):
        monitors["optimizer"] = OptimizerStateHandler(model, optimizer, prefix=f"{start}optimizer")
    monitors |= {name: _MORE[name](model, optimizer, scaler, f"{start}{name}") for name in also}
    handle = AttachedMonitors(monitors)
    shares = rf"^{re.escape(start)}rcc/(?:(?!weight_share/)\w+/.+|.+\.weight)$"
    details = {"activation": _details(model, start), "rcc": shares}
    attached = _ATTACHED.setdefault(trainer, {})
    if prefix in attached:
        attached[prefix].remove()
    attached[prefix] = handle
    try:
        for name, monitor in monitors.items():
            seldom = name != "grad" and every > 1
            monitor.attach(trainer, Events.ITERATION_STARTED(every=every) if seldom else Events.ITERATION_STARTED)
            for logger in loggers:
                exclude = {} if isinstance(logger, HDF5Logger) else details
                monitor.log_to(logger, trainer, exclude=exclude.get(name))
    except Exception:
        handle.remove()
        raise
    return handle


def _details(model: nn.Module, start: str) -> str:
    """A regular expression for the values of activations that are too many to look at; names begin with ``start``."""
    modules = dict(named_modules(model))
    outline, blocks = ["_root_"], list[str]()
    lists: list[str] = []  # the outermost ones
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

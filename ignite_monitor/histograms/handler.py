"""HistogramHandler: histograms of weights, gradients and activations, for TensorBoard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, chain, repeat, takewhile
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers.base_logger import BaseLogger
from ignite.handlers.tensorboard_logger import TensorboardLogger
from torch import Tensor, nn

from ignite_monitor.checks import check_count
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import HISTOGRAMS
from ignite_monitor.model._torch import eager, in_backward
from ignite_monitor.model.devices import device_of, move, wide_dtype
from ignite_monitor.model.dtensor import reshard, whole_tensor
from ignite_monitor.model.forward import after_forward
from ignite_monitor.model.isolation import in_second_pass
from ignite_monitor.model.modes import has_local_data, hidden_from_user_modes
from ignite_monitor.model.names import (
    Pattern,
    Selection,
    hookable,
    named_modules,
    named_parameters,
    tags,
    unwrapped,
)
from ignite_monitor.model.sampling import is_measurable
from ignite_monitor.model.tensors import tagged_tensors
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.step_gradients import StepGradients

# Those of ``SummaryWriter``: 1e-12, 1.1 times that, and so on, on either side of 0.
_POSITIVE = list(takewhile(lambda edge: edge < 1e20, accumulate(chain([1e-12], repeat(1.1)), float.__mul__)))
EDGES = [*(-edge for edge in reversed(_POSITIVE)), 0.0, *_POSITIVE]
_PIECE = 1 << 22  # elements counted at a time


class _EdgesOfDevices(dict[torch.device, Tensor]):
    """The edges on each device, from their first use on."""

    def __missing__(self, device: torch.device) -> Tensor:
        with torch.inference_mode(False):
            self[device] = move(torch.tensor(EDGES, dtype=wide_dtype(device), device="cpu"), device)
        return self[device]


class HistogramHandler(Monitor, schema=HISTOGRAMS):
    """Draw histograms of weights, gradients and activations in TensorBoard.

    {keys}

    :attr:`histograms` has them by names like ``histograms/weights/0.weight``, ``histograms/gradients/0.weight`` and
    ``histograms/activations/0``; ``log_to`` writes them by these names to a ``TensorboardLogger``. Other loggers get
    their numbers only. All finite elements are counted, on their device, in the buckets of ``SummaryWriter``.

    - weights: after the train step,
    - gradients: unscaled, as the optimizer's first step uses them,
    - activations: module outputs of this rank's last forward pass in training mode.

    With sharded parameters, attach the handler on all ranks. Compiled models run eagerly in monitored iterations.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        max_histograms: the maximum number of each kind, at least 1.
        include: a regular expression; only modules and parameters with a match in their names are drawn.
        exclude: a regular expression; modules and parameters with a match in their names are excluded.
        prefix: the start of all names.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has an invalid value, or ``include`` and ``exclude`` exclude everything.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_histograms: int = 16,
        include: Pattern = None,
        exclude: Pattern = None,
        prefix: str = "histograms",
    ) -> None:
        super().__init__(model, prefix)
        self.max_histograms = check_count("max_histograms", max_histograms, least=1)
        self._selection = Selection(include, exclude)
        if not self._chosen_parameters() and not self._chosen_modules():
            raise ValueError("Arguments include and exclude should leave a module or a parameter, but leave none")
        self._waiting_counts: dict[str, Tensor] = {}  # by name, before they are on the host
        self._histograms: dict[str, dict[str, Any]] = {}
        self._errors: list[Exception] = []  # of hooks on forward passes
        self.reset_run_state()

    @property
    def histograms(self) -> dict[str, dict[str, Any]]:
        """This iteration's histograms by name, as ``SummaryWriter.add_histogram_raw`` takes them, on the host."""
        self.on_host()
        return self._histograms

    def log_to(
        self,
        logger: BaseLogger,
        engine: Engine,
        event: Any = Events.ITERATION_COMPLETED,
        tag: str | None = None,
        *,
        include: Pattern | Callable[[str], Any] = None,
    ) -> None:
        super().log_to(logger, engine, event, tag, include=include)
        if isinstance(logger, TensorboardLogger):
            write = functools.partial(self._write, f"{tag}/" if tag else "", Selection(include))
            self._log_handlers.append(logger.attach(engine, write, event))

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        self.reset_run_state()
        parameters, gradients = self._parameters, self._counts["gradients"]
        parameters.update(self._chosen_parameters())
        modules = self._chosen_modules()
        root, counts, most = unwrapped(self.model), self._counts["activations"], self.max_histograms
        errors, edges = self._errors, self._edges

        def count_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
            gradients[parameters[parameter]] = count(gradient, edges)

        self._gradients = StepGradients(parameters, count_gradient)

        # It holds no monitor, since the engine holds the contexts of a step.
        def count_output(module: nn.Module, args: Any, output: Any) -> None:
            if not root.training or in_backward() or in_second_pass():  # checkpointing repeats passes in a backward
                return
            try:
                with hidden_from_user_modes():
                    for name, tensor in tagged_tensors(output, modules[module]):
                        if has_local_data(tensor) and (name in counts or len(counts) < most):
                            counts[name] = count(tensor.detach(), edges)
            except Exception as error:  # noqa: BLE001
                errors[:] = [error]

        return [eager(), after_forward(modules, count_output)] if modules else []

    def clear(self, engine: Engine) -> None:
        super().clear(engine)
        self._waiting_counts, self._histograms = {}, {}

    def reset_run_state(self) -> None:
        self._edges = _EdgesOfDevices()
        self._parameters: dict[nn.Parameter, str] = {}
        self._gradients = StepGradients({}, lambda *_: None)
        self._counts: dict[str, dict[str, Tensor]] = {"weights": {}, "gradients": {}, "activations": {}}
        self._errors.clear()  # in place: a hook may still hold the list

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        self._gradients.step_started(step)

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        if self._errors:
            raise self._errors.pop(0)
        reshard(self.model)
        self._gradients.gather()
        self._counts["weights"] = {
            tag: count(whole_tensor(item), self._edges) for item, tag in self._parameters.items()
        }
        device = device_of(self.model)
        for kind, counts in self._counts.items():
            if counts:
                rows = torch.stack([move(row, device) for row in counts.values()])
                self._waiting_counts |= {f"{kind}/{tag}": row for tag, row in zip(counts, rows, strict=True)}
                self.publish(**{f"{kind}_count": rows[:, :-4].any(1).sum()})
        self.reset_run_state()

    def deferred_tensors(self) -> list[Tensor]:
        return list(self._waiting_counts.values())

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        drawn = zip(self._waiting_counts, map(as_histogram, extra), strict=True)
        self._histograms |= {self._named(name): histogram for name, histogram in drawn if histogram is not None}
        self._waiting_counts = {}
        return {}

    def _write(self, start: str, selection: Selection, engine: Engine, logger: Any, event_name: Any) -> None:
        step = engine.state.get_event_attrib_value(event_name)
        for name, histogram in self.histograms.items():
            if name in selection:
                logger.writer.add_histogram_raw(f"{start}{name}", **histogram, global_step=step)

    def _chosen_parameters(self) -> dict[nn.Parameter, str]:
        """All parameters, or those with several dimensions if there are too many, and their tags."""
        real = {name: it for name, it, _ in named_parameters(self.model) if is_measurable(it) and not it.is_complex()}
        named = {name: parameter for name, parameter in real.items() if name in self._selection}
        matrices = {name: item for name, item in named.items() if item.ndim > 1}
        return self._chosen(matrices if matrices and len(named) > self.max_histograms else named)

    def _chosen_modules(self) -> dict[nn.Module, str]:
        """Modules with a forward, and their tags."""
        modules = hookable(dict(named_modules(self.model)))
        named = {name or "_root_": item for name, item in modules.items() if type(item).forward != nn.Module.forward}
        return self._chosen({name: item for name, item in named.items() if name in self._selection})

    def _chosen(self, named: Mapping[str, Any]) -> dict[Any, str]:
        """Select at most ``max_histograms`` items, evenly from the first to the last, and their tags."""
        names, most = [*named], self.max_histograms
        if len(names) > most:
            names = [names[i * (len(names) - 1) // max(most - 1, 1)] for i in range(most)]
        return dict(zip((named[name] for name in names), tags(names), strict=True))


def count(tensor: Tensor, edges_of: Mapping[torch.device, Tensor]) -> Tensor:
    """Count the finite elements of a tensor; elements beyond 1e20 are in the outermost buckets.

    Return the number of elements in each bucket, their sum, the sum of their squares, their maximum, and their minimum
    with its sign changed. Maximum and changed minimum of no elements are -inf.
    """
    edges = edges_of[tensor.device]
    sums = torch.zeros(len(EDGES) + 1, dtype=edges.dtype, device=edges.device)
    extremes = torch.full_like(sums[:2], -torch.inf)
    for piece in tensor.reshape(-1).split(_PIECE) if tensor.numel() else ():
        values = piece.to(edges.dtype)
        finite = values.isfinite()
        signed = torch.where(finite, torch.stack([values, -values]), -torch.inf)
        extremes = torch.maximum(extremes, signed.amax(1))
        values = torch.where(finite, values, 0.0)
        bucket = torch.bucketize(values, edges, right=True).clamp_(1, len(EDGES) - 1) - 1
        sums.index_add_(0, bucket, finite.to(values.dtype))
        sums[-2:] += torch.stack([values.sum(), values.square().sum()])
    return torch.cat([sums, extremes])


def as_histogram(counted: Sequence[float]) -> dict[str, Any] | None:
    """Convert what :func:`count` returned to arguments of ``SummaryWriter.add_histogram_raw``; None for no elements."""
    *counts, total, squares, largest, smallest = counted
    filled = [bucket for bucket, number in enumerate(counts) if number]
    if not filled:
        return None
    first, end = filled[0], filled[-1] + 1
    return {
        "min": -smallest,
        "max": largest,
        "num": int(sum(counts)),
        "sum": total,
        "sum_squares": squares,
        # A bucket has its right limit alone, so an empty one comes first.
        "bucket_limits": EDGES[first : end + 1],
        "bucket_counts": [0.0, *counts[first:end]],
    }

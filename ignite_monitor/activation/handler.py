"""ActivationHandler: statistics of activations, attention, parameters and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ignite.engine import Engine
from torch import Tensor, nn

from ignite_monitor.activation.attention_calls import Reason
from ignite_monitor.activation.forward_metrics import ForwardMetrics, Layer, Pause
from ignite_monitor.activation.measurement import Measurement, collect_rows, collect_values
from ignite_monitor.activation.metric import MetricSet
from ignite_monitor.activation.statistics import WITHOUT_STATISTICS
from ignite_monitor.activation.units import UnitDimensions
from ignite_monitor.checks import check_type
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import ACTIVATION
from ignite_monitor.model._torch import eager
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.dtensor import whole_tensor
from ignite_monitor.model.modes import hidden_from_user_modes
from ignite_monitor.model.names import Pattern, Selection, named_modules, named_parameters, tags
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import Group, RankReduction
from ignite_monitor.monitor.step_gradients import StepGradients
from ignite_monitor.monitor.transfer import NamedValues, joined

_COMPLEX = Reason("complex", "complex numbers have no built-in metrics")

_WEIGHTS = "parameter", "gradient"  # families

Metrics = Mapping[str, Any] | bool | None


class ActivationHandler(Monitor, schema=ACTIVATION):
    """Publish statistics of module outputs, attention, parameters and gradients, by name.

    {keys}

    Built-in metrics, under ``True`` or as ``{"mean": True}``: ``mean``, ``std`` (of a sample), ``max_abs``,
    ``max_over_rms`` (``max_abs`` over the root mean square), ``l2_norm`` (mean norm of the vectors along the last
    dimension), ``dead_fraction`` (activations only: the fraction of units that are 0 throughout the iteration),
    ``nonfinite_count`` (if positive, the others are not reported).

    All forward passes, micro-batches and ranks of an iteration count as one batch. Passes in evaluation mode, under
    :meth:`paused`, and recomputations by activation checkpointing are not measured. Compiled models run eagerly in
    monitored iterations. With several ranks, attach the handler on all of them.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        activations: True, or name -> function, :class:`Metric`, or True for a built-in one. A function is given a
            detached tensor, and returns a number or a tensor whose mean is taken. An error in it ends the measuring
            of this handler.
        parameters: likewise, for parameters.
        gradients: likewise, for gradients.
        include: a regular expression; only modules and parameters with a match in their names are measured.
        exclude: a regular expression; modules and parameters with a match in their names are excluded.
        attention: whether to measure ``scaled_dot_product_attention`` and ``nn.MultiheadAttention``.
        group: the ranks to average over, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: the start of all names; several handlers on one engine need different ones.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has an invalid value, or ``parameters`` or ``gradients`` are given for a model that
            FullyShardedDataParallel has sharded.

    Examples:
        .. code-block:: python

            handler = ActivationHandler(
                model,
                activations={"dead_fraction": True, "large": lambda x: x.abs() > 6},
                gradients={"norm": Metric(torch.norm, include="weight")},
                attention=True,
            )
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
            handler.log_to(tensorboard_logger, trainer)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        activations: Metrics = None,
        parameters: Metrics = None,
        gradients: Metrics = None,
        include: Pattern = None,
        exclude: Pattern = None,
        attention: bool = False,
        group: Group = None,
        prefix: str = "",
    ) -> None:
        check_type("prefix", prefix, str, "str")
        given = {
            "activation": ("activations", activations),
            "gradient": ("gradients", gradients),
            "parameter": ("parameters", parameters),
        }
        families = ["recorded", *(family for family, (_, metrics) in given.items() if metrics not in (None, False))]
        families += ["attention_entropy", "attention_logit_max"] if attention else []
        super().__init__(model, prefix, families, group=group)
        self._metrics = {family: MetricSet(argument, metrics or {}) for family, (argument, metrics) in given.items()}
        check_type("attention", attention, bool, "bool")
        self._selection = Selection(include, exclude)
        names = [name or "_root_" for name in dict(named_modules(model))] + [
            name for name, _, _ in named_parameters(model)
        ]
        if not any(name in self._selection for name in names):
            raise ValueError("Arguments include and exclude should leave a module or a parameter, but leave none")
        self._attention = attention
        self.warns_without_attention = True
        self._saw_attention: bool | None = None  # in any measured iteration; None without one
        self._pause = Pause()
        self._skipped: set[tuple[str, str]] = set()
        self.reset_run_state()

    # Events

    def handlers(self) -> Handlers:
        completed: Handlers = [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]
        if not self._metrics["gradient"]:
            return completed
        return [(MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started), *completed]

    def reset_run_state(self) -> None:
        self._known: list[nn.Parameter] | None = None  # the model's parameters when names were taken
        self._modules: dict[str, nn.Module] = {}
        self._layers: dict[nn.Module, Layer] = {}
        self._units = UnitDimensions([])
        self._parameters: dict[str, dict[nn.Parameter, Layer]] = {}  # by family
        self._forward: ForwardMetrics | None = None
        self._gradients = StepGradients({}, lambda *_: None)
        self._measured: list[Measurement] = []
        self._over_ranks = RankReduction(self.ranks)

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if not self._is_running:
            return []
        self._update_names()
        self._measured = parameters, gradients = [Measurement(kind, self._metrics[kind]) for kind in _WEIGHTS]
        for parameter, (name, tag) in self._parameters["parameter"].items():
            parameters.add(tag, name, whole_tensor(parameter))
        parameters.flush()
        layers = self._parameters["gradient"]

        def measure(parameter: nn.Parameter, gradient: Tensor) -> None:
            name, tag = layers[parameter]
            gradients.add(tag, name, gradient, copy=True)

        self._gradients = StepGradients(layers, measure)
        self._units.clear()
        metrics, root = self._metrics["activation"], self._modules[""]
        self._forward = ForwardMetrics(root, self._layers, metrics, self._attention, self._units, self._pause)
        return [eager(), *self._forward.contexts(self._modules)]

    def paused(self) -> AbstractContextManager[None]:
        """A context in which forward passes are not measured."""
        return self._pause

    def on_run_end(self) -> None:
        if self._saw_attention is False and self.warns_without_attention:
            self.report(
                "no_attention",
                "attention=True measured no attention call (scaled_dot_product_attention, nn.MultiheadAttention)",
            )

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        self._gradients.step_started(step)

    def _on_train_step_completed(self, engine: Engine) -> None:
        forward, self._forward = self._forward, None
        if not self._is_running or forward is None:
            return
        forward.raise_error()
        self._gradients.gather()
        results = self._forward_values(forward) + collect_values(self._measured)
        self._measured = []
        for reason, names in sorted(forward.skipped.items()):
            self._report_skipped(reason, sorted(names))
        self._saw_attention = bool(self._saw_attention) or forward.saw_attention
        if any(values.names for values in results):
            self.publish_table(*joined(results))
        elif self.families == [self._named("recorded")] and not forward.skipped:
            self.report(
                "no_metrics",
                "nothing was measured, because no metrics are chosen and no value was recorded with record(): give "
                "activations=True, attention=True or another argument",
            )

    def _report_skipped(self, reason: Reason, names: Iterable[str]) -> None:
        """Report once for each name and kind of reason."""
        new = [name for name in names if name and (name, reason.kind) not in self._skipped]
        self._skipped.update((name, reason.kind) for name in new)
        if new:
            self.report(reason.kind, f"skipped {', '.join(new)}: {reason.text}", names=new, once=False)

    # Values

    def _forward_values(self, forward: ForwardMetrics) -> list[NamedValues]:
        with hidden_from_user_modes():
            rows = collect_rows(forward.measurements)
        if self.ranks.size > 1:
            if not self.ranks.all_present:
                self.report(
                    "joined_ranks", "ranks may have run out of data under join(): forward passes are not reported"
                )
                return []
            rows = self._over_ranks(*rows, device_of(self.model))
        return collect_values(forward.measurements, rows)

    def _tagged(self, names: Iterable[str]) -> dict[str, Layer]:
        """The selected names, with those to show and those for loggers."""
        names = list(names)
        shown = [name or "_root_" for name in names]
        tagged = zip(names, shown, tags(shown), strict=True)
        return {name: (show, tag) for name, show, tag in tagged if show in self._selection}

    def _update_names(self) -> None:
        """Take the names of modules and parameters, if parameters may have changed since the last iteration."""
        if self._source is None or self._known is self._source.trackers[id(self.model)].parameters:
            return
        self._known = self._source.trackers[id(self.model)].parameters
        self._modules = modules = dict(named_modules(self.model))
        self._layers = {modules[name]: layer for name, layer in self._tagged(modules).items()}
        self._units = UnitDimensions(modules.values())
        parameters = {name: parameter for name, parameter, _ in named_parameters(self.model)}
        tagged = self._tagged(parameters).items()
        for family in _WEIGHTS:
            metrics = self._metrics[family]
            chosen = {parameters[name]: layer for name, layer in tagged if metrics.wants(layer[0])}
            self._parameters[family] = {item: layer for item, layer in chosen.items() if not item.is_meta}
            without = [tag for item, (_, tag) in chosen.items() if item.dtype in WITHOUT_STATISTICS]
            self._report_skipped(_COMPLEX, without if any(metrics.builtin) else ())

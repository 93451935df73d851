"""ActivationHandler: statistics of activations, attention, parameters and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ignite.engine import Engine
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ignite_monitor.activation.attention_calls import Reason
from ignite_monitor.activation.forward_metrics import ForwardMetrics, Layer
from ignite_monitor.activation.gradient_metrics import GradientMetrics
from ignite_monitor.activation.measurement import Measurement, OutputComparison, collect_rows, collect_values
from ignite_monitor.activation.metric import AGGREGATES, MetricSet
from ignite_monitor.activation.statistics import WITHOUT_STATISTICS
from ignite_monitor.activation.units import UnitDimensions
from ignite_monitor.checks import check_choice, check_type
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import ACTIVATION
from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.dtensor import whole_tensor
from ignite_monitor.model.modes import eager, hidden_from_user_modes
from ignite_monitor.model.names import Pattern, Selection, modules_by_name, named_parameters, parameters_of, tags
from ignite_monitor.monitor.arguments import check_generators
from ignite_monitor.monitor.base import Handlers
from ignite_monitor.monitor.ranks import Group, RankReduction
from ignite_monitor.monitor.scaler import ScaledMonitor
from ignite_monitor.monitor.transfer import NamedValues, joined
from ignite_monitor.reference.monitor import ReferenceHolder
from ignite_monitor.reference.passes import JOINED, Pause, ReferencePasses
from ignite_monitor.reference.reference import Reference

_COMPLEX = Reason("complex", "complex numbers have no built-in metrics")
_OTHER_SHAPE = Reason("other_shape", "the reference's parameter has another shape, so there is no difference")

Metrics = Mapping[str, Any] | bool | None


class ActivationHandler(ReferenceHolder, ScaledMonitor, schema=ACTIVATION):
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
        activation_differences: likewise; functions are given two tensors, the second one the reference's.
        parameter_differences: likewise.
        reference: what to compare with: ``"init"`` for a frozen copy of the model as it is now, or a module of the same
            structure. It runs in monitored iterations, on the same inputs and with the same RNG state.
        include: a regular expression; only modules and parameters with a match in their names are measured.
        exclude: a regular expression; modules and parameters with a match in their names are excluded.
        attention: whether to measure ``scaled_dot_product_attention`` and ``nn.MultiheadAttention``.
        aggregate: aggregation of own functions over passes and micro-batches: ``"mean"``, weighted by the tensors'
            numbers of elements, ``"sum"``, ``"max"`` or ``"min"``.
        scaler: the GradScaler of the train step.
        generators: random generators of the forward pass that its modules, their classes and files do not hold, for a
            second pass to restore.
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
        activation_differences: Metrics = None,
        parameter_differences: Metrics = None,
        reference: str | nn.Module | None = None,
        include: Pattern = None,
        exclude: Pattern = None,
        attention: bool = False,
        aggregate: str = "mean",
        scaler: GradScaler | None = None,
        generators: Iterable[Any] = (),
        group: Group = None,
        prefix: str = "",
    ) -> None:
        check_type("prefix", prefix, str, "str")
        given = {
            "activation": ("activations", activations),
            "activation_difference": ("activation_differences", activation_differences),
            "gradient": ("gradients", gradients),
            "parameter": ("parameters", parameters),
            "parameter_difference": ("parameter_differences", parameter_differences),
        }
        families = ["recorded", *(family for family, (_, metrics) in given.items() if metrics not in (None, False))]
        families += ["attention_entropy", "attention_logit_max"] if attention else []
        super().__init__(model, prefix, families, group=group)
        check_choice("aggregate", aggregate, *AGGREGATES)
        self._metrics = {
            family: MetricSet(argument, metrics or {}, aggregate) for family, (argument, metrics) in given.items()
        }
        check_type("attention", attention, bool, "bool")
        self.set_scaler(scaler)
        generators = check_generators(generators)
        differences = bool(self._metrics["activation_difference"] or self._metrics["parameter_difference"])
        if differences != (reference is not None):
            raise ValueError(
                "Argument reference should be 'init' or a module with activation_differences or parameter_differences, "
                f"and None without, but given {type(reference)}"
            )
        self._selection = Selection(include, exclude)
        names = [name or "_root_" for name in modules_by_name(model)] + [name for name, _, _ in named_parameters(model)]
        if not any(name in self._selection for name in names):
            raise ValueError("Arguments include and exclude should leave a module or a parameter, but leave none")
        self._attention = attention
        self.warns_without_attention = True
        self._saw_attention: bool | None = None  # in any measured iteration; None without one
        self._reference = None if reference is None else Reference(model, reference, generators)
        self._pause = Pause()
        self._differences: OutputComparison | None = None
        self._passes: ReferencePasses | None = None
        if self._reference is not None and self._metrics["activation_difference"]:
            compared = {name: tag for name, (_, tag) in self._tagged(self._reference.modules).items()}
            self._differences = OutputComparison(compared, self._metrics["activation_difference"])
            self._passes = ReferencePasses(self._reference, compared, self._differences, self.report, self._pause)
        self._skipped: set[tuple[str, str]] = set()
        self.reset_run_state()

    # Events

    def handlers(self) -> Handlers:
        gradient_handlers: Handlers = [
            *super().handlers(),
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
        ]
        completed: Handlers = [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]
        return [*(gradient_handlers if self._metrics["gradient"] else []), *completed]

    def reset_run_state(self) -> None:
        self._known: list[nn.Parameter] | None = None  # the model's parameters when names were taken
        self._modules: dict[str, nn.Module] = {}
        self._layers: dict[nn.Module, Layer] = {}
        self._units = UnitDimensions([])
        self._parameters: dict[nn.Parameter, Layer] = {}
        self._forward: ForwardMetrics | None = None
        self._gradients: GradientMetrics | None = None
        self._fewest: dict[nn.Parameter, int] = {}
        self._parameter_values: list[NamedValues] = []
        self._over_ranks = RankReduction(self.ranks)
        if self._differences is not None:
            self._differences.clear()

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if not self._is_running:
            return []
        self._update_names()
        self._parameter_values = self._measure_parameters()
        if self._metrics["gradient"]:
            self._gradients = GradientMetrics(self._parameters, self._metrics["gradient"], self._fewest)
        self._units.clear()
        metrics, root = self._metrics["activation"], self._modules[""]
        self._forward = ForwardMetrics(root, self._layers, metrics, self._attention, self._units, self._pause)
        compared = [] if self._passes is None else [self._passes.watched()]
        return [eager(), *self._forward.contexts(self._modules), *compared]

    def on_run_end(self) -> None:
        if self._passes is not None:
            self._passes.end_run("no activation_difference is published")
        if self._saw_attention is False and self.warns_without_attention:
            self.report(
                "no_attention",
                "attention=True measured no attention call (scaled_dot_product_attention, nn.MultiheadAttention)",
            )

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        if self._gradients is not None:
            self._gradients.gradients_ready(backward.scale(self.scaler), backward.reached)

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        if self._gradients is not None and step.tracker.reduced:
            self._gradients.step_started(parameters_of(step.optimizer), step.loss_scale)

    def _on_train_step_completed(self, engine: Engine) -> None:
        forward, gradients = self._forward, self._gradients
        self._forward = self._gradients = None
        if not self._is_running or forward is None:
            return
        forward.raise_error()
        results = self._forward_values(forward) + self._parameter_values
        if gradients is not None:
            results += gradients.values()
            if gradients.unknown:
                text = f"the gradients of {gradients.unknown} parameters are not known in this iteration, which had "
                self.report("fewer_backwards", f"{text}fewer backward passes than earlier ones", severity="note")
        self._parameter_values = []
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
        measurements, differences = forward.measurements, self._differences
        if differences is not None:
            measurements.append(differences.measured)
        with hidden_from_user_modes():
            rows = collect_rows(measurements)
        if differences is not None and self._passes is not None:
            differences.put_incomplete(rows[0], self._passes.incomplete)
        if self.ranks.size > 1:
            if not self.ranks.all_present:
                self.report(*JOINED)
                return []
            rows = self._over_ranks(*rows, device_of(self.model))
        results = collect_values(measurements, rows)
        if differences is None:
            return results
        differences.clear()
        return [differences.complete(values, rows[0]) for values in results]

    def _measure_parameters(self) -> list[NamedValues]:
        current = Measurement("parameter", self._metrics["parameter"])
        difference = Measurement("parameter_difference", self._metrics["parameter_difference"])
        if not (current.metrics or difference.metrics):
            return []
        initial = {}
        if self._reference is not None and difference.metrics:
            named = named_parameters(self._reference.module)
            initial = {name: parameter for name, parameter, _ in named if not parameter.is_meta}
        for parameter, (name, tag) in self._parameters.items():
            compared = name in initial and difference.wants(name)
            if compared and initial[name].shape != parameter.shape:  # the parameter was replaced
                self._report_skipped(_OTHER_SHAPE, [tag])
                compared = False
            if compared or current.wants(name):
                whole = whole_tensor(parameter)
                current.add(tag, name, whole)
                if compared:
                    other = whole_tensor(initial[name])
                    difference.add(tag, name, whole, minus=move(other, whole.device))
        return collect_values([current, difference])

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
        self._known, self._fewest = self._source.trackers[id(self.model)].parameters, {}
        self._modules = modules = modules_by_name(self.model)
        self._layers = {modules[name]: layer for name, layer in self._tagged(modules).items()}
        self._units = UnitDimensions(modules.values())
        parameters = {name: parameter for name, parameter, _ in named_parameters(self.model)}
        tagged = self._tagged(parameters).items()
        self._parameters = {parameters[name]: names for name, names in tagged if not parameters[name].is_meta}
        families = ("parameter", "gradient", "parameter_difference")
        if any(any(self._metrics[family].builtin) for family in families):
            without = [tag for item, (_, tag) in self._parameters.items() if item.dtype in WITHOUT_STATISTICS]
            self._report_skipped(_COMPLEX, without)

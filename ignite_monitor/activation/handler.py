"""ActivationHandler: statistics of activations, attention, parameters and gradients, by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ignite.engine import Engine
from torch import nn
from torch.amp import GradScaler

from ignite_monitor.activation.attention_calls import check_attention
from ignite_monitor.activation.forward_metrics import (
    ForwardMetrics,
    OutputComparison,
    in_order,
    named_apart,
    without,
)
from ignite_monitor.activation.gradient_metrics import GradientMetrics
from ignite_monitor.activation.measurement import Measurement
from ignite_monitor.activation.metric import Aggregate, MetricSet, check_aggregate
from ignite_monitor.activation.statistics import STATISTICS, WITHOUT_STATISTICS
from ignite_monitor.checks import check_type
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import ACTIVATION
from ignite_monitor.model.devices import device_of, move_like
from ignite_monitor.model.names import Pattern, Selection, named_parameters, tags
from ignite_monitor.model.norms import whole_tensor
from ignite_monitor.model.optimizers import parameters_of
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.model.structure import modules_by_name
from ignite_monitor.monitor.base import Handlers
from ignite_monitor.monitor.publisher import NamedValues, joined
from ignite_monitor.monitor.rank_reduction import RankReduction, Rows
from ignite_monitor.monitor.ranks import world_size
from ignite_monitor.reference.monitor import ReferenceMonitor

_WITHOUT_UNITS = tuple(name for name in STATISTICS if name != "dead_fraction")

Metrics = Mapping[str, Any] | bool | None


class ActivationHandler(ReferenceMonitor, schema=ACTIVATION):
    r"""Publishes statistics of what the modules of a model return, of attention, parameters and gradients, by name.

    {keys}

    Names are those in the model without wrappers, the whole model is ``_root_``; what tags can't hold is ``_``. Under
    ``True``, or as ``{"mean": True}`` beside functions of your own, there is a built-in set:

    - mean, std (of a sample), max_abs: of all elements,
    - l2_norm: the mean of the norms of the vectors along the last dimension,
    - dead_fraction: of activations, which part of the units is 0 throughout the iteration. Units are the features in
      the last dimension; where there are four and more dimensions the channels in the second; where there is but one,
      none,
    - nonfinite_count: elements that are inf or NaN. Where there are any, the others are left out.

    Beside these, of activations, gradients and parameters, with a dtype in place of True (which means float16):

    - underflow_fraction: the part of the elements, other than 0, that becomes 0 in that dtype,
    - overflow_fraction: the part that is finite, but rounds to more than the largest number of that dtype.

    **Aggregation.** All forward passes and micro-batches of an iteration make one number, as if they were one batch.
    Numbers of the user's own functions are averaged, weighted by the tensors' numbers of elements, or as ``aggregate``
    says; one that is not finite is left out. Not seen are passes in eval mode of the whole model, passes under
    :meth:`paused`, and what activation checkpointing repeats.

    **Gradients** are measured after each backward, so they are there though the step zeroes them, accumulated where
    they accumulate; with several steps in an iteration they are those of the first.

    **Errors** in a user's function are raised in the train step, as a RuntimeError that names metric, module and shape,
    with the original error as its cause.

    **Several ranks.** Numbers of forward passes are those over the batches of all ranks, also where not every rank
    reaches every module, so the handler has to be attached on all of them; it takes two collectives an iteration. What
    a rank meets for the first time is published from the next monitored iteration on. ``"last"`` is the mean of the
    ranks' last numbers. Of sharded parameters and gradients (DTensors) the whole is gathered, one after the other.
    A function as ``aggregate`` takes all numbers to the host there. Under ``join()`` nothing is published of forward
    passes.

    **Compiled models** run eagerly in monitored iterations, and as ever in the others. Eager and compiled code round
    differently, and with some compilers, inductor among them, dropout draws other masks in either.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        activations: True, or name -> function, :class:`Metric`, or True for a built-in one; a function is given a
            detached tensor and returns a number, or a tensor whose mean counts.
        parameters: likewise, of parameters.
        gradients: likewise, of gradients.
        activation_differences: likewise; functions are given two tensors, the second one the reference's.
        parameter_differences: likewise.
        reference: what to compare with: ``"init"`` for a frozen copy of the model as it is now, a module of the same
            structure, or the path of a file with a state_dict. It is run in monitored iterations, before the model, on
            the same inputs and with the same random numbers.
        include: a regular expression; only modules and parameters in whose name it is found are looked at.
        exclude: a regular expression; those in whose name it is found are not.
        attention: whether to look at attention: ``scaled_dot_product_attention`` and ``nn.MultiheadAttention``.
        aggregate: how numbers of own functions make one: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"last"``, or a
            function of a tensor that holds them.
        offload: whether the reference's outputs wait in the host's memory.
        scaler: the GradScaler of the train step.
        prefix: what to put before all names; several handlers on one engine need different ones.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, or ``parameters`` or ``gradients`` are asked for of a
            model that FullyShardedDataParallel has sharded.

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
            trainer.run(loader, max_epochs=5)
    """

    _lacking = "no activation_difference is published"

    def __init__(
        self,
        model: nn.Module,
        *,
        activations: Metrics = None,
        parameters: Metrics = None,
        gradients: Metrics = None,
        activation_differences: Metrics = None,
        parameter_differences: Metrics = None,
        reference: str | os.PathLike[str] | nn.Module | None = None,
        include: Pattern = None,
        exclude: Pattern = None,
        attention: bool = False,
        aggregate: Aggregate = "mean",
        offload: bool = False,
        scaler: GradScaler | None = None,
        prefix: str = "",
    ) -> None:
        check_type("prefix", prefix, str, "str")
        given = {
            "activation": ("activations", activations),
            "activation_difference": ("activation_differences", activation_differences),
            "gradient": ("gradients", gradients),
            "gradient_after_clip": ("gradients", gradients),
            "parameter": ("parameters", parameters),
            "parameter_difference": ("parameter_differences", parameter_differences),
        }
        wanted = [family for family, (_, each) in given.items() if each not in (None, False)]
        # What a model records of itself is there in any case.
        families = dict.fromkeys(
            ["activation", *wanted, *["attention_entropy", "attention_logit_max"] * bool(attention)]
        )
        super().__init__(model, prefix, list(families))
        aggregate = check_aggregate(aggregate)
        self._metrics = {
            family: MetricSet(
                argument,
                each or {},
                STATISTICS if family == "activation" else _WITHOUT_UNITS,
                aggregate,
                of_dtypes=not family.endswith("_difference"),
            )
            for family, (argument, each) in given.items()
        }
        check_type("attention", attention, bool, "bool")
        if attention:
            check_attention()
        check_type("offload", offload, bool, "bool")
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        differences = bool(self._metrics["activation_difference"] or self._metrics["parameter_difference"])
        if self._metrics["parameter"] or self._metrics["gradient"]:
            check_whole(model)
        if differences and reference is None:
            raise ValueError("Argument reference should be given, 'init' or a module, for differences from it")
        if reference is not None and not differences:
            raise ValueError(
                "Argument reference should be None without activation_differences and parameter_differences, "
                f"but given {type(reference)}"
            )
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._selection = Selection(include, exclude)
        names = [name or "_root_" for name in modules_by_name(model)] + [name for name, _, _ in named_parameters(model)]
        if not any(name in self._selection for name in names):
            raise ValueError("Arguments include and exclude should leave a module or a parameter, but leave none")
        self._attention = attention
        self._offload = offload
        if reference is not None:
            self._set_reference(reference)
        self._pauses: list[None] = []
        self._known: list[nn.Parameter] | None = None  # the parameters that the model had when it was looked at
        self._forward: ForwardMetrics | None = None
        self._differences: OutputComparison | None = None
        self._gradients: GradientMetrics | None = None
        self._parameters: dict[nn.Parameter, tuple[str, str]] = {}
        self._of_parameters: list[NamedValues] = []
        self._over_ranks = RankReduction()
        self._told_order = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which forward passes are not seen."""
        self._pauses.append(None)
        try:
            with super().paused():
                yield
        finally:
            self._pauses.pop()

    # What it listens to

    def handlers(self) -> Handlers:
        of_gradients: Handlers = [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
        ]
        return [*(of_gradients if self._metrics["gradient"] else []), *super().handlers()]

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if not self._is_running:
            return []
        self._look_at_model()
        return [self._watching()]

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        if self._forward is None:
            yield
            return
        self._of_parameters = self._measure_parameters()
        if self._metrics["gradient"]:
            self._gradients = GradientMetrics(self._parameters, self._metrics["gradient"])
        self._forward.start()
        with contextlib.ExitStack() as stack:
            for context in [self._eager(), *self._forward.train_step_contexts(), *super().train_step_contexts()]:
                stack.enter_context(context)
            yield

    def reset_run_state(self) -> None:
        self._known = self._forward = self._differences = self._comparison = self._passes = self._gradients = None
        self._parameters = {}
        self._of_parameters = []
        self._over_ranks = RankReduction()

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        if self._gradients is not None:
            self._gradients.gradients_ready(backward.scale(self.scaler), backward.reached)

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        if self._gradients is not None and step.tracker.reduced:
            self._gradients.step_started(parameters_of(step.optimizer), step.scale)

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running or self._forward is None:
            return
        found, self._of_parameters = self._of_forward() + self._of_parameters, []
        if self._differences is not None and self._passes is not None:
            self._forget()
            incomplete = [self._differences.tags[name] for name in self._passes.incomplete]
            found = [without(each, incomplete) for each in found]
        if self._gradients is not None:
            before, after = self._gradients.numbers()
            found += before + after
        self._gradients = None
        if self._forward.skipped:
            self._warn(
                "nothing is measured of tensors that have no values of their own here (DTensors, nested or sparse "
                f"tensors, tensors under vmap), in {', '.join(sorted(self._forward.skipped))}"
            )
        if self._forward.by_hand:
            self._warn(
                f"attention that is written out as products and a softmax is not seen, in "
                f"{', '.join(sorted(self._forward.by_hand))}: call torch.nn.functional.scaled_dot_product_attention "
                '(in transformers attn_implementation="sdpa"), or record() what is of interest in its forward'
            )
        if self._forward.complex:
            self._warn(f"complex numbers that are recorded are left out: {', '.join(sorted(self._forward.complex))}")
        if any(names for names, _ in found):
            together = joined(found)
            if not self._told_order:  # loggers that keep the order of names keep that of execution
                together, self._told_order = in_order(together, self._forward.order), True
            self.publish_table(*together)
        elif self.families == [self._named("activation")] and not any(self._metrics.values()):
            self._warn(
                "nothing is measured: no metrics are chosen, and the model calls no record(). Give activations=True "
                "for the built-in ones, or attention=True"
            )

    # What it measures

    def _of_forward(self) -> list[NamedValues]:
        if self._forward is None:
            return []
        measured = [self._forward.activation, self._forward.entropy, self._forward.logits]
        measured.append(self._forward.recorded)
        if self._differences is not None:
            measured.append(self._differences.measured)
        over_ranks = None
        if world_size() > 1:
            sums: Rows = {}
            maxima: Rows = {}
            for each in measured:
                more_sums, more_maxima = each.sums_and_maxima()
                sums |= more_sums
                maxima |= more_maxima
            if not self._may_add():
                return []
            over_ranks = self._over_ranks(sums, maxima, device_of(self.model))
        return named_apart([values for each in measured for values in each.values(over_ranks)])

    def _measure_parameters(self) -> list[NamedValues]:
        initial = {}
        if self._reference is not None and self._metrics["parameter_difference"]:
            named = named_parameters(self._reference.module)
            initial = {name: parameter for name, parameter, _ in named if not parameter.is_meta}
        if not self._metrics["parameter"] and not initial:
            return []
        current = Measurement("parameter", self._metrics["parameter"])
        difference = Measurement("parameter_difference", self._metrics["parameter_difference"])
        for parameter, (name, tag) in self._parameters.items():
            compared = name in initial and difference.wants(name)
            if not compared and not current.wants(name):
                continue
            whole = whole_tensor(parameter)
            current.add(tag, name, whole)
            if compared:
                difference.add_difference(tag, name, whole, move_like(whole_tensor(initial[name]), whole))
        return current.values() + difference.values()

    def _look_at_model(self) -> None:
        """Learn the names of modules and parameters, where they may be others than in the last monitored iteration."""
        if self._source is None or self._known is self._source.parameters(self.model):
            return
        self._known = self._source.parameters(self.model)
        modules = modules_by_name(self.model)
        of_modules = dict(zip(modules, tags(name or "_root_" for name in modules), strict=True))
        selected = [name for name in modules if (name or "_root_") in self._selection]
        self._forward = ForwardMetrics(
            modules[""],
            {modules[name]: of_modules[name] for name in selected},
            {of_modules[name]: name or "_root_" for name in selected},
            self._metrics["activation"],
            self._attention,
            self._pauses,
        )
        parameters = list(named_parameters(self.model))
        self._parameters = {
            parameter: (name, tag)
            for (name, parameter, _), tag in zip(parameters, tags(name for name, _, _ in parameters), strict=True)
            if name in self._selection and not parameter.is_meta
        }
        unlike = [name for parameter, (name, _) in self._parameters.items() if parameter.dtype in WITHOUT_STATISTICS]
        families = ("parameter", "gradient", "parameter_difference")
        if unlike and any(any(self._metrics[family].builtin) for family in families):
            self._warn(f"built-in metrics are of real numbers, and left out for {', '.join(unlike)}")
        if self._reference is not None and self._metrics["activation_difference"]:
            compared = [name for name in selected if name in self._reference.modules]
            tags_of = {name: of_modules[name] for name in compared}
            self._differences = OutputComparison(tags_of, self._metrics["activation_difference"])
            self._compare(compared, self._differences, offload=self._offload)

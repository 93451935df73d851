"""HistogramHandler: histograms of weights, gradients and activations, for TensorBoard."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers.base_logger import BaseHandler, BaseLogger
from ignite.handlers.tensorboard_logger import TensorboardLogger
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ignite_monitor.checks import check_count, check_type
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.histograms.buckets import Counts, as_histogram, count
from ignite_monitor.keys import HISTOGRAMS
from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.eager import Eager
from ignite_monitor.model.forward import ModuleHook, is_recomputation, outputs_to
from ignite_monitor.model.modes import aside, is_plain
from ignite_monitor.model.names import Pattern, Selection, named_parameters, tags, unwrapped
from ignite_monitor.model.norms import whole_tensor
from ignite_monitor.model.optimizers import parameters_of
from ignite_monitor.model.samples import is_measurable, reshard
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.model.structure import modules_by_name
from ignite_monitor.model.tensors import tagged_tensors
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.publisher import NamedValues
from ignite_monitor.monitor.rank_reduction import RankReduction, Rows
from ignite_monitor.monitor.ranks import all_take_part, world_size
from ignite_monitor.reference.isolation import is_reference_run

Found = dict[str, Counts]


class HistogramHandler(Monitor, schema=HISTOGRAMS):
    """Draws histograms of weights, gradients and activations in TensorBoard.

    {keys}

    Histograms are in :attr:`histograms`, by names like ``histograms/weights/0.weight``,
    ``histograms/gradients/0.weight`` and ``histograms/activations/0``. ``log_to`` writes them by these names, where it
    is given a ``TensorboardLogger``; other loggers get their number alone. Elements are counted where they are, in the
    buckets of ``SummaryWriter``, all of them; those that are not finite are left out.

    - weights: as the train step leaves them,
    - gradients: as backward leaves them, unscaled and not yet clipped, whatever becomes of them; those that the
      optimizer's first step in the iteration is made with, accumulated where they accumulate,
    - activations: what modules return in training mode, of all forward passes, micro-batches and ranks of the iteration
      together. Of tuples and the like each tensor by itself.

    Ignite's own ``WeightsHistHandler`` and ``GradsHistHandler`` copy whole tensors to the host, one by one, and raise
    an error where one is in bfloat16 or sharded; and gradients are no longer what they were when they are written.

    Of more than ``max_histograms`` the outermost modules are taken, of equally deep ones some spread evenly over the
    model; of parameters first those with several dimensions, in the same way. With several ranks the handler has to be
    attached on all of them. Compiled models run eagerly in monitored iterations.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        weights: whether to draw weights.
        gradients: whether to draw gradients.
        activations: whether to draw activations.
        max_histograms: how many of each kind at most, at least 1.
        include: a regular expression; only modules and parameters in whose name it is found are drawn.
        exclude: a regular expression; those in whose name it is found are not.
        scaler: the GradScaler of the train step.
        prefix: what names start with.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, no kind is chosen, ``include`` and ``exclude`` leave
            nothing, or weights or gradients are those of a model that FullyShardedDataParallel has sharded.

    Examples:
        .. code-block:: python

            histograms = HistogramHandler(model)
            histograms.attach(trainer, Events.ITERATION_STARTED(every=500))
            histograms.log_to(tensorboard_logger, trainer)
    """

    _state_dict_all_req_keys = ("max_histograms",)

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: bool = True,
        gradients: bool = True,
        activations: bool = True,
        max_histograms: int = 16,
        include: Pattern = None,
        exclude: Pattern = None,
        scaler: GradScaler | None = None,
        prefix: str = "histograms",
    ) -> None:
        super().__init__(model, prefix)
        kinds = {"weights": weights, "gradients": gradients, "activations": activations}
        for name, wanted in kinds.items():
            check_type(name, wanted, bool, "bool")
        if not any(kinds.values()):
            raise ValueError("Arguments weights, gradients and activations should not all be False")
        if weights or gradients:
            check_whole(model)
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        self.weights, self.gradients, self.activations = weights, gradients, activations
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.max_histograms = check_count("max_histograms", max_histograms, least=1)
        self._selection = Selection(include, exclude)
        if not self._chosen_parameters() and not self._chosen_modules():
            raise ValueError("Arguments include and exclude should leave a module or a parameter, but leave none")
        self._parameters: dict[nn.Parameter, str] = {}
        self._stepped: set[nn.Parameter] = set()
        self._found: dict[str, Found] = {}  # while a train step lasts: kind -> tag -> counts
        self._names: list[str] = []
        self._counted: list[Tensor] = []  # of each name its sums, and its extremes
        self._drawn: dict[str, dict[str, Any]] = {}
        self._over_ranks = RankReduction()

    def state_dict(self) -> OrderedDict[str, Any]:
        """How many histograms there may be of each kind: there is nothing else to continue."""
        return OrderedDict(max_histograms=self.max_histograms)

    @property
    def histograms(self) -> dict[str, dict[str, Any]]:
        """This iteration's histograms by name, as ``SummaryWriter.add_histogram_raw`` takes them.

        Brings them to the host.
        """
        self.on_host()
        return self._drawn

    def log_to(
        self,
        logger: BaseLogger,
        engine: Engine,
        event: Any = Events.ITERATION_COMPLETED,
        tag: str | None = None,
        *,
        include: Pattern = None,
        exclude: Pattern = None,
    ) -> None:
        super().log_to(logger, engine, event, tag, include=include, exclude=exclude)
        if isinstance(logger, TensorboardLogger):
            writer = _Writer(self, f"{tag}/" if tag else "", Selection(include, exclude))
            self._log_handlers.append(logger.attach(engine, writer, event))

    def handlers(self) -> Handlers:
        of_gradients: Handlers = [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
        ]
        at_end: Handlers = [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]
        return (of_gradients if self.gradients else []) + at_end

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if not self._is_running:
            return []
        self._parameters = self._chosen_parameters()
        self._found = {"weights": {}, "gradients": {}, "activations": {}}
        self._stepped.clear()
        if not self.activations:
            return []
        modules = self._chosen_modules()
        hook = _OutputHook(unwrapped(self.model), modules, self._found["activations"], self.max_histograms)
        return [Eager(self.model), outputs_to(modules, hook)]

    def clear(self, engine: Engine) -> None:
        super().clear(engine)
        self._names, self._counted, self._drawn = [], [], {}

    def reset_run_state(self) -> None:
        self._parameters, self._found = {}, {}
        self._stepped.clear()
        self._over_ranks = RankReduction()

    @torch.no_grad()
    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        reached = [each for each in self._parameters if id(each) in backward.reached]
        self._count_gradients(reached, backward.scale(self.scaler))

    @torch.no_grad()
    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        if step.tracker.reduced:
            own = [each for each in parameters_of(step.optimizer) if each in self._parameters]
            by_hand = [each for each in own if self._parameters[each] not in self._found["gradients"]]
            self._count_gradients(by_hand, step.scale)
            self._stepped.update(own)

    def _count_gradients(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        for each in parameters:
            if each.grad is not None and each not in self._stepped:
                self._found["gradients"][self._parameters[each]] = count(whole_tensor(each.grad), scale)

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        if self.weights:
            reshard(self.model)
            self._found["weights"] = {name: count(whole_tensor(each)) for each, name in self._parameters.items()}
        device = device_of(self.model)
        activations = {"activations": self._found.pop("activations")}
        sums, extremes = _rows(self._found, device)
        more = _rows(activations, device)
        if self.activations and world_size() > 1:
            more = self._over_ranks(*more, device) if all_take_part(self.model) else ({}, {})
        sums, extremes = sums | more[0], extremes | more[1]
        self._found = {}
        if sums:
            self._names = [f"{kind}/{name}" for kind, rows in sums.items() for name in rows.names]
            self._counted = [torch.cat([each.values for each in rows.values()]) for rows in (sums, extremes)]
            self.publish(**{f"{kind}_count": rows.values[:, :-2].any(1).sum() for kind, rows in sums.items()})

    # Values on the host

    def deferred_tensors(self) -> list[Tensor]:
        return self._counted

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        if extra:
            count = len(self._names)
            sums, extremes = (
                [flat[i : i + len(flat) // count] for i in range(0, len(flat), len(flat) // count)] for flat in extra
            )
            drawn = zip(self._names, map(as_histogram, sums, extremes), strict=True)
            self._drawn = {self._named(name): each for name, each in drawn if each is not None}
        return {}

    # What it looks at

    def _chosen_parameters(self) -> dict[nn.Parameter, str]:
        """Those with several dimensions first, and their tags."""
        if not (self.weights or self.gradients):
            return {}
        found = [
            (name, each)
            for name, each, _ in named_parameters(self.model)
            if name in self._selection and is_measurable(each) and not each.is_complex()
        ]
        found = [found[i] for i in _spread([each.ndim < 2 for _, each in found], self.max_histograms)]
        return dict(zip((each for _, each in found), tags(name for name, _ in found), strict=True))

    def _chosen_modules(self) -> dict[nn.Module, str]:
        """The outermost ones first, and their tags."""
        if not self.activations:
            return {}
        found = [
            (name or "_root_", each)
            for name, each in modules_by_name(self.model).items()
            if (name or "_root_") in self._selection and type(each).forward is not nn.Module.forward
        ]
        depths = [0 if name == "_root_" else 1 + name.count(".") for name, _ in found]
        found = [found[i] for i in _spread(depths, self.max_histograms)]
        return dict(zip((each for _, each in found), tags(name for name, _ in found), strict=True))


class _OutputHook(ModuleHook):
    """Counts the elements of what modules return.

    It holds no monitor, since the engine holds what is around a train step.
    """

    def __init__(self, root: nn.Module, modules: Mapping[nn.Module, str], found: Found, most: int) -> None:
        self._root, self._found, self._most = root, found, most
        self._tags = {id(module): tag for module, tag in modules.items()}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tag = self._tags.get(id(module))
        if tag is None or not self._root.training or is_recomputation() or is_reference_run():
            return
        with aside():
            for index, tensor in tagged_tensors(output):
                name = f"{tag}/{index}" if index else tag
                if is_plain(tensor) and (name in self._found or len(self._found) < self._most):
                    counts = count(tensor.detach())
                    self._found[name] = self._found[name].plus(counts) if name in self._found else counts


class _Writer(BaseHandler):
    """Writes a monitor's histograms to TensorBoard.

    Args:
        monitor: the monitor, which is not kept alive.
        tag: what to put before the names.
        selection: the names that are written.
    """

    def __init__(self, monitor: HistogramHandler, tag: str, selection: Selection) -> None:
        self._monitor = weakref.ref(monitor)
        self._tag = tag
        self._selection = selection

    def __call__(self, engine: Engine, logger: Any, event_name: Any) -> None:
        monitor = self._monitor()
        step = engine.state.get_event_attrib_value(event_name)
        for name, each in {}.items() if monitor is None else monitor.histograms.items():
            if name in self._selection:
                logger.writer.add_histogram_raw(f"{self._tag}{name}", **each, global_step=step)


def _rows(found: Mapping[str, Found], device: torch.device) -> tuple[Rows, Rows]:
    """Kind -> names and their sums, and the same with the extremes."""
    sums: Rows = {}
    extremes: Rows = {}
    for kind, own in found.items():
        if own:
            both = ([move(each, device) for each in column] for column in zip(*own.values(), strict=True))
            sums[kind], extremes[kind] = (NamedValues(list(own), torch.stack(each)) for each in both)
    return sums, extremes


def _spread(ranks: Sequence[int], most: int) -> list[int]:
    """Indices of those with the lowest ranks; of the last one that there is room for, some from first to last."""
    chosen: list[int] = []
    for rank in sorted(set(ranks)):
        own = [index for index, each in enumerate(ranks) if each == rank]
        room = most - len(chosen)
        if len(own) > room:
            own = [own[i * (len(own) - 1) // max(room - 1, 1)] for i in range(room)]
        chosen += own
    return sorted(chosen)

"""AlignmentHandler: how well the changes of a layer's inputs and weights are aligned with each other."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ignite_monitor.checks import check_count, check_type
from ignite_monitor.keys import ALIGNMENT
from ignite_monitor.model.names import Pattern, Selection, tags
from ignite_monitor.model.structure import modules_by_name
from ignite_monitor.reference.monitor import ReferenceMonitor
from ignite_monitor.reference.reference import Reference
from ignite_monitor.scaling.alignment import TERMS, AlignmentCalls, find_layers, over_layers
from ignite_monitor.scaling.parametrization import Parametrization


class AlignmentHandler(ReferenceMonitor, schema=ALIGNMENT):
    r"""Measures how much larger the terms of a layer's change are than their factors, as exponents of its fan-in.

    A layer's weights :math:`W_0` have become :math:`W_0 + \Delta W`, and the input that this batch made in the initial
    model, :math:`z_0`, is :math:`z_0 + \Delta z` in the model of now. With n the fan-in, the alignment of an input z
    and a weight W (arXiv:2407.05872) is the mean over the rows of the batch of

    .. math:: \frac{\log \mathrm{RMS}(z W^\top) - \log(\mathrm{RMS}(z)\, \mathrm{RMS}(W))}{\log n},

    1/2 for what is random to each other, 1 for what is fully aligned. It is computed in float64 (float32 on devices
    without it).

    {keys}

    **Undefined** is what has a factor that is 0: all before the first update, and the latter two of a layer whose
    inputs are data. Where a row's is undefined, as behind units that are all dead, the row doesn't count. What no row
    defines is absent.

    **Layers** are Linear, convolutions and transposed convolutions with a fan-in (times the size of a convolution's
    kernel) of more than 1. A table, as an Embedding, adds nothing up, and so has none. Of a Parametrization its hidden
    layers and readouts count, by their names in it: the fan-in of an embedding does not grow with the width.
    Multipliers and biases have no part in it. A row is a vector of features, of a convolution a whole sample.

    **Cost** of a monitored iteration: a forward pass of the reference without gradients, and three products of each
    weight with ``sample_size`` rows; of other iterations nothing. Training is not touched: the reference draws the same
    dropout masks, and random numbers and running statistics are put back. Of several ranks it is the mean over all
    their rows, in one collective; under ``join()``, where not all of them have data, nothing is published.

    Args:
        model_or_parametrization: the model, as the train step uses it (wrapped, where it is wrapped), or a
            :class:`Parametrization`.
        sample_size: how many rows of each batch to measure, evenly spread over it.
        reference: ``"init"`` for a frozen copy of the model as it is now, which is saved with the handler; ``"seed"``
            to draw the initial weights of a Parametrization anew in each monitored iteration instead of keeping them;
            or a module of the same structure.
        include: a regular expression, to be found in the names of the layers to measure; None for all of them.
        exclude: a regular expression that must not be found in them.
        prefix: what the values' names start with.

    Attributes:
        reference: the reference, a module.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, there is no layer to measure, or the reference is of
            another structure than the model.

    Examples:
        .. code-block:: python

            handler = AlignmentHandler(model)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
            handler.log_to(tensorboard_logger, trainer)
            trainer.run(loader, max_epochs=5)
    """

    _state_dict_all_req_keys = ("reference", "seeds")

    def __init__(
        self,
        model_or_parametrization: nn.Module | Parametrization,
        *,
        sample_size: int = 32,
        reference: str | nn.Module = "init",
        include: Pattern = None,
        exclude: Pattern = None,
        prefix: str = "alignment",
    ) -> None:
        parametrization = model_or_parametrization if isinstance(model_or_parametrization, Parametrization) else None
        model: Any = model_or_parametrization if parametrization is None else parametrization.model
        check_type("model_or_parametrization", model, nn.Module, "torch.nn.Module or Parametrization")
        super().__init__(model, prefix)
        sample_size = check_count("sample_size", sample_size, least=1)
        if isinstance(reference, str) and reference not in ("init", "seed"):
            raise ValueError(f"Argument reference should be 'init', 'seed' or a module, but given {reference!r}")
        seeded = isinstance(reference, str) and reference == "seed"
        if seeded and parametrization is None:
            raise ValueError("Argument reference can be 'seed' with a Parametrization only, but given a model")
        selection = Selection(include, exclude)
        made = self._set_reference("init" if seeded else reference)
        measurable = find_layers(made.root, parametrization)
        layers = {name: modules for name, modules in measurable.items() if name in selection}
        if not layers:
            raise ValueError(
                "Argument model_or_parametrization should have Linear layers or convolutions that include and exclude "
                f"leave, but has {list(measurable) or 'none'}"
            )
        self._seeded = SeededWeights(made, parametrization) if parametrization and seeded else None
        self._calls = AlignmentCalls(made, layers, sample_size)
        self._compare(self._calls.rows, self._calls)
        layer_tags = tags(name or "_root_" for name in layers)
        self._keys = [f"{term}/{tag}" for tag in layer_tags for term in TERMS]
        self._keys += [f"{term}_{statistic}" for statistic in ("mean", "min", "max") for term in TERMS]

    def state_dict(self) -> OrderedDict[str, Any]:
        """The weights of the reference, None where it was given as a module; and the seeds of those that have some."""
        seeds = None if self._seeded is None else self._seeded.seeds
        return OrderedDict(super().state_dict(), seeds=seeds)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if (state_dict["seeds"] is None) is not (self._seeded is None):
            raise ValueError("Argument state_dict was saved with another reference: give the same one again")
        if self._seeded is not None:
            self._seeded.load(state_dict["seeds"])

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        around = super().train_step_contexts()
        return [self._seeded.drawn(), *around] if around and self._seeded is not None else around

    def _compared(self, incomplete: set[str]) -> None:
        table = self._calls.result(incomplete)
        self.publish_table(self._keys, torch.cat([table, over_layers(table)]).flatten())


class SeededWeights:
    """Lets a reference's weights go, but while they are needed."""

    def __init__(self, reference: Reference, parametrization: Parametrization) -> None:
        self._layers = dict(parametrization.layers)
        names = {module: name for name, module in modules_by_name(reference.root).items()}
        self._weights: list[tuple[str, str, nn.Parameter]] = []
        for layer in self._layers.values():
            copied = reference.modules[names[layer.module]].get_parameter
            self._weights += [(layer.name, key, copied(key)) for key in layer.weight_names]
            for key in layer.zeroed_biases:
                copied(key).data.zero_()
        self._let_go()

    @property
    def seeds(self) -> dict[str, dict[str, int]]:
        """The seeds by layer and parameter."""
        return {name: dict(layer.seeds) for name, layer in self._layers.items()}

    def load(self, seeds: Mapping[str, Mapping[str, int]]) -> None:
        """Take the seeds of a saved run over.

        Raises:
            ValueError: if they are of other layers.
        """
        if {name: set(each) for name, each in seeds.items()} != {name: set(each) for name, each in self.seeds.items()}:
            raise ValueError("Argument state_dict should have the seeds of the parametrization's layers")
        self._layers = {name: replace(layer, seeds=dict(seeds[name])) for name, layer in self._layers.items()}

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """While it lasts, the weights are there."""
        try:
            for name, key, weight in self._weights:
                weight.data = self._layers[name].initial_weight(key)
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for _, _, weight in self._weights:
            weight.data = weight.data.new_empty(0)

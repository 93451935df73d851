"""AlignmentHandler: alignment of the changes of inputs and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ignite_monitor.checks import check_count, check_type
from ignite_monitor.keys import ALIGNMENT
from ignite_monitor.model.names import Pattern, Selection, tags
from ignite_monitor.reference.monitor import ReferenceMonitor
from ignite_monitor.scaling.alignment import TERMS, AlignmentCalls, measurable_layers, over_layers
from ignite_monitor.scaling.parametrization import Parametrization


class AlignmentHandler(ReferenceMonitor, schema=ALIGNMENT):
    r"""Measure the alignment of each layer's input and weights, and of their changes, as exponents of the fan-in.

    Weights are :math:`W_0 + \Delta W`, and the input for this batch, :math:`z_0` in the initial model, is
    :math:`z_0 + \Delta z`. With fan-in n, the alignment of z and W (arXiv:2407.05872) is the mean over the rows of

    .. math:: \frac{\log \mathrm{RMS}(z W^\top) - \log(\mathrm{RMS}(z)\, \mathrm{RMS}(W))}{\log n},

    1/2 for independent factors and 1 for full alignment, computed in float64 (float32 on devices without it).

    {keys}

    Measured are Linear layers, convolutions and transposed convolutions; of a Parametrization, its hidden layers and
    readouts. Terms with a factor that is 0 are not reported, such as all terms before the first update.

    Args:
        model_or_parametrization: the model as the train step uses it (wrapped, if it is wrapped), or a
            :class:`Parametrization`.
        sample_size: number of rows to measure, evenly spaced in each batch.
        reference: ``"init"`` for a frozen copy of the model as it is now, which is saved with the handler; or a module
            of the same structure.
        include: a regular expression that the names of measured layers contain; None for all layers.
        exclude: a regular expression that they must not contain.
        prefix: prefix of the keys.

    Attributes:
        reference: the reference, a module.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument is invalid, no layer can be measured, or the reference has another structure.

    Examples:
        .. code-block:: python

            handler = AlignmentHandler(model)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
            handler.log_to(tensorboard_logger, trainer)
            trainer.run(loader, max_epochs=5)
    """

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
        selection = Selection(include, exclude)
        made = self._set_reference(reference)
        measurable = measurable_layers(made.root, parametrization)
        layers = [name for name in measurable if name in selection]
        if not layers:
            raise ValueError(
                "Argument model_or_parametrization should have Linear layers or convolutions that include and exclude "
                f"select, but has {measurable or 'none'}"
            )
        self._calls = AlignmentCalls(made, layers, sample_size)
        self._compare(self._calls.layers, self._calls)
        layer_tags = tags(name or "_root_" for name in layers)
        self._keys = [f"{term}/{tag}" for tag in layer_tags for term in TERMS]
        self._keys += [f"{term}_{statistic}" for statistic in ("mean", "min", "max") for term in TERMS]

    def _compared(self, incomplete: set[str]) -> None:
        table = self._calls.result(incomplete)
        self.publish_table(self._keys, torch.cat([table, over_layers(table)]).flatten())

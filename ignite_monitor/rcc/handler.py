"""RCCHandler: the refined coordinate check of a model's layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ignite_monitor.keys import RCC
from ignite_monitor.model.names import Pattern, Selection, tags
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.rcc.layers import LayerChanges, is_measured
from ignite_monitor.rcc.terms import over_layers
from ignite_monitor.reference.monitor import ReferenceMonitor


class RCCHandler(ReferenceMonitor, schema=RCC):
    r"""Split the change of each layer's output into the update of its weights and the drift of its input.

    This is the refined coordinate check of arXiv:2505.22491. In monitored iterations a frozen reference, by default a
    copy of the initial model, runs on the model's inputs with the same RNG state. With weights :math:`W_t` and inputs
    :math:`x_t` of the model, :math:`W_0` and :math:`x_0` of the reference,

    .. math:: W_t x_t - W_0 x_0 = (W_t - W_0)\, x_t + W_0\, (x_t - x_0).

    {keys}

    Layers are Linear, convolutions, Embedding and normalization layers of torch, and Conv1D of transformers. Norms are
    l2 norms over the features, averaged over positions, samples, calls, micro-batches and ranks. Embedding has
    ``weight_update`` alone. A layer that can't be compared is not reported, with one warning.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        reference: ``"init"`` for a frozen copy of the model as it is now, saved with the handler, or a module of the
            same structure on the same device.
        include: a regular expression searched in layer names; only matching layers are measured. None for all.
        exclude: a regular expression searched in layer names; matching layers are not measured.
        generators: random generators of the forward pass that its modules, their classes and files do not hold, for a
            second pass to restore.
        group: the ranks to average over, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: start of the keys.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is invalid, or the model can't be copied, as one of ``fully_shard``.

    Examples:
        .. code-block:: python

            handler = RCCHandler(model)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
            handler.log_to(tensorboard_logger, trainer)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        reference: str | nn.Module = "init",
        include: Pattern = None,
        exclude: Pattern = None,
        generators: Iterable[Any] = (),
        group: Group = None,
        prefix: str = "rcc",
    ) -> None:
        super().__init__(model, prefix, reference, generators, group)
        selection, modules = Selection(include, exclude), self._reference.modules
        layers = [name for name, module in modules.items() if is_measured(module) and name in selection]
        if not layers:
            raise ValueError(
                "Arguments model, include and exclude should leave a linear layer, convolution, Embedding or "
                "normalization layer, but leave none"
            )
        layer_tags = dict(zip(layers, tags(name or "_root_" for name in layers), strict=True))
        self._changes = LayerChanges(self._reference, layer_tags)
        self._compare(layers, self._changes)

    def _compared(self, incomplete: set[str]) -> None:
        means = self._changes.means(incomplete, self.ranks)
        self.publish(**over_layers(means))
        self.publish_table(self._changes.keys, means.flatten())

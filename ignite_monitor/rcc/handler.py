"""RCCHandler: whether it is the weights or their inputs that change what a layer computes."""

from __future__ import annotations

import os

from torch import nn

from ignite_monitor.keys import RCC
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.names import Pattern, Selection, tags
from ignite_monitor.model.structure import is_layer
from ignite_monitor.rcc.layers import LayerChanges
from ignite_monitor.reference.monitor import ReferenceMonitor


class RCCHandler(ReferenceMonitor, schema=RCC):
    r"""Splits each layer's change since the reference into what its weights do and what reaches it.

    This is the refined coordinate check of `On the Surprising Effectiveness of Large Learning Rates under Standard
    Width Scaling <https://arxiv.org/abs/2505.22491>`_.

    In monitored iterations a frozen reference, by default the model as it was when the handler was made, is run on
    the same inputs as the model, with the same dropout masks. For a layer with weights :math:`W_t` (:math:`W_0` in the
    reference) and input :math:`x_t` (:math:`x_0`),

    .. math:: W_t x_t - W_0 x_0 = (W_t - W_0)\, x_t + W_0\, (x_t - x_0)

    and for any other function f of its weights, :math:`f_t(x_t) - f_0(x_0) = (f_t(x_t) - f_0(x_t)) + (f_0(x_t) -
    f_0(x_0))`.

    {keys}

    Norms are l2 over the features (the last dimension; that of the channels for convolutions, BatchNorm, InstanceNorm,
    GroupNorm and PReLU), and means over all else: positions, samples, calls, micro-batches and ranks. Where a layer
    has a bias, its change belongs to ``weight_update`` and ``output_change``; the first six are there a second time as
    ``rcc/…/{layer}.weight``, without it. LayerNorm and RMSNorm are taken as functions of their input x, and as
    ``{layer}.weight`` as products of weight and normalised input. A layer without a floating-point input, as an
    Embedding, has ``weight_update`` alone. All are 0 before the first update. What no rank measures, and what isn't
    finite, is absent.

    **Layers** are all modules with parameters of their own, those of the user included; tied weights count in either
    module. For Linear, convolutions, Embedding, LayerNorm and RMSNorm, both terms are computed from differences, in
    float32 or better whatever autocast does, so that an update of a millionth has as many digits as any. Normalizations
    of your own in low precision, classes whose names end in ``Norm``, are evaluated in float32. Of all others the
    reference's module is evaluated once more on the model's input, under the model's autocast; of those that hold
    other layers, an nn.MultiheadAttention or a model with a position embedding of its own, the whole is taken, what is
    in it included. Of several inputs or outputs the first floating-point tensor is the one that is measured. Weights
    are those at the time of the forward pass.

    Passes of the whole model in training mode count; not what activation checkpointing repeats. A layer that the model
    calls more or less often than the reference does, as experts to which tokens are routed, is left out of the
    iteration with a warning, and so is one whose weights are given in its call, by ``torch.func.functional_call``, and
    everything where the reference can't be run.

    **The copy** has functions of its own in place of those that modules keep, whose closures lead into it. Where it
    would call the model that trains all the same, it is stopped before it does, and nothing of that pass is published.
    It is without your forward hooks, so nothing is published either where these change inputs or outputs. A warning
    says so: give a module as ``reference`` then.

    **Training** is the same, as far as can be seen from outside: what the reference draws from the generators of torch,
    NumPy and Python, and from those that modules hold, the model draws once more. A generator at the top
    of a file, and counters and caches there that a forward changes, move on in both passes. Compiled models run eagerly
    in monitored iterations; eager and compiled code round differently, and with some compilers, inductor among them,
    dropout draws other masks in either.

    **Several ranks.** A monitored iteration takes one collective. Under ``join()`` of DistributedDataParallel, where
    not all ranks have data, nothing is published.

    **Cost** of a monitored iteration: a forward pass without gradients, two products with each weight, and memory for
    the reference's weights and for its layers' inputs, which are freed as the model reaches them.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        reference: ``"init"`` for a frozen copy of the model as it is now, which is saved with the handler; a module of
            the same structure, on the same device; or the path of a file with a state_dict.
        include: a regular expression, to be found in the names of the layers to measure; None for all of them.
        exclude: a regular expression that must not be found in them.
        offload: whether the layers' inputs wait in the host's memory.
        prefix: what the values' names start with.

    Attributes:
        reference: the reference, a module.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, or the reference is of another structure than the model;
            where the model can't be copied, as one of ``fully_shard``, a module has to be given.

    Examples:
        .. code-block:: python

            handler = RCCHandler(model)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
            handler.log_to(tensorboard_logger, trainer)
            trainer.run(loader, max_epochs=5)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        reference: str | os.PathLike[str] | nn.Module = "init",
        include: Pattern = None,
        exclude: Pattern = None,
        offload: bool = False,
        prefix: str = "rcc",
    ) -> None:
        super().__init__(model, prefix)
        selection = Selection(include, exclude)
        made = self._set_reference(reference)
        layers = [name for name, module in made.modules.items() if is_layer(name, module) and name in selection]
        if not layers:
            raise ValueError("Arguments include and exclude should leave a layer with parameters, but leave none")
        self._changes = LayerChanges(made, dict(zip(layers, tags(name or "_root_" for name in layers), strict=True)))
        self._compare(layers, self._changes, offload=bool(offload))

    def _compared(self, incomplete: set[str]) -> None:
        names, values, over_layers = self._changes.values(incomplete, device_of(self.model))
        if names:
            self.publish(**over_layers)
            self.publish_table(names, values)

r"""AlignmentHandler: alignment of inputs, weights and their changes, as exponents of the fan-in.

The three products of a layer's change (arXiv:2407.05872) have the alignments :math:`\alpha` of
:math:`z_0 \Delta W^\top`, :math:`\omega` of :math:`\Delta z W_0^\top`, and u of :math:`\Delta z \Delta W^\top`.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_count, check_type
from ignite_monitor.keys import ALIGNMENT
from ignite_monitor.model.devices import device_of, move, move_like, wide_dtype
from ignite_monitor.model.linear_maps import CONVOLUTIONS, TRANSPOSED, feature_dim, is_linear, linear_output
from ignite_monitor.model.modes import full_precision, has_local_data, hidden_from_user_modes
from ignite_monitor.model.names import Pattern, Selection, named_modules, tags
from ignite_monitor.monitor.ranks import Group, Ranks
from ignite_monitor.reference.monitor import ReferenceMonitor
from ignite_monitor.reference.passes import Call, Comparison
from ignite_monitor.reference.reference import NotComparableError, Reference
from ignite_monitor.scaling.parametrization import Parametrization

TERMS = ("z0_dW", "dZ_w0", "dZ_dW")  # names of the three products in keys


class AlignmentHandler(ReferenceMonitor, schema=ALIGNMENT):
    r"""Measure the alignment of each layer's input and weights, and of their changes, as exponents of the fan-in.

    Weights are :math:`W_0 + \Delta W`, and the input for this batch, :math:`z_0` in the initial model, is
    :math:`z_0 + \Delta z`. With fan-in n, the alignment of z and W (arXiv:2407.05872) is the mean over the rows of

    .. math:: \frac{\log \mathrm{RMS}(z W^\top) - \log(\mathrm{RMS}(z)\, \mathrm{RMS}(W))}{\log n},

    1/2 for independent factors (n random terms add up to :math:`\sqrt n`) and 1 for full alignment
    (:math:`W = u z^\top`), computed in float64 (float32 on devices without it).

    {keys}

    Measured are Linear layers, convolutions and transposed convolutions; of a Parametrization, its hidden layers and
    readouts. Terms with a factor that is 0 are not reported, such as all terms before the first update.

    Args:
        model_or_parametrization: the model as the train step uses it (wrapped, if it is wrapped), or a
            :class:`Parametrization`.
        sample_size: number of rows to measure, a random sample of each input's rows with a fixed seed.
        reference: ``"init"`` for a frozen copy of the model as it is now, which is saved with the handler; or a module
            of the same structure.
        include: a regular expression that the names of measured layers contain; None for all layers.
        exclude: a regular expression that they must not contain.
        generators: random generators of the forward pass that its modules, their classes and files do not hold, for a
            second pass to restore.
        group: the ranks to average over, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is invalid, no layer can be measured, or the reference has another structure.

    Examples:
        .. code-block:: python

            handler = AlignmentHandler(model)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
            handler.log_to(tensorboard_logger, trainer)
    """

    def __init__(
        self,
        model_or_parametrization: nn.Module | Parametrization,
        *,
        sample_size: int = 128,
        reference: str | nn.Module = "init",
        include: Pattern = None,
        exclude: Pattern = None,
        generators: Iterable[Any] = (),
        group: Group = None,
        prefix: str = "alignment",
    ) -> None:
        parametrization = model_or_parametrization if isinstance(model_or_parametrization, Parametrization) else None
        model: Any = model_or_parametrization if parametrization is None else parametrization.model
        check_type("model_or_parametrization", model, nn.Module, "torch.nn.Module or Parametrization")
        super().__init__(model, prefix, reference, generators, group)
        sample_size = check_count("sample_size", sample_size, least=1)
        selection = Selection(include, exclude)
        measurable = measurable_layers(self._reference.root, parametrization)
        layers = [name for name in measurable if name in selection]
        if not layers:
            raise ValueError(
                "Argument model_or_parametrization should have Linear layers or convolutions that include and exclude "
                f"select, but has {measurable or 'none'}"
            )
        self._calls = AlignmentCalls(self._reference, layers, sample_size)
        self._compare(self._calls.layers, self._calls)
        layer_tags = tags(name or "_root_" for name in layers)
        self._keys = [f"{term}/{tag}" for tag in layer_tags for term in TERMS]
        self._keys += [f"{term}_{statistic}" for statistic in ("mean", "min", "max") for term in TERMS]

    def _compared(self, incomplete: set[str]) -> None:
        table = self._calls.result(incomplete, self.ranks)
        unknown = table.isnan()
        smallest = table.masked_fill(unknown, math.inf).amin(0)
        largest = table.masked_fill(unknown, -math.inf).amax(0)
        over_layers = torch.stack([table.nanmean(0), smallest, largest]).masked_fill(unknown.all(0), math.nan)
        self.publish_table(self._keys, torch.cat([table, over_layers]).flatten())


def row_alignment(product: Callable[[Tensor, Tensor], Tensor], fan_in: float, x: Tensor, weight: Tensor) -> Tensor:
    """Return the alignment of each row of an input with a weight; NaN where the row, weight or product is 0.

    ``product`` is linear in both; its elements are sums of ``fan_in`` > 1 products.
    """

    def rms(values: Tensor) -> Tensor:
        return values.flatten(1).square().mean(1).sqrt()

    exponents = (rms(product(x, weight)).log() - (rms(x) * rms(weight[None])).log()) / math.log(fan_in)
    return torch.where(exponents.isfinite(), exponents, math.nan)


class AlignmentCalls(Comparison):
    """Measures the alignment in calls of the named modules, on ``sample_size`` rows of a batch."""

    def __init__(self, reference: Reference, layers: Sequence[str], sample_size: int) -> None:
        self.layers = list(layers)
        self._reference = reference
        self._sample_size = sample_size
        self._sums: list[tuple[str, Tensor]] = []

    def clear(self) -> None:
        self._sums = []

    def keep(self, call: Call) -> Tensor | None:
        x = call.args[0] if call.args else call.kwargs.get("input")
        if not isinstance(x, Tensor) or not has_local_data(x) or not x.is_floating_point():
            return None
        with hidden_from_user_modes():
            # A row has all dimensions from the features on.
            rows = x.detach().reshape(-1, *x.shape[x.ndim + feature_dim(call.module) :])
            # A copy: it keeps no batch alive, and in-place operations of the model do not change it.
            return rows[move(sampled_rows(len(rows), self._sample_size), rows.device)]

    def compare(self, call: Call, kept: Tensor | None) -> None:
        module: Any = call.module
        reference: Any = self._reference.modules[call.name]
        weight, x0, x = module.weight, kept, self.keep(call)
        if not is_linear(module) or x is None or x0 is None or x.shape != x0.shape:
            raise NotComparableError("its forward was replaced, or its input is no dense tensor as in the reference")
        if not isinstance(weight, Tensor) or not has_local_data(weight):
            raise NotComparableError("its weight is sharded while it runs")
        wide = wide_dtype(x.device)
        with hidden_from_user_modes(), full_precision(x.device):
            # Mixed precision of fully_shard rounds weights; the reference's are rounded alike.
            w0 = reference.weight.to(weight.dtype).to(wide)
            z0, dw = x0.to(wide), weight.to(wide) - w0
            dz = x.to(wide) - z0
            product, n = functools.partial(linear_output, module, call.args, call.kwargs), fan_in(module)
            rows = torch.stack([row_alignment(product, n, *pair) for pair in ((z0, dw), (dz, w0), (dz, dw))])
            self._sums.append((call.name, torch.stack([rows.nansum(1), (~rows.isnan()).sum(1, dtype=rows.dtype)])))

    def result(self, incomplete: Collection[str], ranks: Ranks) -> Tensor:
        """Return the alignments over all ranks, one row per layer; NaN if undefined or incomplete on any rank."""
        device = device_of(self._reference.module)
        table = torch.zeros(len(self.layers), 2, len(TERMS), dtype=wide_dtype(device), device=device)
        rows = dict(zip(self.layers, table, strict=True))
        for name, sums in self._sums:
            rows[name] += move_like(sums, table)
        for name in incomplete:
            rows[name].fill_(math.nan)
        table = ranks.sum(table)
        return torch.where(table[:, 1] > 0, table[:, 0] / table[:, 1], math.nan)


@functools.lru_cache(maxsize=64)
def sampled_rows(count: int, sample_size: int) -> Tensor:
    """Indices of a random sample of rows, the same for each input of so many rows.

    Evenly spaced rows of (batch, sequence, features) may all be of one position.
    """
    return torch.tensor(random.Random(0).sample(range(count), min(count, sample_size)), dtype=torch.int64, device="cpu")


def fan_in(module: nn.Module) -> float:
    """Return the number of products that each output of a linear map is the sum of."""
    weight: Any = module.weight
    if isinstance(module, TRANSPOSED):
        return float(weight[:, 0].numel() / module.groups / math.prod(module.stride))
    if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
        return float(weight.numel() / weight.shape[0])
    return float(weight.shape[0])


def measurable_layers(model: nn.Module, parametrization: Parametrization | None) -> list[str]:
    """Return the names of modules whose alignment is defined; of a parametrization, of hidden layers and readouts."""
    modules = dict(named_modules(model))
    if parametrization is not None:
        layers = [layer for layer in parametrization.layers.values() if layer.role != "embedding"]
        modules = {layer.module: modules[layer.module] for layer in layers if layer.module in modules}
    linear: dict[str, Any] = {name: module for name, module in modules.items() if is_linear(module)}
    return [name for name, module in linear.items() if module.weight.numel() and fan_in(module) > 1]

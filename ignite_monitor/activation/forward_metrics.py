"""Metrics of module outputs, attention and recorded values in forward passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_monitor.activation.accumulator import SMALL
from ignite_monitor.activation.attention import HeadEntropy, attention_entropy
from ignite_monitor.activation.attention_arguments import AttentionArguments
from ignite_monitor.activation.attention_calls import NOT_PLAIN, AttentionCalls
from ignite_monitor.activation.measurement import Measurement
from ignite_monitor.activation.metric import MetricSet, as_number, is_tag
from ignite_monitor.activation.record import recording
from ignite_monitor.model._torch import (
    backward_number,
    dispatch_modes,
    function_modes,
    set_grad_enabled,
)
from ignite_monitor.model.devices import device_of, move_like
from ignite_monitor.model.forward import ModuleHook, after_forward, outputs_to, running_module
from ignite_monitor.model.isolation import is_reference_run
from ignite_monitor.model.modes import aside, is_plain
from ignite_monitor.model.tensors import tagged_tensors
from ignite_monitor.monitor.rank_reduction import Rows
from ignite_monitor.monitor.transfer import NamedValues

COMPLEX = "complex numbers have no built-in metrics and are not recorded"
FAST_PATH = "a hook would take a frozen nn.TransformerEncoderLayer off its fast path, which rounds differently"
NOT_A_NUMBER = "recorded values should be numbers, or tensors or arrays of numbers"
# Outputs of at most 2**16 elements that wait together.
_MOST_OUTPUTS = 256

NOT_A_NAME = "recorded names should consist of letters, digits, '-', '_', '.' and '/'"


class Layer(NamedTuple):
    """A module to measure.

    Attributes:
        name: its name in the model without wrappers, ``_root_`` for the whole model.
        tag: its name as loggers take it.
        spatial: the number of spatial dimensions of a convolution; None for other modules.
        waits: whether small outputs may wait until the end of the pass.
    """

    name: str
    tag: str
    spatial: int | None
    waits: bool

    @classmethod
    def of(cls, name: str, tag: str, module: nn.Module, metrics: MetricSet) -> Layer:
        """A module, of which outputs are measured by some metrics."""
        spatial = len(module.kernel_size) if isinstance(module, _CONVOLUTIONS) else None
        return cls(name, tag, spatial, waits=spatial is None and not metrics.own)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class ForwardMetrics:
    """Metrics of the forward passes of one iteration.

    Args:
        root: the model without wrappers.
        layers: module -> what is known of it, for the modules to measure.
        metrics: metrics of outputs, and of queries, keys and values.
        attention: whether to measure attention.
        pauses: nothing is measured while it has elements.

    Attributes:
        activation: measures outputs and attention heads.
        recorded: measures recorded values.
        outputs: outputs that wait to be measured.
        saw_attention: False if attention is measured and there was no call so far.
        skipped: pairs of a layer's tag and the reason why something of it is not measured.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: dict[nn.Module, Layer],
        metrics: MetricSet,
        attention: bool,
        pauses: Sequence[None],
    ) -> None:
        self._root = root
        self.layers = layers
        self._layers = {id(module): layer for module, layer in layers.items()}
        self._metrics = metrics
        self._pauses = pauses
        self.activation = Measurement("activation", metrics)
        self.recorded = Measurement("recorded", MetricSet("activations", {}, (), metrics.aggregate))
        self.outputs: list[tuple[Layer, Tensor]] = []
        self.skipped: set[tuple[str, str]] = set()
        self._attention = attention
        self.saw_attention = not attention
        self._entropies: dict[tuple[str, ...], HeadEntropy] = {}
        # The unit dimension of what convolutions return, by number of dimensions and first two sizes.
        self._channels: dict[tuple[int, ...], int] = {}

    def start(self) -> None:
        """Forget the previous iteration."""
        self.outputs.clear()
        self.activation.clear()
        self.recorded.clear()
        self.skipped.clear()
        self._entropies.clear()
        self._channels.clear()

    def train_step_contexts(self, hookable: Iterable[nn.Module]) -> list[AbstractContextManager[Any]]:
        """Contexts around a train step that is measured.

        Args:
            hookable: the modules on which a hook does not change what the model computes.
        """
        hooked = set(map(id, hookable))
        modules = [module for module in self.layers if id(module) in hooked]
        contexts: list[AbstractContextManager[Any]] = [recording(self._record)]
        if self._metrics:
            contexts.append(outputs_to(modules, _OutputHook(self, modules)))
            contexts.append(after_forward([self._root], self._pass_ended))
        if self._attention:
            contexts.append(AttentionCalls(self._running_layer, self._measure_attention).during(hookable))
        return contexts

    def is_wanted(self) -> bool:
        """Whether a forward pass is measured; in a backward pass it is a recomputation by activation checkpointing."""
        return not (self._pauses or backward_number() != -1 or is_reference_run()) and self._root.training

    def attention_rows(self) -> tuple[Rows, Rows]:
        """Entropies and logit maxima, as :meth:`Measurement.rows` gives values."""
        if not self._entropies:
            return {}, {}
        keys = [key for heads in self._entropies for key in heads]
        first = next(iter(self._entropies.values())).total
        parts = zip(*self._entropies.values(), strict=True)
        total, rows, largest = (torch.cat([move_like(each, first) for each in part]) for part in parts)
        entropies, maxima = NamedValues(keys, torch.stack([total, rows], 1)), NamedValues(keys, largest.unsqueeze(1))
        return {("attention_entropy", "mean"): entropies}, {("attention_logit_max", "max"): maxima}

    # Outputs of modules

    def measure(self, layer: Layer, output: Any, *, copy: bool = True) -> None:
        """Measure what a module has returned, under ``no_grad``.

        Args:
            copy: whether to copy tensors that wait to be measured.
        """
        for place, tensor in (("", output),) if type(output) is Tensor else tagged_tensors(output):
            if not is_plain(tensor):
                self.skipped.add((layer.tag, NOT_PLAIN))
            elif tensor.is_floating_point():
                key = f"{layer.tag}/{place}" if place else layer.tag
                self.activation.add(key, layer.name, tensor, self._unit(layer, tensor.shape), copy=copy)

    def flush(self) -> None:
        """Measure the outputs that wait, under ``no_grad``."""
        outputs, self.outputs[:] = self.outputs[:], []
        for layer, output in outputs:
            self.measure(layer, output, copy=False)
        self.activation.flush()

    def _unit(self, layer: Layer, shape: Sequence[int]) -> int | None:
        """The dimension of channels or features; None for a batch of single numbers.

        A module after a convolution, an activation function or a normalization, returns as many samples and channels.
        """
        dims = len(shape)
        if dims < 2:
            return None
        kind = (dims, shape[0], shape[1])
        if layer.spatial is not None:
            self._channels[kind] = dims - 1 - layer.spatial
        return self._channels.get(kind, 1 if dims > 3 else dims - 1)

    def _pass_ended(self, *_: Any) -> None:
        if self.is_wanted():
            with aside():
                self.flush()

    # Recorded values

    def _record(self, module: nn.Module | None, name: str, value: Any) -> None:
        layer = self._layers.get(id(module))
        if layer is None or not self.is_wanted():
            return
        if not isinstance(name, str) or not is_tag(name):
            self.skipped.add((layer.tag, NOT_A_NAME))
            return
        try:
            with aside():
                tensor = value if isinstance(value, (Tensor, Number)) else torch.as_tensor(value, device="cpu")
                weight = tensor.numel() if isinstance(tensor, Tensor) else 1
                if isinstance(tensor, Tensor) and not is_plain(tensor):
                    self.skipped.add((layer.tag, NOT_PLAIN))
                elif isinstance(tensor, complex) or (isinstance(tensor, Tensor) and tensor.is_complex()):
                    self.skipped.add((layer.tag, COMPLEX))
                elif weight:
                    number = as_number(tensor, device_of(self._root))
                    self.recorded.aggregate(f"{layer.tag}/{name}", self._metrics.aggregate, number, weight)
        except Exception:  # noqa: BLE001 - a recorded value never ends training
            self.skipped.add((layer.tag, NOT_A_NUMBER))

    # Attention

    def _running_layer(self) -> Layer | None:
        if not self.is_wanted():
            return None
        module = running_module()
        return None if module is None else self._layers.get(id(module))

    def _measure_attention(self, layer: Layer, call: AttentionArguments | str) -> None:
        self.saw_attention = True
        if isinstance(call, str):
            self.skipped.add((layer.tag, call))
            return
        query, key, value, mask, is_causal, scale, enable_gqa = call
        entropy = attention_entropy(query, key, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        heads = tuple(f"{layer.tag}/head_{i}" for i in range(len(entropy.total)))
        known = self._entropies.get(heads)
        self._entropies[heads] = entropy if known is None else known.plus(entropy)
        for kind, tensor in (("query", query), ("key", key), ("value", value)) if self._metrics else ():
            for i, head in enumerate(_by_head(tensor, enable_gqa)):
                self.activation.add(f"{layer.tag}/head_{i}/{kind}", layer.name, head, head.ndim - 1, copy=True)


class _OutputHook(ModuleHook):
    """Measures the floating-point tensors that modules return, before anything can change them in place.

    Between a model's operations Python code takes three times as long as in a loop, so that small tensors are copied,
    and measured at the end of the pass.
    """

    def __init__(self, metrics: ForwardMetrics, modules: Iterable[nn.Module]) -> None:
        self._metrics, self._is_wanted, self._outputs = metrics, metrics.is_wanted, metrics.outputs
        self._layers = {id(module): metrics.layers[module] for module in modules}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        layer = self._layers.get(id(module))  # a shallow copy has the hooks of the module itself
        if layer is None or not self._is_wanted():
            return
        if function_modes() or dispatch_modes():
            with aside():
                self._metrics.measure(layer, output)
            return
        records_graph = torch.is_grad_enabled()
        set_grad_enabled(False)  # a third of the cost of torch.no_grad()
        try:
            if type(output) is Tensor and layer.waits and output.numel() <= SMALL:
                self._outputs.append((layer, output.clone()))
                if len(self._outputs) > _MOST_OUTPUTS:
                    self._metrics.flush()
            else:
                self._metrics.measure(layer, output)
        finally:
            set_grad_enabled(records_graph)


def _by_head(tensor: Tensor, enable_gqa: bool) -> Tensor:
    """Of shape (heads, batch, positions, features); as in ``attention_entropy``, few dimensions are of one head."""
    for _ in range(4 - tensor.ndim):
        tensor = tensor.unsqueeze(0 if enable_gqa else -3)
    return tensor.movedim(-3, 0).flatten(1, -3)

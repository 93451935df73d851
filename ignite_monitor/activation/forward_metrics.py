"""Metrics of module outputs, attention and recorded values in the forward passes of an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.activation.attention import HeadEntropy
from ignite_monitor.activation.attention_calls import NOT_PLAIN, AttentionCalls, Reason, may_use_fast_path
from ignite_monitor.activation.measurement import Measurement
from ignite_monitor.activation.metric import RATIO, MetricSet, as_number, is_tag
from ignite_monitor.activation.record import recording
from ignite_monitor.activation.units import UnitDimensions
from ignite_monitor.model._torch import backward_number, dispatch_modes, function_modes
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.forward import ModuleHook, after_forward, running_module
from ignite_monitor.model.isolation import in_second_pass
from ignite_monitor.model.modes import has_local_data, hidden_from_user_modes
from ignite_monitor.model.names import hookable
from ignite_monitor.model.tensors import tagged_tensors

_FAST_PATH = Reason(
    "fast_path", "it would disable the fast path of torch's transformers in evaluation mode, which rounds differently"
)
_NOT_RECORDED = Reason(
    "recorded_value",
    "recorded values should be real numbers, or tensors or arrays of them, under names of letters, digits, '-', '_', "
    "'.' and '/', in the forward of a module of the model or with module=",
)

_NOT_HIDDEN = nullcontext()  # modes take longer than the rest of a call


class Pause:
    """A context manager that counts its blocks in progress."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


Layer = tuple[str, str]  # name in the model without wrappers, ``_root_`` for the whole model; name for loggers


class ForwardMetrics(ModuleHook):
    """Metrics of the forward passes of one iteration.

    As a hook it measures the floating-point tensors that modules return, before anything can change them in place.
    Small ones are copied, and measured together at the end of the pass.

    Attributes:
        saw_attention: False if attention is measured and there was no call so far.
        skipped: reason why something is not measured -> names of layers and recorded values.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Mapping[nn.Module, Layer],
        metrics: MetricSet,
        attention: bool,
        units: UnitDimensions,
        pause: Pause,  # nothing is measured inside of its blocks
    ) -> None:
        self._root = root
        self._layers = {id(module): layer for module, layer in layers.items()}
        self._metrics = metrics
        self._attention = attention
        self._units, self._pause = units, pause
        self.activation = Measurement("activation", metrics)
        self.recorded, self._entropies, self._logits = (
            Measurement(family, MetricSet(family, {}))
            for family in ("recorded", "attention_entropy", "attention_logit_max")
        )
        self.measurements = [self.activation, self.recorded, self._entropies, self._logits]
        self.saw_attention = not attention
        self.skipped: dict[Reason, set[str]] = {}

    def contexts(self, modules: Mapping[str, nn.Module]) -> list[AbstractContextManager[Any]]:
        """Contexts around a train step, with hooks on modules where they do not change what the model computes."""
        contexts: list[AbstractContextManager[Any]] = [recording(self._record)]
        hooks_allowed = hookable(modules)
        for name in modules.keys() - hooks_allowed.keys():
            self._skip(name, _FAST_PATH)
        if self._metrics:
            hooked = [item for item in hooks_allowed.values() if id(item) in self._layers or item in self._units]
            contexts.append(after_forward(hooked, self))
            contexts.append(after_forward([self._root], self._pass_ended))
        if self._attention and may_use_fast_path(self._root):
            self.saw_attention = True
            self._skip("attention", _FAST_PATH)
        elif self._attention:
            contexts.append(AttentionCalls(self._running_layer, self._add_attention).during(self._root))
        return contexts

    def _is_wanted(self) -> bool:
        """Return True if a forward pass is measured; in backward it is a recomputation by activation checkpointing."""
        return not (self._pause.depth or backward_number() != -1 or in_second_pass()) and self._root.training

    def _skip(self, name: str, reason: Reason) -> None:
        self.skipped.setdefault(reason, set()).add(name)

    # Outputs of modules

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_wanted():
            try:
                with hidden_from_user_modes() if function_modes() or dispatch_modes() else _NOT_HIDDEN:
                    self._measure_output(module, args, output)
            except Exception as error:  # noqa: BLE001
                self.error = error

    def _measure_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        layer = self._layers.get(id(module))  # None for a module that only passes units to others
        name, tag = layer or ("", "")
        tensors = ((tag, output),) if type(output) is Tensor else tagged_tensors(output, tag)
        for i, (key, tensor) in enumerate(tensors):
            if has_local_data(tensor) and tensor.is_floating_point():
                unit = self._units.of(module, args, tensor, i == 0)
                if layer is not None:
                    self.activation.add(key, name, tensor.detach(), unit, copy=True)
            elif layer is not None and not has_local_data(tensor):
                self._skip(tag, NOT_PLAIN)

    def _pass_ended(self, *_: Any) -> None:
        if self._is_wanted() and self.error is None:
            try:
                with hidden_from_user_modes():
                    for measurement in self.measurements:
                        measurement.flush()
            except Exception as error:  # noqa: BLE001
                self.error = error

    # Recorded values

    def _record(self, module: nn.Module | None, name: str, value: Any) -> None:
        layer = self._layers.get(id(module))
        if not self._is_wanted():
            return
        if layer is None or not isinstance(name, str) or not is_tag(name):
            if layer is not None or all(module is not item for item in self._root.modules()):
                self._skip(layer[1] if layer else str(name), _NOT_RECORDED)
            return
        try:
            with hidden_from_user_modes():
                number = value if isinstance(value, (Tensor, Real)) else torch.as_tensor(value, device="cpu")
                weight = number.numel() if isinstance(number, Tensor) else 1
                if isinstance(number, Tensor) and not has_local_data(number):
                    self._skip(layer[1], NOT_PLAIN)
                elif weight:
                    number = as_number(number, device_of(self._root))
                    self.recorded.aggregate(f"{layer[1]}/{name}", "mean", number, weight)
        except Exception:  # noqa: BLE001 - conversion calls methods of the user's value, which may raise any error
            self._skip(layer[1], _NOT_RECORDED)

    # Attention

    def _running_layer(self) -> Layer | None:
        return self._layers.get(id(running_module())) if self._is_wanted() else None

    def _add_attention(self, layer: Layer, entropy: HeadEntropy | Reason) -> None:
        self.saw_attention = True
        _, tag = layer
        if isinstance(entropy, Reason):
            self._skip(tag, entropy)
            return
        for i, (ratio, largest) in enumerate(zip(torch.stack(entropy[:2], 1), entropy.largest, strict=True)):
            self._entropies.aggregate(f"{tag}/head_{i}", RATIO, ratio)
            self._logits.aggregate(f"{tag}/head_{i}", "max", largest)

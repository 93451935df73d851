"""Metrics of what the modules of a model return, compute attention from, and record."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.activation.attention import attention_entropy
from ignite_monitor.activation.attention_calls import AttentionCalls
from ignite_monitor.activation.measurement import Measurement
from ignite_monitor.activation.metric import MetricSet
from ignite_monitor.activation.record import recording
from ignite_monitor.model._torch import (
    current_backward,
    dispatch_modes,
    function_modes,
    set_grad_enabled,
    unseen_by_dispatch,
    unseen_by_functions,
)
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.forward import ModuleHook, after_forward, outputs_to, running_module
from ignite_monitor.model.modes import aside, is_plain
from ignite_monitor.model.names import tags
from ignite_monitor.model.tensors import floating_tensors, tagged_tensors
from ignite_monitor.monitor.publisher import NamedValues
from ignite_monitor.reference.call import Call, Comparison, NotComparableError
from ignite_monitor.reference.isolation import here

_RECORDED = "activation (recorded)"


class ForwardMetrics:
    """What the forward passes of an iteration say.

    Args:
        modules: the modules to look at, and what their numbers are called.
        metrics: what to measure of outputs, and of queries, keys and values.
        pauses: as long as there are any, nothing is looked at.

    Attributes:
        activation: of outputs and attention heads.
        recorded: what the model records; :func:`named_apart` names it.
        entropy: of attention.
        logits: the largest of attention's scores.
        skipped: tags of modules with tensors that can't be measured.
        complex: what was recorded as a complex number.
        by_hand: tags of modules that compute attention by themselves, which is not seen.
        order: what outputs and heads are called, in the order in which the model computed them first.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Mapping[nn.Module, str],
        names: Mapping[str, str],
        metrics: MetricSet,
        attention: bool,
        pauses: Sequence[None],
    ) -> None:
        self._root = root
        self._modules = modules
        self._names = names
        self._metrics = metrics
        self._attention = attention
        self.activation = Measurement("activation", metrics, units=True)
        self.recorded = Measurement(_RECORDED, MetricSet("activations", {}, (), metrics.aggregate))
        self.entropy = Measurement("attention_entropy", MetricSet("attention", {}, (), "mean"))
        self.logits = Measurement("attention_logit_max", MetricSet("attention", {}, (), "max"))
        self._pauses = pauses
        self.skipped: set[str] = set()
        self.complex: set[str] = set()
        self.by_hand: set[str] = set()
        self.order: dict[str, None] = {}
        self._tags = {id(module): tag for module, tag in modules.items()}

    def start(self) -> None:
        """Forget the last iteration's numbers."""
        self.activation.clear()
        self.recorded.clear()
        self.entropy.clear()
        self.logits.clear()
        self.skipped.clear()
        self.complex.clear()

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        """What to have around a train step, for it to be looked at."""
        around: list[AbstractContextManager[Any]] = [recording(self._record)]
        if self._metrics:
            around.append(outputs_to(self._modules, _OutputHook(self)))
            around.append(after_forward([self._root], self._pass_ended))
        if self._attention:
            around.append(self._attention_calls())
        return around

    def _wanted(self) -> bool:
        # In a backward pass it is one that activation checkpointing repeats.
        return not (self._pauses or current_backward() != -1 or here.running) and self._root.training

    def _add(self, tag: str, output: Any) -> None:
        for index, tensor in tagged_tensors(output):
            key = f"{tag}/{index}" if index else tag
            if key in self.order and type(tensor) is Tensor and self.activation.add_again(key, tensor):
                continue
            if not is_plain(tensor):
                self.skipped.add(tag)
            else:
                self.order.setdefault(key)
                self.activation.add(key, self._names[tag], tensor)

    def _pass_ended(self, *_: Any) -> None:
        if self._wanted():
            with aside():
                self.activation.pass_ended()

    def _record(self, module: nn.Module | None, name: str, value: Any) -> None:
        tag = None if module is None else self._modules.get(module)
        if tag is not None and self._wanted():
            if value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex):
                self.complex.add(f"{tag}/{name}")
                return
            device = device_of(self._root)
            with torch.no_grad():
                self.recorded.record(f"{tag}/{name}", value, device)

    @contextlib.contextmanager
    def _attention_calls(self) -> Iterator[None]:
        calls = AttentionCalls(self._running, self._add_attention)
        # On around forward passes alone: a mode is asked about every operation, those of the optimizer too.
        with calls.during({**self._modules, self._root: ""}, self._wanted):
            yield
        self.skipped |= calls.skipped
        self.by_hand |= calls.by_hand

    def _running(self) -> str | None:
        if not self._wanted():
            return None
        module = running_module()
        return None if module is None else self._modules.get(module)

    def _add_attention(
        self,
        tag: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> None:
        entropy = attention_entropy(query, key, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        heads_of = [f"{tag}/head_{i}" for i in range(len(entropy.total))]
        self.entropy.add_ratios(heads_of, entropy.total, entropy.rows)
        self.logits.add_maxima(heads_of, entropy.largest)
        if self._metrics:
            for kind, tensor in (("query", query), ("key", key), ("value", value)):
                heads = _by_head(tensor, enable_gqa)
                keys = [f"{tag}/head_{i}/{kind}" for i in range(len(heads))]
                self.order |= dict.fromkeys(keys)
                self.activation.add_all(keys, self._names[tag], heads)


class OutputComparison(Comparison):
    """Measures each output of the model against that of the reference."""

    by_weights = False

    def __init__(self, tags: Mapping[str, str], metrics: MetricSet) -> None:
        self.tags = tags
        self.measured = Measurement("activation_difference", metrics)

    def clear(self) -> None:
        self.measured.clear()

    def keep(self, call: Call) -> Sequence[Tensor | None]:
        return [tensor for _, tensor in floating_tensors(call.output)]

    def leave(self, call: Call) -> bool:
        tensors, tag = tagged_tensors(call.output), self.tags[call.name]
        initial = [tensor for tensor in call.kept if tensor is not None]
        if [tensor.shape for _, tensor in tensors] != [tensor.shape for tensor in initial]:
            raise NotComparableError("its outputs have other shapes than in the reference")
        if not all(map(is_plain, [*(tensor for _, tensor in tensors), *initial])):
            raise NotComparableError("its outputs have no values of their own here (DTensors, nested, sparse)")
        for (index, tensor), other in zip(tensors, initial, strict=True):
            key = f"{tag}/{index}" if index else tag
            self.measured.add_difference(key, call.name or "_root_", tensor.detach(), other.detach())
        return True

    def passed(self, results: dict[str, list[Any]]) -> None:
        self.measured.pass_ended()


def without(found: NamedValues, incomplete: Collection[str]) -> NamedValues:
    """Names and numbers, but for the differences of some modules."""
    starts = tuple(f"activation_difference/{tag}/" for tag in incomplete)
    kept = [index for index, name in enumerate(found.names) if not name.startswith(starts)] if starts else []
    return found if not starts or len(kept) == len(found.names) else found.rows(kept)


def in_order(values: NamedValues, order: Mapping[str, None]) -> NamedValues:
    """In the order in which the model computed what they are of, then the others."""
    at = {f"activation/{key}": index for index, key in enumerate(order)}
    names = values.names
    return values.rows(sorted(range(len(names)), key=lambda i: at.get(names[i].rpartition("/")[0], len(at))))


def named_apart(found: list[NamedValues]) -> list[NamedValues]:
    """Names and numbers, each of one family, with what was recorded under names that nothing else has."""
    if not any(names[0].startswith(_RECORDED) for names, _ in found if names):
        return found
    recorded = [name for names, _ in found for name in names if name.startswith(_RECORDED)]
    others = dict.fromkeys(name for names, _ in found for name in names if not name.startswith(_RECORDED))
    apart = tags([*others, *(f"activation{name.removeprefix(_RECORDED)}" for name in recorded)])[len(others) :]
    new = dict(zip(recorded, apart, strict=True))
    return [NamedValues([new.get(name, name) for name in names], numbers) for names, numbers in found]


class _OutputHook(ModuleHook):
    """Takes in the floating-point tensors that modules return, each before anything can change it.

    Called between the operations of a model, which leave nothing of it in the processor's caches: what looks like a
    microsecond here is three.
    """

    def __init__(self, metrics: ForwardMetrics) -> None:
        self._tags = metrics._tags
        self._root, self._pauses, self._order = metrics._root, metrics._pauses, metrics.order
        self._add, self._add_again = metrics._add, metrics.activation.add_again

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tag = self._tags.get(id(module))  # a shallow copy has the hooks of the module itself
        if tag is None or self._pauses or current_backward() != -1 or here.running or not self._root.training:
            return
        if function_modes() or dispatch_modes():
            with unseen_by_functions(), unseen_by_dispatch():
                self._take(tag, output)
        else:
            self._take(tag, output)

    def _take(self, tag: str, output: Any) -> None:
        with_graph = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            if type(output) is not Tensor or tag not in self._order or not self._add_again(tag, output):
                self._add(tag, output)
        finally:
            set_grad_enabled(with_graph)


def _by_head(tensor: Tensor, enable_gqa: bool) -> Tensor:
    """Of shape (heads, batch, positions, features); as in ``attention_entropy``, few dimensions are of one head."""
    if tensor.ndim < 4:
        dim = 0 if enable_gqa else -3
        for _ in range(4 - tensor.ndim):
            tensor = tensor.unsqueeze(dim)
    return tensor.movedim(-3, 0).flatten(1, -3)

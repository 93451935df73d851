"""The graph of a model's layers, from how data flows through one forward pass.

Layers are opaque; between them every operation of torch is seen, and what it makes carries the label of what it was
made of: the node whose output it follows, to within operations that keep the exponent of its change. That is what
norms, activation functions, shapes, casts, dropout and masks do. Where two nodes meet, a junction is made. Sums over
what may be the width, of one node or of products of two (``matmul``, ``einsum``, attention: "contractions"), are taken
to be as large in their change as their inputs: :mod:`ignite_monitor.scaling.exponents` says what that supposes.

Labels are lost in operations that are not known, or that torch doesn't show. It is an error only if a layer takes its
input from there: a loss inside the model may be anything. Where Python decides by a number that is made of activations,
or computes with it, the graph is that of the path taken, and the number may go into every layer that comes after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.model._torch import is_functorch_wrapped, unseen_by_functions
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.scaling._forward import run, untouched
from ignite_monitor.scaling._labels import CONSTANT, Label, MadeTensors, storage_of, tensors_in
from ignite_monitor.scaling._operations import LIKE, NUMBERS, junction_of
from ignite_monitor.scaling.graph import LayerGraph, Node


class TracingError(RuntimeError):
    """The graph of a model can't be followed."""


class Between(NamedTuple):
    """What is done between the layers.

    Attributes:
        scales: for each call of ``scaled_dot_product_attention`` where it is, the dimension of a head, and the scale.
        multiplied: parameter -> the first operation that makes a matrix product with it, or that is not known.
    """

    scales: list[tuple[str, int, float]]
    multiplied: dict[str, str]


def trace_graph(model: nn.Module, layers: Iterable[tuple[nn.Module, Node]], sample_input: Any) -> LayerGraph:
    """The graph of a model's layers; model, random numbers and buffers are left as they were.

    The model runs once, in evaluation mode and without gradients.

    Args:
        layers: modules, and what is known of each as a node without inputs.
        sample_input: an input: a tensor, a tuple of arguments, or a dict of keyword arguments.

    Raises:
        TracingError: if a layer is not used, or takes its input from where it can't be followed.
    """
    layers = list(layers)
    tracer = _traced(model, layers, sample_input)
    used = {node.name for node in tracer.nodes}
    unused = [layer.name for _, layer in layers if layer.name not in used]
    if unused:
        raise TracingError(f"With sample_input the model does not run {', '.join(unused)}")
    return LayerGraph(tracer.nodes)


def between_layers(model: nn.Module, layers: Iterable[tuple[nn.Module, Node]], sample_input: Any) -> Between:
    """What a model does between its layers.

    Args:
        layers: modules, and what is known of each as a node without inputs.
        sample_input: an input, as in :func:`trace_graph`.
    """
    tracer = _traced(model, list(layers), sample_input)
    return Between(tracer.scales, tracer.multiplied)


def _traced(model: nn.Module, layers: list[tuple[nn.Module, Node]], sample_input: Any) -> _Tracer:
    for name, module in named_modules(model):
        if isinstance(module, torch.jit.ScriptModule):
            raise TracingError(f"The graph can't be traced: {name or 'the model'} is scripted")
    with untouched(model), ExitStack() as stack:
        tracer = _Tracer(model, layers)
        for handle in tracer.watch():
            stack.callback(handle.remove)
        stack.enter_context(tracer)
        stack.enter_context(tracer.made)
        run(model, sample_input)
    return tracer


class _Tracer(TorchFunctionMode):
    def __init__(self, model: nn.Module, layers: list[tuple[nn.Module, Node]]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.scales: list[tuple[str, int, float]] = []
        self.multiplied: dict[str, str] = {}
        self.made = MadeTensors()
        self._model = model
        self._layers = {id(module): layer for module, layer in layers}
        self._names: dict[str, int] = {}
        self._junctions: dict[tuple[str, frozenset[str]], str] = {}
        self._path: list[str] = []
        self._inputs: list[list[Label]] = []  # of the layers that are running
        self._taken_out = CONSTANT
        # Tensors are kept while tracing, so that no other gets the id of one.
        self._labels: dict[int, tuple[Tensor, Label]] = {}
        self._written: dict[int, tuple[Any, Label]] = {}
        for name, parameter, _ in named_parameters(model):
            self._put(parameter, Label(weight=name) if parameter.ndim > 1 else CONSTANT)

    def watch(self) -> Iterator[Any]:
        """Hooks on the model's modules, each as its handle."""
        for name, module in named_modules(self._model):
            yield module.register_forward_pre_hook(self._pre_hook(name, module), with_kwargs=True, prepend=True)
            yield module.register_forward_hook(self._hook(module), with_kwargs=True)

    def _pre_hook(self, name: str, module: nn.Module) -> Any:
        def started(_: nn.Module, args: Any, kwargs: Any) -> None:
            with unseen_by_functions():
                given = tensors_in((args, kwargs), depth=1)
                if not self._path:  # the model's own inputs
                    for tensor in given:
                        self._put(tensor, CONSTANT)
                self._path.append(name)
                if id(module) in self._layers:
                    self._inputs.append([self._get(tensor) for tensor in given])

        return started

    def _hook(self, module: nn.Module) -> Any:
        def completed(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._path.pop()
            if id(module) in self._layers:
                with unseen_by_functions():
                    label = Label(node=self._add_layer(self._layers[id(module)], self._inputs.pop()))
                    for tensor in tensors_in(output, depth=1):
                        self._put(tensor, label)

        return completed

    def _add_layer(self, layer: Node, inputs: list[Label]) -> str:
        name = layer.name
        label = self._join("sum", f"{name}.input", inputs)
        if label.node is not None:
            label = self._join("sum", f"{name}.input", [label, self._taken_out])
        what = None
        if label.lost is not None:
            what = label.lost
        elif label.node is None and label.outside is not None and layer.kind != "embedding":
            what = f"the parameter {label.outside} outside of a layer"
        elif label.node is None and layer.kind == "attention":
            what = "no layer"
        if what is not None:
            raise TracingError(
                f"The graph can't be traced: {name} takes its input from {what}. Make what stands between it and the "
                "layers before it a layer, in a ParametrizedModule, or leave sample_input out for a chain of layers"
            )
        unique, times = self._unique(name)
        given = () if label.node is None else (label.node,)
        self.nodes.append(layer._replace(name=unique, inputs=given, shares=name if times else None))
        return unique

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in {"__get__", "__set__"}:
            name = func.__self__.__name__ if name == "__get__" else "__setitem__"
        if name in {"tolist", "numpy", "__array__"} and not self._inputs and self._get(args[0]).node is not None:
            raise TracingError(f"The graph can't be traced: {self._where(name)} takes activations out of torch")
        if self._inputs:  # inside a layer
            return result
        mask = None
        if name == "scaled_dot_product_attention":
            size = args[0].shape[-1]
            self.scales.append((self._where(name), size, kwargs.get("scale") or size**-0.5))
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        if name in NUMBERS and self._get(args[0]).node is not None:
            self._taken_out = self._join("sum", self._where(name), [self._taken_out, self._get(args[0])])
        outputs = args[:1] if name == "__setitem__" else tensors_in(result)
        if outputs:
            given = tensors_in((args, kwargs))
            labels = [self._get(tensor) for tensor in given if tensor is not mask]
            if isinstance(mask, Tensor):  # is added, so that a weight in it is not multiplied with
                labels.append(self._get(mask)._replace(weight=None, outside=None))
            label = CONSTANT if name in LIKE else self._label(name, labels)
            for tensor in outputs:
                if any(tensor is each for each in given):
                    self._write(tensor, label)
                self._put(tensor, label)
        return result

    def _label(self, name: str, labels: list[Label]) -> Label:
        where = self._where(name)
        kind = junction_of(name)
        if kind in (None, "contraction"):
            for parameter in filter(None, (each.weight or each.outside for each in labels)):
                self.multiplied.setdefault(parameter, where)
        if kind is None and any(label != CONSTANT for label in labels):
            return Label(lost=f"{where}, an operation that is not known")
        label = self._join(kind or "sum", where, labels)
        weight = next((each.weight or each.outside for each in labels if each.weight or each.outside), None)
        if kind != "contraction" or weight is None or label.lost is not None:
            return label
        if label.node is None:
            return Label(outside=weight)
        return Label(lost=f"{where}, with the parameter {weight} outside of a layer")

    def _join(self, kind: str, name: str, labels: list[Label]) -> Label:
        for label in labels:
            if label.lost is not None:
                return label
        nodes = list(dict.fromkeys(label.node for label in labels if label.node is not None))
        if len(nodes) > 1:
            key = (kind, frozenset(nodes))
            if key not in self._junctions:
                unique, _ = self._unique(name)
                self.nodes.append(Node(unique, kind, tuple(nodes)))
                self._junctions[key] = unique
            return Label(node=self._junctions[key])
        if nodes:
            return Label(node=nodes[0])
        for label in labels:
            if label.outside is not None:
                return label
        return next((label for label in labels if label.weight is not None), CONSTANT)

    def _where(self, name: str) -> str:
        return f"{self._path[-1]}.{name}" if self._path and self._path[-1] else name

    def _unique(self, name: str) -> tuple[str, int]:
        times = self._names.get(name, 0)
        self._names[name] = times + 1
        return (f"{name}#{times + 1}" if times else name), times

    def _get(self, tensor: Tensor) -> Label:
        if is_functorch_wrapped(tensor):
            return Label(lost="a function transform, as vmap")
        found = self._labels.get(id(tensor))
        written = self._written.get(storage_of(tensor)) if self._written else None
        if found is not None:
            label = found[1]
        elif written is None and tensor.is_floating_point() and tensor in self.made:
            label = Label(lost="an operation that torch does not show")
        else:
            label = CONSTANT
        if written is None or label == written[1]:
            return label
        return self._join("sum", self._where("write"), [label, written[1]])

    def _put(self, tensor: Tensor, label: Label) -> None:
        self._labels[id(tensor)] = (tensor, label)

    def _write(self, tensor: Tensor, label: Label) -> None:
        """What is written into a tensor is in all views of it."""
        storage = storage_of(tensor)
        if storage and label != CONSTANT:
            before = self._written.get(storage)
            labels = [label] if before is None else [before[1], label]
            self._written[storage] = (tensor, self._join("sum", self._where("write"), labels))

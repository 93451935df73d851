"""The graph of a model's layers, from how data flows through one forward pass.

A layer is a :class:`ParametrizedModule`, whatever it holds, or the use of one weight in a linear operation. Between
layers every operation of torch is seen, and what it makes carries the label of what it was made of: the node whose
output it follows, to within operations that keep the exponent of its change. That is what norms, activation functions,
shapes, casts, dropout and masks do. Where two nodes meet, a junction is made. Sums over what may be the width, of one
node or of products of two (``matmul``, ``einsum``, attention: "contractions"), are taken to be as large in their change
as their inputs: :mod:`ignite_monitor.scaling.exponents` says what that supposes.

**Two widths.** What a weight is follows from the sizes of what it sums over and of what it gives in a smaller model,
whose trace is kept for this. So do the model's own factors that depend on the width: each label knows by how much more
the larger model has multiplied it since the layer it comes from. Where that is followed by anything that is not linear,
the factor counts as one of that layer; where a weight sums over it, of the layer of that weight; where neither is so,
the label is lost.

Labels are lost in operations that are not known, or that torch doesn't show. It is an error only if a layer takes its
input from there: a loss inside the model may be anything. Where Python decides by a number that is made of activations,
or computes with it, the graph is that of the path taken, and the number may go into every layer that comes after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.model._torch import unseen_by_functions
from ignite_monitor.model.names import named_modules
from ignite_monitor.scaling.graph import LayerGraph, Node
from ignite_monitor.scaling.labels import CONSTANT, FLAT, Label, TracingError, line_of_code, tensors_in
from ignite_monitor.scaling.module import untouched
from ignite_monitor.scaling.operations import (
    HOMOGENEOUS,
    INDEXING,
    INVARIANT,
    LIKE,
    LINEAR,
    NUMBERS,
    Operation,
    log_factor,
    plain_name,
)
from ignite_monitor.scaling.uses import WeightUses

# Nearly no matter what small number is added, or what it is limited to, a factor stays one.
_KEEP = LINEAR | {"clamp", "clamp_min", "clamp_max", "maximum"}
_RECURRENT = re.compile(r"(?:lstm|gru|rnn_tanh|rnn_relu)(?:_cell)?$")


def trace_graph(model: nn.Module, layers: Iterable[tuple[nn.Module, Node]], sample_input: Any) -> LayerGraph:
    """The graph of layers that are modules, each given with what is known of it as a node without inputs."""
    return LayerGraph(Trace(model, layers).run(sample_input).nodes)


class Trace(WeightUses, TorchFunctionMode):
    """What is seen in one forward pass of a model.

    Args:
        layers: modules that are layers, and what is known of each as a node without inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[tuple[nn.Module, Node]],
        with_weights: bool = False,
        small: Trace | None = None,
    ) -> None:
        WeightUses.__init__(self, model, with_weights, small)
        TorchFunctionMode.__init__(self)
        self._model = model
        self._layers = {id(module): layer for module, layer in layers}
        self._inputs: list[list[Label]] = []  # of the layers that are running

    def run(self, sample_input: Any) -> Trace:
        """Run the model once, in evaluation mode and without gradients, and leave everything as it was.

        Raises:
            TracingError: if it is scripted, a layer is not used, or takes its input from where it can't be followed.
        """
        for name, module in named_modules(self._model):
            if isinstance(module, torch.jit.ScriptModule):
                raise TracingError(f"The graph can't be traced: {name or 'the model'} is scripted")
        args = () if isinstance(sample_input, Mapping) else sample_input
        args = args if isinstance(args, (tuple, list)) else (args,)
        kwargs = sample_input if isinstance(sample_input, Mapping) else {}
        with untouched(self._model), ExitStack() as stack:
            for name, module in named_modules(self._model):
                before, after = partial(self._started, name), partial(self._completed, name)
                handle = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
            stack.enter_context(self)
            stack.enter_context(self.made)
            self._model(*args, **kwargs)
        used = {node.name for node in self.nodes}
        if unused := [layer.name for layer in self._layers.values() if layer.name not in used]:
            raise TracingError(f"With sample_input the model does not run {', '.join(unused)}")
        return self

    def _started(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        with unseen_by_functions():
            given = tensors_in((args, kwargs), depth=1)
            if not self._path:  # the model's own inputs
                for tensor in given:
                    self._put(tensor, CONSTANT)
            self._path.append((name, module))
            if id(module) in self._layers:
                self._inputs.append([self._get(tensor) for tensor in given])

    def _completed(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._path.pop()
        if self._inputs and id(module) not in self._layers:
            return
        with unseen_by_functions():
            if id(module) in self._layers:
                label = self._add_layer(self._layers[id(module)], self._inputs.pop())
                for tensor in tensors_in(output, depth=1):
                    self._put(tensor, label)
            elif isinstance(output, Tensor) and name in self.uses:
                is_its = self._get(output).layer == name == self.uses[name].module
                self.uses[name].is_module = self.uses[name].is_module or is_its

    # Operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in {"__get__", "__set__"}:
            name = func.__self__.__name__ if name == "__get__" else "__setitem__"
        if self._inputs:  # inside a layer
            return result
        if name in {"tolist", "numpy", "__array__"} and self._get(args[0]).node is not None:
            raise TracingError(
                f"The graph can't be traced: {self._where(name)} takes activations out of torch. Put the module that "
                "does so, with a layer in it, into a ParametrizedModule"
            )
        if name in NUMBERS and self._get(args[0]).node is not None:
            self._taken_out = self._sum(self._where(name), [self._taken_out, self._get(args[0])])
        outputs = args[:1] if name == "__setitem__" else tensors_in(result)
        if outputs:
            given = tensors_in((args, kwargs))
            labels = [self._get(tensor) for tensor in given]
            label = (
                CONSTANT
                if name in LIKE
                else self._label(
                    Operation(name, plain_name(name), self._where(name), args, kwargs, result, given, labels)
                )
            )
            for tensor in outputs:
                if any(tensor is each for each in given):
                    self._write(tensor, label)
                # An index says which is larger, and has no factor.
                self._put(tensor, label if tensor.is_floating_point() or label.weight else label.settled())
        return result

    def _label(self, op: Operation) -> Label:
        """The label of what an operation makes."""
        self.touched.update(label.weight for label in op.labels if label.weight is not None)
        if self._with_weights:
            if op.name == "multi_head_attention_forward":
                return self._attention_module(op)
            if _RECURRENT.match(op.name):
                return self._recurrent(op)
            op = self._with_growth(op)
        if op.name == "scaled_dot_product_attention":
            return self._attention(op)
        if op.junction == "contraction":
            return self._contraction(op)
        if op.junction is None and any(label != CONSTANT for label in op.labels):
            for label in op.labels:
                self._resolved(label)
                if label.weight is not None:
                    self.unknown.setdefault(label.weight, op.where)
            return Label(lost=f"{op.where}, an operation that is not known")
        for label in op.labels:
            if label.lost is not None:
                return label
        if op.name in INDEXING and op.labels[0].weight is not None:
            return op.labels[0]  # experts, chosen by what a router says
        moving = [label for label in op.labels if label.node is not None]
        if not moving:
            label = self._join("sum", op.where, op.labels)
            return label if label.weight is None or op.line is None else label.times(op.growth, op.line)
        if len(moving) == 1:
            return self._follow(op, moving[0])
        if op.name in INDEXING and op.labels[0] is moving[0]:  # whatever says which
            return self._follow(op, moving[0])._replace(node=self._join("sum", op.where, moving).node)
        if op.name in INVARIANT:
            return self._join("sum", op.where, [self._resolved(label, "norm") for label in moving])
        if op.junction != "product" or op.name == "glu":
            return self._sum(op.where, moving, op.junction or "sum")
        self._multiplied(moving)
        first, *others = moving = [self._resolved(label) for label in moving]
        growth = op.growth + first.growth + op.sign * sum(label.growth for label in others)
        line = next((label.line for label in moving if label.line is not None), None)
        return self._join("product", op.where, moving)._replace(growth=growth, line=line)

    def _follow(self, op: Operation, label: Label) -> Label:
        """The label of what an operation makes of one activation, and of constants and weights."""
        if op.power is not None:
            label = self._resolved(label, "norm")
            return label._replace(growth=op.power * label.growth + op.growth, line=label.line or op.line)
        is_homogeneous = op.name in HOMOGENEOUS or op.line is not None
        if is_homogeneous:
            if abs(op.growth) > 1e-9:
                if op.line is None:  # a sum over more of them is no factor of the layer
                    label = self._resolved(label)
                label = label.times(op.growth, op.line)
            if label.layer is not None:
                self._last[label.layer] = label.growth, label.line
            return label
        if op.name in INVARIANT:
            return self._resolved(label, "norm")._replace(growth=0.0, line=None, scores=None)
        if abs(label.growth) < FLAT and op.name in LINEAR and not any(each.weight for each in op.labels):
            return label
        is_product = op.junction == "product" and op.name != "glu"
        label = self._resolved(label, "linear" if is_product or op.name in _KEEP else "nonlinear")
        keeps = op.name in _KEEP and all(each.node is not None or each == CONSTANT for each in op.labels)
        return label if abs(label.growth) < FLAT or is_product or keeps else self._unattributed(label)

    # Numbers that may grow

    def _with_growth(self, op: Operation) -> Operation:
        factor = log_factor(op, lambda tensor: self._get(tensor) == CONSTANT)
        if factor is None:
            return op
        number, is_the_models = factor
        growth = number - self._small_number(op.name, number)
        if not is_the_models:
            return op._replace(growth=growth)
        return op._replace(growth=growth, line=line_of_code() if abs(growth) > 1e-9 else "")

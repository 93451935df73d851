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

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.model._torch import unseen_by_functions
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.scaling.graph import PRESETS, LayerGraph, Node
from ignite_monitor.scaling.labels import CONSTANT, FLAT, Label, Labels, TracingError, line_of_code, tensors_in
from ignite_monitor.scaling.module import norm_of, untouched
from ignite_monitor.scaling.operations import (
    HOMOGENEOUS,
    INDEXING,
    INVARIANT,
    LIKE,
    LINEAR,
    NUMBERS,
    Fans,
    Operation,
    fans,
    log_factor,
    plain_name,
    summed_over,
)

# Nearly no matter what small number is added, or what it is limited to, a factor stays one.
_KEEP = LINEAR | {"clamp", "clamp_min", "clamp_max", "maximum"}
_ADDING = {"addmm", "addmv", "addbmm", "baddbmm"}
_RECURRENT = re.compile(r"(?:lstm|gru|rnn_tanh|rnn_relu)(?:_cell)?$")


@dataclass
class WeightUse:
    """What a weight that is trained is used for."""

    layer: str
    weight: str
    module: str | None  # the one that it is the weight of, None where no module that runs has it
    kind: str  # "embedding", "hidden", "readout", or "fixed" where nothing of it grows
    fans: Fans
    small: Fans  # in the smaller model
    is_module: bool = False  # whether the module's output is the layer's, so that it can be multiplied

    @property
    def widths(self) -> tuple[int, int]:
        """N in the smaller and in the larger model."""
        side = 1 if self.kind == "embedding" else 0
        return self.small[side], self.fans[side]


def trace_graph(model: nn.Module, layers: Iterable[tuple[nn.Module, Node]], sample_input: Any) -> LayerGraph:
    """The graph of layers that are modules, each given with what is known of it as a node without inputs."""
    return LayerGraph(Trace(model, layers).run(sample_input).nodes)


class Trace(Labels, TorchFunctionMode):
    """What is seen in one forward pass of a model.

    Args:
        layers: modules that are layers, and what is known of each as a node without inputs.
        with_weights: whether every other weight that is used is a layer, too.
        small: the trace of the smaller model; without it all weights are taken to be of a fixed size.

    Attributes:
        uses: layer -> :class:`WeightUse`.
        touched: the parameters that any operation has taken.
        unknown: parameter -> an operation that takes it for something that is not known.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[tuple[nn.Module, Node]],
        with_weights: bool = False,
        small: Trace | None = None,
    ) -> None:
        Labels.__init__(self, small)
        TorchFunctionMode.__init__(self)
        self.uses: dict[str, WeightUse] = {}
        self.touched: set[str] = set()
        self.unknown: dict[str, str] = {}
        self._model = model
        self._layers = {id(module): layer for module, layer in layers}
        self._with_weights = with_weights
        self._small: Trace | None = small
        self._fans: dict[str, Fans] = {}
        self._owners: dict[str, str | None] = {}
        self._inputs: list[list[Label]] = []  # of the layers that are running
        self._taken_out = CONSTANT
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter, _ in named_parameters(model):
            self._parameters[name] = parameter
            self._put(parameter, Label(weight=name) if parameter.ndim > 1 else CONSTANT)

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

    def _add_layer(self, layer: Node, inputs: list[Label]) -> Label:
        name = layer.name
        label = self._sum(f"{name}.input", inputs, settle=True)
        if label.node is not None:
            label = self._sum(f"{name}.input", [label, self._taken_out])
        unknown = label.lost
        if unknown is None and label.node is None:
            if label.outside is not None and layer.kind != "embedding":
                unknown = f"the parameter {label.outside} outside of a layer"
            elif layer.kind == "attention":
                unknown = "no layer"
        if unknown is not None and self._with_weights and self._small is None:
            return Label(lost=unknown)  # a second trace will say it
        if unknown is not None:
            chain = "" if self._with_weights else ", or leave sample_input out for a chain of layers"
            raise TracingError(
                f"The graph can't be traced: {name} takes its input from {unknown}. Put the module that gives it, "
                f"with a layer in it, into a ParametrizedModule{chain}"
            )
        unique, times = self._unique(name)
        given = () if label.node is None else (label.node,)
        self.nodes.append(layer._replace(name=unique, inputs=given, shares=name if times else None))
        self._last.setdefault(name, (label.growth, label.line))
        return Label(node=unique, layer=name, growth=label.growth, line=label.line)

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

    def _contraction(self, op: Operation) -> Label:
        pairs = list(zip(op.given, op.labels, strict=True))
        if op.name in _ADDING:  # what is added is no factor
            added = op.argument(0, "input")
            pairs = [(each, label._replace(weight=None) if each is added else label) for each, label in pairs]
            op = op._replace(labels=[label for _, label in pairs])
        weights = [(tensor, label) for tensor, label in pairs if label.weight or label.outside]
        if not weights:
            if self._with_weights and sum(label.node is not None for label in op.labels) == 2:
                return self._scores(op)
            return self._sum(op.where, op.labels, "contraction", settle=True)
        tensor, weight = weights[0]
        if self._with_weights:
            sizes = fans(op, tensor) if len(weights) == 1 and weight.weight is not None else None
            if sizes is not None:
                return self._use(weight, sizes, [label for label in op.labels if label is not weight], op.name)
            for _, label in weights:
                self.unknown.setdefault(label.weight or label.outside or "", op.where)
            return Label(lost=f"{op.where}, where it is not known what {weight.weight} is taken for")
        label = self._sum(op.where, op.labels, "contraction")
        if label.lost is not None:
            return label
        name = weight.weight or weight.outside
        if label.node is None:
            return Label(outside=name)
        return Label(lost=f"{op.where}, with the parameter {name} outside of a layer")

    def _scores(self, op: Operation) -> Label:
        """Of a product of two activations."""
        self._multiplied(op.labels)
        size = summed_over(op)
        small = int(self._small_number(f"{op.where} size", size))
        if size <= small:
            return self._sum(op.where, op.labels, "contraction")
        growth = op.growth + math.log(size / small) + sum(label.growth for label in op.labels)
        for label in op.labels:  # what the factors before it are for
            self._resolved(label._replace(growth=0.0))
        label = self._sum(op.where, [label.settled() for label in op.labels], "contraction")
        return label._replace(growth=growth, scores=(op.where, small, size))

    def _attention(self, op: Operation) -> Label:
        query, key, mask = op.argument(0, "query"), op.argument(1, "key"), op.argument(3, "attn_mask")
        factors, others = [], []
        for tensor, label in zip(op.given, op.labels, strict=True):
            if tensor is query or tensor is key:
                factors.append(label)
            else:  # what is added to scores is not multiplied with, if it is a weight
                others.append(label._replace(weight=None, outside=None) if tensor is mask else self._resolved(label))
        self._multiplied(factors)
        size = query.shape[-1]
        scale = op.kwargs.get("scale") or size**-0.5
        if self._check_heads(op.where, size, scale, sum(label.growth for label in factors)):
            factors = [label._replace(growth=0.0, line=None) for label in factors]  # what the factors before it are for
        return self._sum(op.where, [*map(self._resolved, factors), *others], "contraction")

    def _attention_module(self, op: Operation) -> Label:
        """``nn.MultiheadAttention``."""
        bound = inspect.signature(F.multi_head_attention_forward).bind(*op.args, **op.kwargs)
        bound.apply_defaults()
        given = bound.arguments
        inputs = [self._get(given[key]) for key in ("query", "key", "value")]
        if given["use_separate_proj_weight"]:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            mixed = [self._product(given[key], [label]) for key, label in zip(names, inputs, strict=True)]
        else:
            mixed = [self._product(given["in_proj_weight"], inputs)]
        size = given["embed_dim_to_check"] // given["num_heads"]
        self._check_heads(op.where, size, size**-0.5, 0.0)
        return self._product(given["out_proj_weight"], [self._sum(op.where, mixed, "contraction")])

    def _recurrent(self, op: Operation) -> Label:
        """``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells."""
        current = [label for label in op.labels if label.weight is None]
        steps: dict[str, list[tuple[str, Tensor]]] = {}
        for tensor, label in zip(op.given, op.labels, strict=True):
            if label.weight is not None:
                kind, _, step = label.weight.rpartition(".")[2].removeprefix("weight_").partition("_")
                steps.setdefault(step.removesuffix("_reverse"), []).append((kind, tensor))
        for weights in steps.values():
            for kind in ("ih", "hh", "hr"):  # what enters, what comes back, and its projection
                products = (self._product(tensor, current) for each, tensor in weights if each == kind)
                made = [self._resolved(label, "nonlinear") for label in products]
                current = made if kind == "hr" and made else [*current, *made] if kind == "hh" else made or current
            current = [self._sum(op.where, current)]
        return current[0] if current else Label(lost=f"{op.where}, an operation that is not known")

    # Weights

    def _product(self, weight: Tensor, inputs: list[Label]) -> Label:
        self.touched.add(self._get(weight).weight or "")
        return self._use(self._get(weight), Fans(weight.shape[1], weight.shape[0]), inputs, "linear")

    def _use(self, weight: Label, sizes: Fans, inputs: list[Label], operation: str) -> Label:
        """The label of a product of a weight with its inputs."""
        name = weight.weight or ""
        parameter = self._parameters[name]
        module, layer = self._owner(name, parameter)
        if self._owners.setdefault(layer, module) is not None and module is None:
            layer = f"{name}.{operation}"  # what a module gives is another layer
        self._fans.setdefault(layer, sizes)
        small = sizes if self._small is None else self._small._fans.get(layer, sizes)
        grows = sizes.inputs > small.inputs, sizes.outputs > small.outputs
        kind = {(True, True): "hidden", (True, False): "readout", (False, True): "embedding"}.get(grows, "fixed")
        if operation.startswith("embedding") and grows[0]:
            self.unknown.setdefault(name, f"{self._where(operation)}, with more rows at larger widths,")
        if not parameter.requires_grad:
            label = self._sum(f"{layer}.input", inputs, "contraction", settle=True)
            return label if label.node is None else label.times(weight.growth, weight.line)
        if kind != "fixed":
            kind = self.uses.setdefault(layer, WeightUse(layer, name, module, kind, sizes, small)).kind
        if not (parameter.is_meta or parameter.any()):
            inputs = [self._resolved(label, "zero") for label in inputs]
        node = Node(layer, kind, (), *PRESETS["mup"].get(kind, (0.0, 0.0)))
        label = self._add_layer(node, inputs).times(weight.growth, weight.line)
        if kind == "fixed":
            return label._replace(layer=None)
        self._last[layer] = label.growth, label.line
        return label

    def _owner(self, name: str, parameter: nn.Parameter) -> tuple[str | None, str]:
        """The running module that has a parameter, if there is one, and what its layer is called."""
        for path, module in reversed(self._path):
            held = dict(module.named_parameters(recurse=False))
            for key, each in held.items():
                if each is parameter:
                    is_its_own = key == "weight" or norm_of(held, key) is not None
                    return path, path if is_its_own else f"{path}.{key}".lstrip(".")
            computed = getattr(module, "parametrizations", None)
            if isinstance(computed, nn.ModuleDict) and any(each is parameter for each in computed.parameters()):
                return path, path
        owner, _, key = name.rpartition(".")
        return None, owner if key == "weight" else name

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

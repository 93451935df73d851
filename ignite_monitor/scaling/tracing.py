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
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.model._torch import buffers_in, unseen_by_functions
from ignite_monitor.model.eager import Eager
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.reference.rng import cuda_devices, drawn_again, generators_of
from ignite_monitor.scaling.graph import LayerGraph, Node
from ignite_monitor.scaling.labels import CONSTANT, FLAT, Label, Labels, TracingError, tensors_in
from ignite_monitor.scaling.module import multiplier_of
from ignite_monitor.scaling.operations import (
    HOMOGENEOUS,
    INDEXING,
    INVARIANT,
    LIKE,
    LINEAR,
    NUMBERS,
    Fans,
    are_divided,
    degree,
    fans,
    junction_of,
    log_factor,
    plain_name,
    summed_over,
)

# Nearly no matter what small number is added, or what it is limited to, a factor stays one.
_KEEP = LINEAR | {"clamp", "clamp_min", "clamp_max", "maximum"}
_RECURRENT = re.compile(r"(?:lstm|gru|rnn_tanh|rnn_relu)(?:_cell)?$")


@dataclass
class WeightUse:
    """What a weight is used for.

    Attributes:
        layer: the layer's name.
        weight: the name of the parameter.
        module: the name of the module that it is the weight of, None where no module that runs has it.
        kind: "embedding", "hidden", "readout", or "fixed" where nothing of it grows.
        fans: over how much it sums and how much it gives.
        small: the same in the smaller model.
        is_module: whether the module's output is the layer's, so that it can be multiplied.
    """

    layer: str
    weight: str
    module: str | None
    kind: str
    fans: Fans
    small: Fans
    is_module: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """N in the smaller and in the larger model."""
        place = 1 if self.kind == "embedding" else 0
        return self.small[place], self.fans[place]


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
    trace = Trace(model, layers).run(sample_input)
    trace.check_used(layers)
    return LayerGraph(trace.nodes)


class Trace(Labels, TorchFunctionMode):
    """What is seen in one forward pass of a model.

    Args:
        layers: modules that are layers, and what is known of each as a node without inputs.
        with_weights: whether every other weight that is used is a layer, too.
        small: the trace of the smaller model; without it all weights are taken to be of a fixed size.

    Attributes:
        uses: layer -> :class:`WeightUse`, of weights that are trained.
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
        Labels.__init__(self, compares=small is not None)
        TorchFunctionMode.__init__(self)
        self.uses: dict[str, WeightUse] = {}
        self.touched: set[str] = set()
        self.unknown: dict[str, str] = {}
        self._model = model
        self._layers = {id(module): layer for module, layer in layers}
        self._with_weights = with_weights
        self._small = small
        self._counts: dict[str, int] = {}
        self._logs: dict[str, float] = {}
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
            TracingError: if it is scripted, or a layer takes its input from where it can't be followed.
        """
        for name, module in named_modules(self._model):
            if isinstance(module, torch.jit.ScriptModule):
                raise TracingError(f"The graph can't be traced: {name or 'the model'} is scripted")
        with untouched(self._model), ExitStack() as stack:
            for handle in self._watch():
                stack.callback(handle.remove)
            stack.enter_context(self)
            stack.enter_context(self.made)
            run(self._model, sample_input)
        return self

    def check_used(self, layers: Iterable[tuple[nn.Module, Node]]) -> None:
        """Whether all layers have run.

        Raises:
            TracingError: if one has not.
        """
        used = {node.name for node in self.nodes}
        if unused := [layer.name for _, layer in layers if layer.name not in used]:
            raise TracingError(f"With sample_input the model does not run {', '.join(unused)}")

    # Modules

    def _watch(self) -> Iterator[Any]:
        """Hooks on the model's modules, each as its handle."""
        for name, module in named_modules(self._model):
            yield module.register_forward_pre_hook(self._pre_hook(name, module), with_kwargs=True, prepend=True)
            yield module.register_forward_hook(self._hook(name, module), with_kwargs=True)

    def _pre_hook(self, name: str, module: nn.Module) -> Any:
        def started(_: nn.Module, args: Any, kwargs: Any) -> None:
            with unseen_by_functions():
                given = tensors_in((args, kwargs), depth=1)
                if not self._path:  # the model's own inputs
                    for tensor in given:
                        self._put(tensor, CONSTANT)
                self._path.append((name, module))
                if id(module) in self._layers:
                    self._inputs.append([self._get(tensor) for tensor in given])

        return started

    def _hook(self, name: str, module: nn.Module) -> Any:
        def completed(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._path.pop()
            if self._inputs and id(module) not in self._layers:
                return
            with unseen_by_functions():
                if id(module) in self._layers:
                    label = self._add_layer(self._layers[id(module)], self._inputs.pop())
                    for tensor in tensors_in(output, depth=1):
                        self._put(tensor, label)
                elif isinstance(output, Tensor):
                    use = self.uses.get(self._get(output).layer or "")
                    if use is not None and use.module == use.layer == name:
                        use.is_module = True

        return completed

    def _add_layer(self, layer: Node, inputs: list[Label]) -> Label:
        name = layer.name
        label = self._sum(f"{name}.input", inputs, settle=True)
        if label.node is not None:
            label = self._sum(f"{name}.input", [label, self._taken_out])
        what = None
        if label.lost is not None:
            what = label.lost
        elif label.node is None and label.outside is not None and layer.kind != "embedding":
            what = f"the parameter {label.outside} outside of a layer"
        elif label.node is None and layer.kind == "attention":
            what = "no layer"
        if what is not None and self._with_weights and self._small is None:
            return Label(lost=what)  # a second trace will say it
        if what is not None:
            advice = (
                "Make what stands between it and the layers before it a layer, in a ParametrizedModule"
                if not self._with_weights
                else "Put what it takes its input from into a ParametrizedModule"
            )
            raise TracingError(
                f"The graph can't be traced: {name} takes its input from {what}. {advice}"
                + ("" if self._with_weights else ", or leave sample_input out for a chain of layers")
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
        if name in {"tolist", "numpy", "__array__"} and not self._inputs and self._get(args[0]).node is not None:
            raise TracingError(f"The graph can't be traced: {self._where(name)} takes activations out of torch")
        if self._inputs:  # inside a layer
            return result
        if name in NUMBERS and self._get(args[0]).node is not None:
            self._taken_out = self._sum(self._where(name), [self._taken_out, self._get(args[0])])
        outputs = args[:1] if name == "__setitem__" else tensors_in(result)
        if outputs:
            given = tensors_in((args, kwargs))
            label = CONSTANT if name in LIKE else self._label(plain_name(name), name, args, kwargs, given, result)
            for tensor in outputs:
                if any(tensor is each for each in given):
                    self._write(tensor, label)
                self._put(tensor, label)
        return result

    def _label(self, name: str, full: str, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> Label:
        labels = [self._get(tensor) for tensor in given]
        self.touched.update(label.weight for label in labels if label.weight is not None)
        where = self._where(full)
        if self._with_weights:
            if name == "multi_head_attention_forward":
                return self._attention_module(where, args, kwargs)
            if _RECURRENT.match(name):
                return self._recurrent(where, given, labels)
        growth, line = self._growth(name, args, result, labels)
        if name == "scaled_dot_product_attention":
            return self._attention(where, args, kwargs, given, labels)
        kind = junction_of(full)
        if kind == "contraction":
            return self._contraction(name, where, args, kwargs, given, labels, growth)
        if kind is None and any(label != CONSTANT for label in labels):
            for label in labels:
                self._resolved(label)
                if label.weight is not None:
                    self.unknown.setdefault(label.weight, where)
            return Label(lost=f"{where}, an operation that is not known")
        return self._keep_track(name, kind or "sum", where, args, kwargs, labels, (growth, line))

    def _contraction(
        self, name: str, where: str, args: Any, kwargs: Any, given: list[Tensor], labels: list[Label], growth: float
    ) -> Label:
        weights = [
            (tensor, label) for tensor, label in zip(given, labels, strict=True) if label.weight or label.outside
        ]
        if not weights:
            moving = [label for label in labels if label.node is not None]
            if len(moving) == 2 and self._with_weights:
                return self._scores(name, where, args, labels, growth)
            return self._sum(where, labels, "contraction", settle=True)
        if self._with_weights:
            found = None
            if len(weights) == 1:
                found = fans(name, args, kwargs, weights[0][0])
            if found is not None and weights[0][1].weight is not None:
                others = [label for label in labels if label is not weights[0][1]]
                return self._use(weights[0][1], found, others, name)
            for _, label in weights:
                self.unknown.setdefault(label.weight or label.outside or "", where)
            return Label(lost=f"{where}, where it is not known what {weights[0][1].weight} is taken for")
        weight = weights[0][1].weight or weights[0][1].outside
        label = self._sum(where, labels, "contraction")
        if label.lost is not None:
            return label
        if label.node is None:
            return Label(outside=weight)
        return Label(lost=f"{where}, with the parameter {weight} outside of a layer")

    def _scores(self, name: str, where: str, args: Any, labels: list[Label], growth: float) -> Label:
        self._multiplied(labels)
        sizes = self._sizes(where, summed_over(name, args) or 1)
        grown = sizes[1] > sizes[0]
        total = growth + math.log(sizes[1] / sizes[0]) + sum(label.growth for label in labels)
        if grown:  # what the factors before it are for
            for label in labels:
                self._resolved(label._replace(growth=0.0))
            labels = [label._replace(layer=None, growth=0.0, line=None) for label in labels]
        label = self._sum(where, labels, "contraction")
        return label._replace(growth=total if grown else label.growth, scores=(where, *sizes) if grown else None)

    def _attention(self, where: str, args: Any, kwargs: Any, given: list[Tensor], labels: list[Label]) -> Label:
        size = args[0].shape[-1] if args else kwargs["query"].shape[-1]
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        queries = args[:2] if len(args) > 1 else (kwargs.get("query"), kwargs.get("key"))
        factors, others = [], []
        for tensor, label in zip(given, labels, strict=True):
            if any(tensor is each for each in queries):
                factors.append(label)
            else:  # what is added to scores is not multiplied with, if it is a weight
                others.append(label._replace(weight=None, outside=None) if tensor is mask else self._resolved(label))
        self._multiplied(factors)
        scale = kwargs.get("scale") or size**-0.5
        if self._check_heads(where, size, scale, sum(label.growth for label in factors)):
            factors = [label._replace(growth=0.0, line=None) for label in factors]  # what the factors before it are for
        return self._sum(where, [*map(self._resolved, factors), *others], "contraction")

    def _attention_module(self, where: str, args: Any, kwargs: Any) -> Label:
        """``nn.MultiheadAttention``."""
        bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        inputs = [self._get(given[key]) for key in ("query", "key", "value")]
        if given["use_separate_proj_weight"]:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            mixed = [self._product(given[key], [label]) for key, label in zip(names, inputs, strict=True)]
        else:
            mixed = [self._product(given["in_proj_weight"], inputs)]
        size = given["embed_dim_to_check"] // given["num_heads"]
        self._check_heads(where, size, size**-0.5, 0.0)
        return self._product(given["out_proj_weight"], [self._sum(where, mixed, "contraction")])

    def _recurrent(self, where: str, given: list[Tensor], labels: list[Label]) -> Label:
        """``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells."""
        current = [label for label in labels if label.weight is None]
        steps: dict[str, list[tuple[str, Tensor]]] = {}
        for tensor, label in zip(given, labels, strict=True):
            if label.weight is not None:
                kind, _, place = label.weight.rpartition(".")[2].removeprefix("weight_").partition("_")
                steps.setdefault(place.removesuffix("_reverse"), []).append((kind, tensor))
        for weights in steps.values():
            for kind in ("ih", "hh", "hr"):  # what enters, what comes back, and its projection
                products = (self._product(tensor, current) for each, tensor in weights if each == kind)
                made = [self._resolved(label, "nonlinear") for label in products]
                current = made if kind == "hr" and made else [*current, *made] if kind == "hh" else made or current
            current = [self._sum(where, current)]
        return current[0] if current else Label(lost=f"{where}, an operation that is not known")

    def _product(self, weight: Tensor, inputs: list[Label]) -> Label:
        self.touched.add(self._get(weight).weight or "")
        return self._use(self._get(weight), Fans(weight.shape[1], weight.shape[0]), inputs, "linear")

    def _use(self, weight: Label, found: Fans, inputs: list[Label], operation: str) -> Label:
        """The label of a product of a weight with its inputs."""
        name = weight.weight or ""
        parameter = self._parameters[name]
        module, layer = self._owner(name, parameter)
        if self._owners.setdefault(layer, module) is not None and module is None:
            layer = f"{name}.{operation}"  # what a module gives is another layer
        self._fans.setdefault(layer, found)
        small = found if self._small is None else self._small._fans.get(layer, found)
        grows = found.inputs > small.inputs, found.outputs > small.outputs
        kind = {(True, True): "hidden", (True, False): "readout", (False, True): "embedding"}.get(grows, "fixed")
        if operation.startswith("embedding") and grows[0]:
            self.unknown.setdefault(name, f"{self._where(operation)}, with more rows at larger widths,")
        if not parameter.requires_grad:
            label = self._sum(f"{layer}.input", inputs, "contraction", settle=True)
            if label.lost is not None or label.node is None:
                return label
            return label._replace(growth=label.growth + weight.growth, line=label.line or weight.line)
        if kind != "fixed":
            use = self.uses.setdefault(layer, WeightUse(layer, name, module, kind, found, small))
            kind = use.kind
        if not (parameter.is_meta or parameter.any()):
            inputs = [self._resolved(label, "zero") for label in inputs]
        a, b = {"embedding": (0.0, 0.0), "fixed": (0.0, 0.0)}.get(kind, (0.5 if kind == "readout" else 0.0, 0.5))
        label = self._add_layer(Node(layer, kind, (), a, b), inputs)
        growth = label.growth + weight.growth
        if kind == "fixed":
            return label._replace(layer=None, growth=growth, line=label.line or weight.line)
        self._last[layer] = growth, label.line or weight.line
        return label._replace(growth=growth, line=label.line or weight.line)

    def _owner(self, name: str, parameter: nn.Parameter) -> tuple[str | None, str]:
        """The running module that has a parameter, if there is one, and what its layer is called."""
        for path, module in reversed(self._path):
            for key, held in module.named_parameters(recurse=False):
                if held is parameter:
                    return path, path if key in {"weight", "weight_v"} else f"{path}.{key}".lstrip(".")
            computed = getattr(module, "parametrizations", None)
            if isinstance(computed, nn.ModuleDict) and any(held is parameter for held in computed.parameters()):
                return path, path
        owner, _, key = name.rpartition(".")
        return None, owner if key == "weight" else name

    # Labels and factors

    def _keep_track(
        self, name: str, kind: str, where: str, args: Any, kwargs: Any, labels: list[Label], factor: tuple[float, Any]
    ) -> Label:
        """The label of what an operation makes that is no contraction."""
        for label in labels:
            if label.lost is not None:
                return label
        if name in INDEXING and labels[0].weight is not None:
            return labels[0]  # experts, chosen by what a router says
        moving = [label for label in labels if label.node is not None]
        if self._small is None or not moving:
            label = self._join(kind, where, labels)
            tracked = [each for each in labels if each.weight is not None]
            if self._small is not None and label.weight is not None and tracked and factor[1] is not None:
                return label._replace(growth=tracked[0].growth + factor[0], line=tracked[0].line or factor[1])
            single = len(moving) == 1 and self._is_linear(name, labels, factor)
            return label._replace(layer=moving[0].layer) if single and label.node is not None else label
        growth, line = factor
        if len(moving) == 1:
            return self._follow(name, where, args, kwargs, moving[0], labels, growth, line)
        if name in INVARIANT:
            return self._join(kind, where, [self._resolved(label, "norm") for label in moving])
        if kind != "product" or name == "glu":
            return self._sum(where, moving, kind)
        self._multiplied(moving)
        settled = [self._resolved(label) for label in moving]
        signs = are_divided(name, settled)
        total = growth + sum(sign * label.growth for sign, label in zip(signs, settled, strict=True))
        lines = [label.line for label in settled if label.line is not None]
        return self._join(kind, where, settled)._replace(growth=total, line=lines[0] if lines else None)

    def _is_linear(self, name: str, labels: list[Label], factor: tuple[float, Any]) -> bool:
        if name in HOMOGENEOUS or factor[1] is not None:
            return True
        return name in LINEAR and not any(label.weight for label in labels)

    def _follow(
        self,
        name: str,
        where: str,
        args: Any,
        kwargs: Any,
        label: Label,
        labels: list[Label],
        growth: float,
        line: str | None,
    ) -> Label:
        """The label of what an operation makes of one activation, and of constants and weights."""
        power = degree(name, args, kwargs)
        if power is not None:
            label = self._resolved(label, "norm")
            return label._replace(growth=power * label.growth + growth, line=label.line or line)
        if self._is_linear(name, labels, (growth, line)) and (line is not None or name in HOMOGENEOUS):
            if line is None and abs(growth) > 1e-9:  # a sum over more of them is no factor of the layer
                label = self._resolved(label)
            if abs(growth) > 1e-9:
                label = label._replace(growth=label.growth + growth, line=label.line or line)
            if label.layer is not None:
                self._last[label.layer] = label.growth, label.line
            return label
        if name in INVARIANT:
            return self._resolved(label, "norm")._replace(growth=0.0, line=None, scores=None)
        if abs(label.growth) < FLAT and self._is_linear(name, labels, (growth, line)):
            return label
        is_product = junction_of(name) == "product" and name != "glu"
        label = self._resolved(label, "linear" if is_product or name in _KEEP else "nonlinear")
        if abs(label.growth) < FLAT or is_product:
            return label
        if name in _KEEP and all(each.node is not None or each == CONSTANT for each in labels):
            return label
        return self._unattributed(label)

    def _growth(self, name: str, args: Any, result: Any, labels: list[Label]) -> tuple[float, str | None]:
        """By how much more this model multiplies than the smaller one, as a logarithm, and the line of code."""
        if not self._with_weights:
            return 0.0, None
        found = log_factor(name, args, result, lambda tensor: self._get(tensor) == CONSTANT)
        if found is None:
            return 0.0, None
        key = self._key(name)
        self._logs[key] = found[0]
        growth = 0.0 if self._small is None else found[0] - self._small._logs.get(key, found[0])
        if not found[1]:
            return growth, None
        return growth, _line() if abs(growth) > 1e-9 else ""

    def _sizes(self, where: str, size: int) -> tuple[int, int]:
        """A size in the smaller and in the larger model."""
        key = self._key(f"{where} size")
        self._logs[key] = size
        return int(size if self._small is None else self._small._logs.get(key, size)), size

    def _key(self, name: str) -> str:
        """A name for the same operation in both models."""
        key = self._where(name)
        self._counts[key] = self._counts.get(key, 0) + 1
        return f"{key}#{self._counts[key]}"

    def _check_heads(self, where: str, size: int, scale: float, growth: float) -> bool:
        """Whether heads grow; they are told of if scores do."""
        sizes = self._sizes(where, size)
        key = self._key(f"{where} scale")
        self._logs[key] = scale
        before = scale if self._small is None else self._small._logs.get(key, scale)
        times = scale * sizes[1] / (before * sizes[0]) * math.exp(growth)
        if sizes[1] > sizes[0] and times > 1.05:
            self._warn_of_heads(where, *sizes, times)
        return sizes[1] > sizes[0]


def _line() -> str | None:
    """The line of the model's code that is running."""
    frame: Any = sys._getframe(1)
    inside = str(Path(torch.__file__).parent), str(Path(__file__).parent)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(inside):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def run(model: nn.Module, sample_input: Any) -> Any:
    """What the model returns.

    Args:
        sample_input: a tensor, a tuple of arguments, or a dict of keyword arguments.
    """
    if isinstance(sample_input, Mapping):
        return model(**sample_input)
    return model(*sample_input) if isinstance(sample_input, (tuple, list)) else model(sample_input)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A model that runs eagerly, in evaluation mode and without multipliers; afterwards it is as it was.

    So are random numbers, those of generators too that its modules hold.
    """
    attributes = [(module, dict(vars(module)), dict(buffers_in(module))) for module in model.modules()]
    values = [(buffer, buffer.clone()) for _, _, held in attributes for buffer in held.values() if buffer is not None]
    generators = [each for module in model.modules() for each in generators_of(module).values()]
    multipliers = [hook for module in model.modules() if (hook := multiplier_of(module)) is not None]
    factors = [hook.value for hook in multipliers]
    try:
        with drawn_again(cuda_devices(), generators), torch.no_grad(), Eager(model):
            model.eval()
            for hook in multipliers:
                hook.value = 1.0
            yield
    finally:
        for hook, factor in zip(multipliers, factors, strict=True):
            hook.value = factor
        for module, held, buffers in attributes:
            vars(module).clear()
            vars(module).update(held)
            registry = buffers_in(module)
            registry.clear()
            registry.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)

"""A model's layers, their graph and the model's own width factors, from ``torch.export`` at two widths.

The exported graphs are functional, and both widths give the same list of operations, so that these pair up by position.
Each value carries an :class:`Info`: the node whose change it follows, and by how much more the larger model has
multiplied it since its last layer. A factor that is followed by a nonlinear operation belongs to the layer before it; a
factor that a weight sums over, to the layer of that weight.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor, nn

from ignite_monitor.model.linear_maps import is_builtin_layer, is_linear
from ignite_monitor.model.names import named_modules, named_parameters, unwrapped
from ignite_monitor.scaling import operations
from ignite_monitor.scaling.operations import ExportError, Fans, Operation, TracingError, role_by_fans
from ignite_monitor.scaling.parametrization import is_zero
from ignite_monitor.scaling.solver import Node, ParametrizedLayer

_logger = logging.getLogger(__name__)

NEGLIGIBLE = 0.02
"""Tolerance for the logarithm of a factor's ratio between the widths."""


class Info(NamedTuple):
    """Origin of a value in the exported graphs."""

    source: str | None = None  # the node of the layer graph whose change it follows
    weight: str | None = None  # the parameter of two or more dimensions that it is, up to shape and factors
    layer: str | None = None  # the layer whose output it is, up to shape and factors
    log_factor: float = 0.0  # logarithm of the larger model's factor over the smaller one's, since the last layer
    is_score: bool = False  # True for a product of activations that sums over more elements in the larger model
    values: tuple[Any, Any] | None = None  # both values, for constants


class ExportedModels:
    """Layers and graph of a model at two widths, from an input for each; ExportError if unknown."""

    def __init__(self, models: tuple[nn.Module, nn.Module], inputs: tuple[Any, Any]) -> None:
        self.layers: dict[str, ParametrizedLayer] = {}  # in the order of the forward pass
        self.graph: dict[str, Node] = {}
        self.reached: set[str] = set()  # names of the parameters that the forward pass uses
        self._parameters = {name: parameter for name, parameter, _ in named_parameters(models[1])}
        self._weights = {id(parameter): name for name, parameter in self._parameters.items()}
        self._root = unwrapped(models[1])
        self._modules = dict(self._root.named_modules(remove_duplicate=False))
        self._names = {module: name for name, module in named_modules(models[1])}
        self._warned = False
        self._infos: dict[Operation, Info] = {}
        self._exports = [operations.exported_graph(*pair) for pair in zip(models, inputs, strict=True)]
        for small, large in zip_longest(*(exported.graph.nodes for exported in self._exports)):
            if None in (small, large) or (small.op, operations.name_of(small)) != (large.op, operations.name_of(large)):
                place = "their numbers differ" if None in (small, large) else Operation(small, large).place
                raise ExportError(f"the widths run different operations: {place}")
            op = Operation(small, large)
            self._infos[op] = self._placeholder(op) if large.op == "placeholder" else self._call(op)

    def _placeholder(self, op: Operation) -> Info:
        path = self._exports[1].graph_signature.inputs_to_parameters.get(op.large.name)
        if path is not None:
            parameter = self._root.get_parameter(path.removeprefix(operations.PREFIX))
            name = self._weights[id(parameter)]
            self.reached |= {name} if op.large.users else set()
            return Info(weight=name if parameter.ndim > 1 else None)
        small, large = (operations.constant(*pair) for pair in zip(self._exports, op, strict=True))
        return Info() if small is None or large is None else Info(values=(small, large))

    # Operations

    def _call(self, op: Operation) -> Info:
        given = [self._infos[item] for item in op.inputs]
        if op.large.op == "output":
            self._settled(given, op)
        if op.large.op != "call_function" or op.name in operations.LIKE:
            return Info()
        if all(info.values is not None for info in given):
            return self._constant(op)
        added = op.argument(0) if op.name in operations.ADDED else None
        weights = [item for item in op.inputs if self._infos[item].weight is not None and item != added]
        moving = [info for info in given if info.source]
        if op.name in operations.RECURRENT:
            return self._recurrent(op, weights, moving)
        if op.name == "scaled_dot_product_attention":
            return self._attention(op)
        if not weights:
            return self._activation(op, moving)
        is_elementwise = op.name in operations.PASSING or op.name in ("mul", "div")
        others = [item for item in op.inputs if item.is_floating and item not in weights]
        if all(self._infos[item].values is not None for item in others) and (is_elementwise or op.is_known):
            name = " and ".join(str(self._infos[item].weight) for item in weights)
            return Info(weight=name, log_factor=self._infos[weights[0]].log_factor + self._factor(op))
        if is_elementwise:  # such as positions that are added, or gains
            return self._activation(op, self._settled(moving, op))
        fans = op.fans(weights[0]) if len(weights) == 1 else None
        if fans is None:
            raise ExportError(f"{op.place} uses {self._infos[weights[0]].weight} for an unknown purpose")
        return self._layer(op, self._infos[weights[0]], fans, moving)

    def _constant(self, op: Operation) -> Info:
        """Both values of an operation on constants, where these are small."""
        small, large = (
            operations.evaluated(node, {item[index]: (self._infos[item].values or ())[index] for item in op.inputs})
            for index, node in enumerate(op)
        )
        return Info() if small is None or large is None else Info(values=(small, large))

    def _activation(self, op: Operation, moving: list[Info]) -> Info:
        """The origin of a function of activations, constants and vectors; none for masks and indices."""
        if not moving or not op.is_floating:
            return Info()
        if op.power is not None and len(moving) == 1:
            (info,) = self._settled(moving, op, is_relative=True)
            return info._replace(log_factor=op.power * info.log_factor)
        if op.name in ("mul", "div"):
            return self._multiplied(op, moving)
        if op.name in operations.SUMMED:
            info, before, after = self._settled(moving, op)[0], op.inputs[0].sizes, op.sizes
            summed = math.log(before[1] / after[1] * after[0] / before[0])
            return info._replace(log_factor=info.log_factor + operations.SUMMED[op.name] * summed)
        if op.name in operations.PASSING:
            return self._sum(op, moving)
        if op.name in operations.MATRICES:
            fans = op.fans(op.inputs[op.name in operations.ADDED]) or ((1, 1), (1, 1))
            return self._product(op, moving, fans[0][0], fans[1][0])
        if "norm" in op.name:
            return self._join(op, self._settled(moving, op, is_relative=True))
        if not op.is_known:
            raise ExportError(f"{op.place} is not a known operation")
        return self._nonlinear(op, self._settled(moving, op))

    def _factor(self, op: Operation) -> float:
        """Growth by the constant factors of a product or quotient; 0 for other operations."""
        log_factor = 0.0
        for index in (0, 1) if op.name in ("mul", "div") else ():
            argument = op.argument(index)
            values = self._infos[argument].values if isinstance(argument, Operation) else argument
            if values is not None:
                ratio = operations.log_ratio(*values)
                if ratio is None:
                    raise ExportError(f"{op.place} takes constants whose growth with width is not known")
                log_factor += (-1 if op.name == "div" and index else 1) * ratio
        return log_factor

    def _multiplied(self, op: Operation, moving: list[Info]) -> Info:
        log_factor, divisor = self._factor(op), op.argument(1) if op.name == "div" else None
        below = self._infos[divisor] if isinstance(divisor, Operation) else None
        if len(moving) == 1 and moving[0] is not below:
            return moving[0]._replace(log_factor=moving[0].log_factor + log_factor)
        settled = self._settled(moving, op, is_relative=len(moving) == 1)
        for old, info in zip(moving, settled, strict=True):
            log_factor += -info.log_factor if old is below else info.log_factor
        return self._join(op, settled)._replace(log_factor=log_factor)

    def _sum(self, op: Operation, moving: list[Info]) -> Info:
        """A sum of several values, which changes as fast as the fastest of them."""
        if len({(info.source, info.layer, round(info.log_factor, 3)) for info in moving}) == 1:
            return moving[0]
        first, *rest = moving = self._settled(moving, op)
        if any(abs(info.log_factor - first.log_factor) > NEGLIGIBLE for info in rest):
            return self._nonlinear(op, moving)
        return self._join(op, moving)._replace(log_factor=first.log_factor, is_score=first.is_score)

    def _product(self, op: Operation, moving: list[Info], small: int, large: int, scale: float = 0.0) -> Info:
        """A product of activations, whose outputs sum over these numbers of elements."""
        if large <= small:
            return self._sum(op, self._settled(moving, op))
        log_factor = sum(info.log_factor for info in moving) + math.log(large / small) + scale
        # The factors before it are the scores' own scale.
        self._settled([info._replace(log_factor=0.0) for info in moving], op)
        return self._join(op, moving)._replace(log_factor=log_factor, is_score=True)

    def _attention(self, op: Operation) -> Info:
        query, key, value = (self._infos[op.argument(index)] for index in range(3))
        sizes = [node.args[0].meta["val"].shape[-1] for node in op]  # type: ignore[union-attr]
        scales: list[Any] = [node.kwargs.get("scale") or size**-0.5 for node, size in zip(op, sizes, strict=True)]
        scores = self._product(op, [query, key], sizes[0], sizes[1], math.log(scales[1] / scales[0]))
        return self._join(op, [self._nonlinear(op, [scores]), *self._settled([value], op)])

    def _nonlinear(self, op: Operation, moving: list[Info]) -> Info:
        """The output of a function in which a factor is not a factor of the output; scores only get a warning."""
        for info in moving:
            factor = f"{math.exp(info.log_factor):.3g} times"
            if not info.is_score and abs(info.log_factor) > NEGLIGIBLE:
                raise ExportError(f"{op.place} follows a factor of no layer, {factor} as large in the larger model")
            if info.log_factor > 0.05 and not self._warned:
                self._warned = True
                scores = f"{op.place} takes attention scores that are {factor} as large in the larger model"
                _logger.warning("parametrize: %s where queries and keys align: scale by 1 / head dimension.", scores)
        return self._join(op, moving)

    def _recurrent(self, op: Operation, weights: list[Operation], moving: list[Info]) -> Info:
        """``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells: a chain of all weights."""
        value = self._join(op, moving)
        for item in weights:
            fans = op.fans(item) or ((1, 1), (1, 1))
            (value,) = self._settled([self._layer(op, self._infos[item], fans, [value])], op)
        return value

    # Layers

    def _layer(self, op: Operation, weight: Info, fans: Fans, given: Iterable[Info]) -> Info:
        """The output of a weight's use, from its numbers of inputs and outputs in both models."""
        name = weight.weight or ""
        if name not in self._parameters:
            raise ExportError(f"{op.place} uses {name} as one weight")
        parameter = self._parameters[name]
        zero, moving = is_zero(parameter), [info for info in given if info.source]
        if zero or len(moving) > 1:
            moving = self._settled(moving, op, is_relative=zero)
        info = self._sum(op, moving) if moving else Info()
        log_factor = weight.log_factor + (0.0 if info.layer is not None else info.log_factor)
        self._settled([info], op)
        role, widths = role_by_fans(fans)
        if not parameter.requires_grad:
            return Info(info.source, log_factor=log_factor)
        key, module = self._layer_names(op, name, parameter)
        inputs = () if info.source is None else (info.source,)
        if role == "fixed":
            return Info(self._add(Node(key, inputs, is_fixed=True)), log_factor=log_factor)
        known = self.layers.get(key)
        if known is not None and (known.role, known.module) != (role, module):
            key = f"{name}.{op.name}"  # the weight is used functionally, too
        layer = self.layers.setdefault(key, ParametrizedLayer(key, role, widths, name, module))
        return Info(self._add(Node(key, inputs, layer)), layer=key, log_factor=log_factor)

    def _layer_names(self, op: Operation, weight: str, parameter: Tensor) -> tuple[str, str | None]:
        """Names of the layer of a weight, and of the running module whose output is the layer's."""
        for path, _ in reversed(op.large.meta.get("nn_module_stack", {}).values()):
            name = f"{str(path).partition('@')[0]}.".removeprefix(operations.PREFIX).removesuffix(".")
            module = self._modules.get(name, nn.Module())
            for key, held in module.named_parameters(recurse=False):
                if held is parameter:
                    owner = self._names[module]
                    is_layer = is_linear(module) or is_builtin_layer(module, nn.Embedding)
                    return owner if key == "weight" else f"{owner}.{key}".lstrip("."), owner if is_layer else None
        return weight.removesuffix(".weight"), None

    def _settled(self, infos: Iterable[Info], op: Operation, *, is_relative: bool = False) -> list[Info]:
        """Attribute the factors of values that come straight from a layer to this layer."""
        settled = []
        for info in infos:
            layer = None if info.layer is None else self.layers[info.layer]
            if layer is not None:
                layer.is_relative |= is_relative
                if layer.log_factor is not None and abs(layer.log_factor - info.log_factor) > NEGLIGIBLE:
                    raise TracingError(f"{layer.name} is used with several width factors, one before {op.place}")
                layer.log_factor, info = info.log_factor, info._replace(layer=None, log_factor=0.0)
            settled.append(info)
        return settled

    def _join(self, op: Operation, infos: Iterable[Info]) -> Info:
        """A value that changes as fast as the fastest of several."""
        sources = tuple(sorted({info.source for info in infos if info.source is not None}))
        if len(sources) < 2:
            return Info(sources[0] if sources else None)
        return Info(self._add(Node(f"{op.large.name}+", sources)))

    def _add(self, node: Node) -> str:
        """Add a node, and return its name, which is made unique."""
        name = f"{node.name}#{len(self.graph)}" if node.name in self.graph else node.name
        self.graph[name] = node._replace(name=name)
        return name


def mark_relative(graph: dict[str, Node]) -> None:
    r"""Treat readouts inside the network whose output a norm or a zero weight takes as hidden layers of few outputs.

    Only their relative change counts, so that a + b = 1/2; c is 1 for LoRA's A, and 0 for its B, the ratio n of LoRA+
    (arXiv:2402.12354). Other layers of few outputs, such as routers and keys that all heads share, are readouts.
    """
    feeding: set[str] = set()
    for node in reversed(graph.values()):
        is_inside, layer = node.name in feeding, node.layer
        if is_inside or layer is not None or node.is_fixed:
            feeding.update(node.inputs)
        if is_inside and layer is not None and layer.role == "readout" and layer.is_relative:
            layer.role, layer.has_few_outputs = "hidden", True

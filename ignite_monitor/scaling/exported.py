"""A model's layers, their graph and the model's own width factors, from ``torch.export`` at two widths.

The exported graphs are functional, and both widths give the same list of operations, so that these pair up by position.
Each value carries an :class:`Info`: the node whose change it follows, and by how much more the larger model has
multiplied it since its last layer. A factor that is followed by a nonlinear operation belongs to the layer before it; a
factor that a weight sums over, to the layer of that weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ignite_monitor.model.names import named_parameters
from ignite_monitor.scaling import operations as ops
from ignite_monitor.scaling import program
from ignite_monitor.scaling.graph import Node
from ignite_monitor.scaling.operations import Operation, name_of
from ignite_monitor.scaling.roles import FLAT, LayerUse, role_by_fans, widths_by_size


class Info(NamedTuple):
    """Origin of a value in the exported graphs."""

    source: str | None = None  # the node of the layer graph whose change it follows
    weight: str | None = None  # the parameter of two or more dimensions that it is, up to shape and factors
    layer: str | None = None  # the layer whose output it is, up to shape and factors
    growth: float = 0.0  # logarithm of the larger model's factor over the smaller one's, since the last layer
    scores: str | None = None  # for a product of two activations that sums over more elements: what to warn of
    values: tuple[Any, Any] | None = None  # both values, for constants


class ExportedModels:
    """Layers and graph of a model at two widths, from an input for each, and roles of weights where they are given.

    Raises:
        TracingError: if the model can't be exported, both widths run different operations, or an input is unknown.
        ValueError: if a weight's purpose is unknown.

    Attributes:
        uses: layer -> :class:`LayerUse`, in the order of the forward pass.
        nodes: the nodes of the layer graph.
        reached: names of the weights that the forward pass uses.
        warnings: attention scores that grow with the width.
    """

    def __init__(self, models: tuple[nn.Module, nn.Module], inputs: tuple[Any, Any], roles: Mapping[str, str]) -> None:
        self.uses: dict[str, LayerUse] = {}
        self.nodes: list[Node] = []
        self.reached: set[str] = set()
        self.warnings: list[str] = []
        self._roles = roles
        self._parameters = {name: parameter for name, parameter, _ in named_parameters(models[1])}
        self._weights = {id(parameter): name for name, parameter in self._parameters.items()}
        self._modules = program.NamedModules(models[1])
        self._owners: dict[str, str] = {}  # weight -> the first layer that uses it
        self._unknown: dict[str, str] = {}  # node -> the reason for which its value is unknown
        self._junctions: dict[tuple[str, ...], str] = {}
        self._infos: dict[Operation, Info] = {}
        self._programs = [program.exported_program(*pair) for pair in zip(models, inputs, strict=True)]
        for pair in zip_longest(*(exported.graph.nodes for exported in self._programs)):
            if None in pair or (pair[0].op, name_of(pair[0])) != (pair[1].op, name_of(pair[1])):
                place = "their numbers differ" if None in pair else Operation(*pair).place
                raise program.ExportError(program.refusal(f"the widths run different operations: {place}"))
            self._infos[Operation(*pair)] = self._read(Operation(*pair))
        self._find_modules()

    def _read(self, op: Operation) -> Info:
        for item in op.inputs if op.large.op == "output" else ():
            self._settle(self._infos[item], "nonlinear", op)
        if op.large.op == "placeholder":
            return self._placeholder(op)
        return self._call(op) if op.large.op == "call_function" and op.name not in ops.LIKE else Info()

    def _placeholder(self, op: Operation) -> Info:
        path = self._programs[1].graph_signature.inputs_to_parameters.get(op.large.name)
        if path is not None:
            parameter = self._modules.root.get_parameter(path.removeprefix(program.PREFIX))
            return Info(weight=self._weights[id(parameter)] if parameter.ndim > 1 else None)
        values = []
        for exported, node in zip(self._programs, op, strict=True):
            signature = exported.graph_signature
            key = {**signature.inputs_to_lifted_tensor_constants, **signature.inputs_to_buffers}.get(node.name)
            values.append(exported.constants.get(key, exported.state_dict.get(key)))
        return Info(values=(values[0], values[1])) if all(isinstance(value, Tensor) for value in values) else Info()

    # Operations

    def _call(self, op: Operation) -> Info:
        given = [self._infos[item] for item in op.inputs]
        if all(info.values is not None for info in given):
            return self._constant(op)
        added = op.argument(0) if op.name in ops.ADDED else None
        weights = [item for item in op.inputs if self._infos[item].weight is not None and item != added]
        names = [self._infos[item].weight or "" for item in weights]
        self.reached |= {info.weight for info in given if info.weight is not None}
        if op.name in ops.RECURRENT:
            return self._recurrent(op, weights)
        if op.name == "scaled_dot_product_attention":
            return self._attention(op)
        if not weights:
            return self._follow(op, given)
        moving = [info for info in given if info.weight is None]
        is_table = op.name in ops.PASSING or op.name in ("mul", "div")
        if len(weights) == 1 and not is_table:
            fans, given_role = op.fans(weights[0]), self._roles.get(names[0])
            if fans is not None:
                return self._layer(op, self._infos[weights[0]], *role_by_fans(fans, given_role), moving)
            if given_role is not None:
                widths = widths_by_size(given_role, weights[0].shapes)
                return self._layer(op, self._infos[weights[0]], given_role, widths, moving)
        others = [info for item, info in zip(op.inputs, given, strict=True) if item.is_floating and info.weight is None]
        if all(info.values is not None for info in others) and (is_table or op.is_known):
            return Info(weight=" and ".join(names), growth=self._infos[weights[0]].growth + self._factor(op))
        if is_table:  # such as positions that are added, or gains
            return self._follow(op, [self._settle(info, "linear", op) for info in moving])
        for name, item in zip(names, weights, strict=True):
            is_trained = name not in self._parameters or self._parameters[name].requires_grad
            if is_trained and name not in self._roles and item.shapes[0] != item.shapes[1]:
                raise ValueError(
                    f"{op.place} uses {name}, which grows with width, for an unknown purpose: give its role, "
                    f"parametrize(..., kinds={{{name!r}: 'hidden'}})"
                )
        if any(info.source for info in moving):
            return self._follow(op, moving)
        return self._lose(op, f"which uses {' and '.join(names)} for an unknown purpose")

    def _follow(self, op: Operation, given: list[Info]) -> Info:
        """The origin of what an operation makes of activations, constants and vectors."""
        # Masks and indices decide which values are taken; they have no factor.
        masks = [self._infos[item] for item in op.inputs if not item.is_floating]
        deciding = [info for info in masks if info.source is not None]
        moving = [info for info in given if info.source is not None and info not in deciding]
        if not moving or not (op.is_floating or op.name == "getitem"):
            return Info(self._join(op, [*moving, *deciding]))
        info = self._moved(op, moving)
        return info._replace(source=self._join(op, [info, *deciding])) if deciding else info

    def _moved(self, op: Operation, moving: list[Info]) -> Info:
        if op.power is not None and len(moving) == 1:
            info = self._settle(moving[0], "norm", op)
            return info._replace(growth=op.power * info.growth)
        if op.name in ("mul", "div"):
            return self._multiplied(op, moving)
        if op.name in ops.SUMMED:
            info = self._settle(moving[0], "linear", op)
            before, after = op.inputs[0].sizes, op.sizes
            summed = math.log(before[1] / after[1] * after[0] / before[0])
            return info._replace(growth=info.growth + ops.SUMMED[op.name] * summed)
        if op.name in ops.PASSING:
            return self._sum(op, moving)
        if "norm" in op.name and op.name.strip("_") != "weight_norm":
            return Info(self._join(op, [self._settle(info, "norm", op) for info in moving]))
        if op.name in ops.MATRICES:
            return self._product(op, moving, op.contracted())
        settled = [self._settle(info, "nonlinear", op) for info in moving]
        if not op.is_known:
            return self._lose(op, "an operation that is not known")
        steep = next((info for info in settled if abs(info.growth) > FLAT), None)
        return Info(self._join(op, settled)) if steep is None else self._unattributed(op, steep, settled)

    def _constant(self, op: Operation) -> Info:
        """Both values of an operation on constants, where these are small."""
        target: Any = op.large.target
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or max(op.sizes) > 10**6:
            return Info()
        values = []
        for index, node in enumerate(op):
            known: dict[Any, Any] = {item[index]: (self._infos[item].values or ())[index] for item in op.inputs}
            try:
                args, kwargs = fx.map_arg(node.args, known.__getitem__), fx.map_arg(node.kwargs, known.__getitem__)
                values.append(target(*args, **kwargs))
            except Exception:  # noqa: BLE001  some operations need more than their arguments
                return Info()
        return Info(values=(values[0], values[1]))

    def _factor(self, op: Operation) -> float:
        """Growth by the constant factors of a product or quotient; 0 for other operations."""
        growth = 0.0
        for index in (0, 1) if op.name in ("mul", "div") else ():
            argument = op.argument(index)
            values = self._infos[argument].values if isinstance(argument, Operation) else argument
            if values is not None:
                growth += (-1 if op.name == "div" and index else 1) * ops.log_ratio(*values)
        return growth

    def _multiplied(self, op: Operation, moving: list[Info]) -> Info:
        growth, divisor = self._factor(op), op.argument(1) if op.name == "div" else None
        below = self._infos[divisor] if isinstance(divisor, Operation) else None
        if len(moving) == 1 and moving[0] is not below:
            return moving[0]._replace(growth=moving[0].growth + growth)
        self._connect(moving)
        settled = [self._settle(info, "norm" if len(moving) == 1 else "linear", op) for info in moving]
        growth += sum(-info.growth if old is below else info.growth for old, info in zip(moving, settled, strict=True))
        return Info(self._join(op, settled), growth=growth)

    def _sum(self, op: Operation, moving: list[Info]) -> Info:
        """A sum of several values, which changes as fast as the fastest of them."""
        if len({(info.source, info.layer, round(info.growth, 3)) for info in moving}) <= 1:
            return moving[0] if moving else Info()
        moving = [self._settle(info, "linear", op) for info in moving]
        growths = [info.growth for info in moving]
        if max(growths) - min(growths) > FLAT:
            return self._unattributed(op, max(moving, key=lambda info: abs(info.growth)), moving)
        return Info(self._join(op, moving), growth=growths[0], scores=moving[0].scores)

    def _product(self, op: Operation, moving: list[Info], sizes: Sequence[int], scale: float = 0.0) -> Info:
        """A product of activations that sums over elements, whose numbers in both models are given."""
        self._connect(moving)
        if sizes[1] <= sizes[0]:
            return self._sum(op, [self._settle(info, "linear", op) for info in moving])
        growth = sum(info.growth for info in moving) + math.log(sizes[1] / sizes[0]) + scale
        for info in moving:  # the factors before it are the scores' own scale
            self._settle(info._replace(growth=0.0), "linear", op)
        scores = f"{op.place}: the heads grow with width, from {sizes[0]} to {sizes[1]}"
        return Info(self._join(op, moving), growth=growth, scores=scores)

    def _attention(self, op: Operation) -> Info:
        query, key, value = (self._infos[op.argument(index)] for index in range(3))
        sizes = [shape[-1] for shape in op.inputs[0].shapes]
        scales: list[Any] = [node.kwargs.get("scale") or size**-0.5 for node, size in zip(op, sizes, strict=True)]
        scores = self._product(op, [query, key], sizes, math.log(scales[1] / scales[0]))
        if scores.scores is not None:
            scores = self._unattributed(op, scores, [scores])
        factors = scores, self._settle(value, "linear", op)
        return self._sum(op, [info for info in factors if info.source is not None])

    def _recurrent(self, op: Operation, weights: list[Operation]) -> Info:
        """``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells."""
        current = [self._infos[item] for item in op.inputs if item not in weights]
        current = [info for info in current if info.source is not None]
        steps: dict[str, dict[str, list[Operation]]] = {}
        for item in weights:
            kind, _, step = (self._infos[item].weight or "").rpartition(".")[2].removeprefix("weight_").partition("_")
            steps.setdefault(step.removesuffix("_reverse"), {}).setdefault(kind, []).append(item)
        for kinds in steps.values():
            for kind in ("ih", "hh", "hr"):  # of the input, of the hidden state, and its projection
                outputs = []
                for item in kinds.get(kind, ()):
                    weight = self._infos[item]
                    fans = [(shape[1], shape[0]) for shape in item.shapes]
                    role = role_by_fans(fans, self._roles.get(weight.weight or ""))
                    outputs.append(self._settle(self._layer(op, weight, *role, current), "nonlinear", op))
                current = [*current, *outputs] if kind == "hh" else outputs or current
        return self._sum(op, current)

    # Layers

    def _layer(self, op: Operation, weight: Info, kind: str, widths: tuple[int, int], given: Iterable[Info]) -> Info:
        """The output of a weight's use."""
        name = weight.weight or ""
        if name not in self._parameters:
            raise program.TracingError(
                f"The graph can't be read: {op.place} uses {name} as one weight. Use each by itself"
            )
        parameter = self._parameters[name]
        moving = [info for info in given if info.source is not None]
        layer = self._modules.layer_name(op.large, name, parameter)
        if is_zero(parameter) or len(moving) > 1:
            moving = [self._settle(info, "zero" if is_zero(parameter) else "linear", op) for info in moving]
        info = self._sum(op, moving)
        if info.source in self._unknown and name not in self._roles:
            raise program.TracingError(
                f"The graph can't be read: {layer} takes its input from {self._unknown[info.source]}. Change the "
                f"model's code at this place, or give the weight's role, parametrize(..., kinds={{{name!r}: {kind!r}}})"
            )
        growth = weight.growth + (0.0 if info.layer is not None else info.growth)
        self._settle(info, "linear", op)
        if not parameter.requires_grad or kind == "vector":
            return Info(info.source, growth=growth)
        inputs = () if info.source is None else (info.source,)
        if kind == "fixed":
            return Info(self._add(Node(layer, kind, inputs)), growth=growth)
        use = self.uses.setdefault(layer, LayerUse(name, kind, widths))
        unique = self._add(Node(layer, use.kind, inputs, shares=self._owners.get(name)))
        self._owners.setdefault(name, unique)
        use.nodes.append(unique)
        return Info(unique, layer=layer, growth=growth)

    def _find_modules(self) -> None:
        """Name the modules whose outputs are those of their weights."""
        outputs: dict[str, list[Info]] = {}
        for op, info in self._infos.items():
            for name in self._modules.left_after(op.large):
                outputs.setdefault(name, []).append(info)
        for layer, use in self.uses.items():
            if layer in outputs and all(info.layer == layer for info in outputs[layer]):
                use.module = layer

    def _settle(self, info: Info, taker: str, op: Operation) -> Info:
        """Attribute a value's factor to the layer it comes from, if it comes straight from one."""
        if info.layer is None:
            return info
        use = self.uses[info.layer]
        use.takers.add(taker)
        if not any(abs(info.growth - growth) < FLAT for growth in use.own):
            use.own[info.growth] = op.place
        return info._replace(layer=None, growth=0.0)

    def _connect(self, moving: list[Info]) -> None:
        """Note the layers whose outputs are multiplied with each other."""
        layers = {info.layer for info in moving if info.layer is not None}
        for layer in layers:
            self.uses[layer].partners |= layers - {layer}

    def _unattributed(self, op: Operation, info: Info, moving: list[Info]) -> Info:
        """The output behind a factor that belongs to no layer; attention scores only get a warning."""
        if info.scores is None:
            factor = f"times {math.exp(info.growth):.3g} from the smaller model to the larger"
            reason = f"behind a factor that depends on the width ({factor}) and belongs to no layer before or after it"
            return self._lose(op, reason)
        if info.growth > 0.05:
            self.warnings.append(
                f"{info.scores}, and the scores are not divided by as much: where queries and keys align, scores grow "
                f"{math.exp(info.growth):.3g} times. Scale them by 1 / head dimension."
            )
        return Info(self._join(op, moving))

    def _lose(self, op: Operation, reason: str) -> Info:
        """A value of unknown origin."""
        name = self._add(Node(f"{op.large.name}?", "fixed"))
        self._unknown[name] = f"{op.place}, {reason}"
        return Info(name)

    def _join(self, op: Operation, infos: Iterable[Info]) -> str | None:
        sources = tuple(sorted({info.source for info in infos if info.source is not None}))
        if len(sources) < 2:
            return sources[0] if sources else None
        if sources not in self._junctions:
            name = self._junctions[sources] = self._add(Node(f"{op.large.name}+", "junction", sources))
            for source in self._unknown.keys() & sources:
                self._unknown[name] = self._unknown[source]
        return self._junctions[sources]

    def _add(self, node: Node) -> str:
        """Add a node, and return its name, which is made unique."""
        used = node.name in {known.name for known in self.nodes}
        self.nodes.append(node._replace(name=f"{node.name}#{len(self.nodes)}") if used else node)
        return self.nodes[-1].name


def is_zero(parameter: Tensor) -> bool:
    """True for a weight whose values are known, and 0."""
    return not parameter.is_meta and not bool(parameter.any())

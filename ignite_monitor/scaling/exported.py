"""Roles of a model's weights, its own width factors and its graph, from ``torch.export`` at two widths.

The exported graphs are functional, and both widths give the same list of operations, so that these pair up by position.
Each value carries an :class:`Info`: the node whose change it follows, and by how much more the larger model has
multiplied it since its last layer. A factor that is followed by a nonlinear operation belongs to the layer before it; a
factor that a weight sums over, to the layer of that weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ignite_monitor.model.names import named_modules, unwrapped
from ignite_monitor.scaling import operations as ops
from ignite_monitor.scaling import program
from ignite_monitor.scaling.graph import Node

FLAT = 0.02
"""Tolerance for the logarithm of a factor's ratio between the widths."""


class Info(NamedTuple):
    """Origin of a value in the exported graphs."""

    source: str | None = None  # the node of the layer graph whose change it follows
    weight: str | None = None  # the parameter of two or more dimensions that it is, up to shape and factors
    layer: str | None = None  # the layer whose output it is, up to shape and factors
    growth: float = 0.0  # logarithm of the larger model's factor over the smaller one's, since the last layer
    heads: tuple[str, int, int] | None = None  # for a product of two activations over n: place and both n
    lost: str | None = None  # reason for which the origin is unknown
    values: tuple[Any, Any] | None = None  # both values, for constants


@dataclass
class LayerUse:
    """The use of one weight in a linear operation.

    Attributes:
        weight: the parameter's name.
        kind: "embedding", "hidden" or "readout".
        widths: n in both models.
        module: name of the module whose output is the layer's output; None if there is none.
        takers: kinds of operations that take the output: "linear", "norm", "nonlinear", or "zero" for a zero weight.
        own: growth of the model's own factor -> its place.
        partners: layers whose outputs are multiplied with the layer's output.
        few: True for a hidden layer whose number of outputs does not grow.
        from_zero: True if the weight should start at zero.
    """

    weight: str
    kind: str
    widths: tuple[int, int]
    module: str | None = None
    takers: set[str] = field(default_factory=set)
    own: dict[float, str] = field(default_factory=dict)
    partners: set[str] = field(default_factory=set)
    few: bool = False
    from_zero: bool = False

    def exponent(self, layer: str) -> float:
        """Exponent of the model's own factor.

        Raises:
            TracingError: if different uses have different factors.
        """
        own = self.own or {0.0: ""}
        if max(own) - min(own) > FLAT:
            raise program.TracingError(
                f"{layer} is used with different factors that depend on the width ({' and '.join(own.values())}): "
                "multiply inside its module, after a layer of its own, or by what does not depend on the width"
            )
        growth = next(iter(own))
        exponent = growth / math.log(self.widths[1] / self.widths[0])
        nearest = round(12 * exponent) / 12
        return 0.0 if abs(growth) <= FLAT else nearest if abs(exponent - nearest) < 1e-4 else exponent


class ExportedModels:
    """What the exported graphs of a model at two widths say of its weights.

    Args:
        models: the model at a small and at the large width.
        inputs: an input for each: a tensor, a tuple of arguments, or a dict of keyword arguments.
        roles: weight -> its role, where that is given.

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
        model = unwrapped(models[1])
        plain = {id(module): name for name, module in named_modules(models[1])}
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._plain: dict[str, str] = {path: str(plain.get(id(module), path)) for path, module in self._modules.items()}
        first: dict[int, str] = {}
        parameters: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        self._names: dict[str, str] = {
            name: first.setdefault(id(each), self._shown(name)) for name, each in parameters.items()
        }
        self._parameters = {self._names[name]: each for name, each in parameters.items()}
        self._junctions: dict[tuple[str, ...], str] = {}
        self._counts: dict[str, int] = {}
        self._running: set[str] = set()  # modules that ran with a weight of their own
        self._infos: dict[fx.Node, Info] = {}
        self._twins: dict[fx.Node, fx.Node] = {}
        self._programs = tuple(program.exported_program(*pair) for pair in zip(models, inputs, strict=True))
        graphs = [list(each.graph.nodes) for each in self._programs]
        for small, large in zip(*graphs, strict=False):
            if ops.signature(small) != ops.signature(large):
                raise program.ExportError(
                    program.refusal(f"the widths run different operations: {ops.place_of(large)}")
                )
        if len(graphs[0]) != len(graphs[1]):
            raise program.ExportError(program.refusal("the widths run different numbers of operations"))
        for small, large in zip(*graphs, strict=True):
            self._twins[large] = small
            self._infos[large] = self._read(small, large)
        self._find_modules()

    # Leaves

    def _read(self, small: fx.Node, large: fx.Node) -> Info:
        if large.op == "output":
            for node in large.all_input_nodes:
                self._settle(self._infos[node], "nonlinear", large)
            return Info()
        if large.op == "placeholder":
            return self._placeholder(small, large)
        return self._call(small, large) if large.op == "call_function" else Info()

    def _placeholder(self, small: fx.Node, large: fx.Node) -> Info:
        parameter = self._programs[1].graph_signature.inputs_to_parameters.get(large.name)
        if parameter is not None:
            name = self._names[parameter.removeprefix(program.PREFIX)]
            return Info(weight=name if self._parameters[name].ndim > 1 else None)
        values = []
        for each, node in zip(self._programs, (small, large), strict=True):
            signature = each.graph_signature
            key = signature.inputs_to_buffers.get(node.name)
            key = signature.inputs_to_lifted_tensor_constants.get(node.name) if key is None else key
            values.append(each.constants.get(key, each.state_dict.get(key)))
        return Info(values=(values[0], values[1])) if all(isinstance(each, Tensor) for each in values) else Info()

    def _shown(self, name: str) -> str:
        owner, _, last = name.rpartition(".")
        return f"{self._plain.get(owner, owner)}.{last}".lstrip(".")

    # Operations

    def _call(self, small: fx.Node, large: fx.Node) -> Info:
        name = ops.name_of(large)
        inputs = large.all_input_nodes
        if name in ops.LIKE:
            return Info()
        given = [self._infos[node] for node in inputs]
        if all(info.values is not None for info in given):
            return self._constant(small, large)
        weights = [node for node, info in zip(inputs, given, strict=True) if info.weight is not None]
        weights = [node for node in weights if node is not ops.added_to(large, name)]
        self.reached |= {info.weight for info in given if info.weight is not None}
        if name in ops.RECURRENT:
            return self._recurrent(large, weights)
        if name == "scaled_dot_product_attention":
            return self._attention(large)
        if weights:
            weight = self._infos[weights[0]]
            role = self._role(large, name, weights[0]) if len(weights) == 1 else None
            if role is not None:
                return self._layer(large, weight, *role, [i for i in given if i.weight is None])
            if inputs[0] is weights[0] and name in ops.VIEWS:
                return weight
            if len(inputs) == 1 or all(i is weight or i.values is not None for i in given):
                growth = self._factor(small, large, name, given)
                if growth is not None:
                    return weight._replace(growth=weight.growth + growth)
            if len(inputs) == 1 and ops.is_known(large, name):
                return weight
            is_table = name in ops.SUMS | ops.VIEWS | {"mul", "div"}
            for node in [] if is_table else weights:
                self._refuse_unknown(large, node)
            given = [self._settle(i, "linear", large) if is_table else i for i in given if i.weight is None]
            if not is_table and not any(i.source for i in given):
                return Info(lost=f"{ops.place_of(large)}, which uses {weight.weight} for an unknown purpose")
        return self._follow(small, large, name, given)

    def _follow(self, small: fx.Node, large: fx.Node, name: str, given: list[Info]) -> Info:
        """The origin of what an operation makes of activations, constants and vectors."""
        lost = next((info for info in given if info.lost is not None), None)
        if lost is not None:
            return lost
        nodes = large.all_input_nodes
        # Masks and indices decide which values are taken; they have no factor.
        deciding = [self._infos[node] for node in nodes if not _is_floating(node) and self._infos[node].source]
        moving = [info for info in given if info.source is not None and info not in deciding]
        if not moving:
            return (
                Info(source=self._join(large, deciding)) if _is_floating(large) else Info(self._join(large, deciding))
            )
        if not _is_floating(large) and name != "getitem":
            return Info(source=self._join(large, [*moving, *deciding]))
        info = self._moved(small, large, name, given, moving)
        return info._replace(source=self._join(large, [info, *deciding])) if deciding and info.source else info

    def _moved(self, small: fx.Node, large: fx.Node, name: str, given: list[Info], moving: list[Info]) -> Info:
        if name in ops.INDEXING or (len(moving) == 1 and name in ops.VIEWS | ops.HOMOGENEOUS):
            return moving[0]
        if name in ("mul", "div"):
            growth = self._factor(small, large, name, given) or 0.0
            if len(moving) == 1:
                if name == "div" and given and given[-1] is moving[0] and len(given) > 1:
                    moving = [self._settle(moving[0], "norm", large)]
                    return moving[0]._replace(growth=growth - moving[0].growth)
                return moving[0]._replace(growth=moving[0].growth + growth)
            self._partners(moving)
            first, *others = [self._settle(info, "linear", large) for info in moving]
            growth += first.growth + (-1 if name == "div" else 1) * sum(info.growth for info in others)
            return Info(self._join(large, moving), growth=growth)
        power = ops.POWERS.get(name)
        if name == "pow" and isinstance(large.args[1], (int, float)):
            power = float(large.args[1])
        if power is not None and len(moving) == 1:
            info = self._settle(moving[0], "norm", large)
            return info._replace(growth=power * info.growth)
        if name in ops.SUMMED:
            counts = [math.prod(ops.shape_of(node.all_input_nodes[0])) / max(math.prod(ops.shape_of(node)), 1)
                      for node in (small, large)]  # fmt: skip
            info = self._settle(moving[0], "linear", large)
            return info._replace(growth=info.growth + ops.SUMMED[name] * math.log(counts[1] / counts[0]))
        if name in ops.SUMS or name in ops.HOMOGENEOUS or name in ops.VIEWS:
            return self._sum(large, moving)
        if ops.is_norm(name):
            return Info(self._join(large, [self._settle(info, "norm", large) for info in moving]))
        if name in ops.MATRICES:
            return self._product(small, large, name, moving)
        settled = [self._settle(info, "nonlinear", large) for info in moving]
        if not ops.is_known(large, name):
            return Info(lost=f"{ops.place_of(large)}, an operation that is not known")
        steep = next((info for info in settled if abs(info.growth) > FLAT), None)
        if steep is not None and self._unattributed(steep, large) is not None:
            return Info(lost=self._unattributed(steep, large))
        return Info(self._join(large, settled))

    def _constant(self, small: fx.Node, large: fx.Node) -> Info:
        """Both values of an operation on constants, where these are small."""
        target: Any = large.target
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or math.prod(ops.shape_of(large)) > 10**6:
            return Info()
        values = []
        for index, node in enumerate((small, large)):
            pairs = {(self._twins[each], each)[index]: self._infos[each].values for each in large.all_input_nodes}

            def value(each: fx.Node, index: int = index, pairs: Any = pairs) -> Any:
                return pairs[each][index]

            try:
                values.append(target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value)))
            except Exception:  # noqa: BLE001  some operations need more than their arguments
                return Info()
        return Info(values=(values[0], values[1]))

    def _factor(self, small: fx.Node, large: fx.Node, name: str, given: list[Info]) -> float | None:
        """Growth by the constant factors of a product or quotient; None for other operations."""
        if name not in ("mul", "div"):
            return None
        growth, infos = (
            0.0,
            dict(zip(large.all_input_nodes, [self._infos[n] for n in large.all_input_nodes], strict=True)),
        )
        for index, (one, other) in enumerate(zip(small.args[:2], large.args[:2], strict=True)):
            sign = -1 if name == "div" and index else 1
            if isinstance(one, (int, float)) and isinstance(other, (int, float)) and one and other:
                growth += sign * math.log(abs(other / one))
            elif isinstance(other, fx.Node) and (values := infos[other].values) is not None:
                growth += sign * _log_ratio(*values)
        return growth

    def _sum(self, large: fx.Node, moving: list[Info]) -> Info:
        """A sum of several values, which changes as fast as the fastest of them."""
        lost = next((info for info in moving if info.lost is not None), None)
        if lost is not None:
            return lost
        if len({(info.source, info.layer, round(info.growth, 3)) for info in moving}) <= 1:
            return moving[0] if moving else Info()
        moving = [self._settle(info, "linear", large) for info in moving]
        growths = [info.growth for info in moving]
        if max(growths) - min(growths) > FLAT:
            reason = self._unattributed(max(moving, key=lambda info: abs(info.growth)), large)
            return Info(lost=reason) if reason is not None else Info(self._join(large, moving))
        return Info(self._join(large, moving), growth=growths[0], heads=moving[0].heads)

    def _product(self, small: fx.Node, large: fx.Node, name: str, moving: list[Info]) -> Info:
        """A matrix product of activations."""
        self._partners(moving)
        sizes = ops.contracted(small, name), ops.contracted(large, name)
        if sizes[1] <= sizes[0]:
            return self._sum(large, [self._settle(info, "linear", large) for info in moving])
        growth = sum(info.growth for info in moving) + math.log(sizes[1] / sizes[0])
        for info in moving:  # the factors before it are the scores' own scale
            self._settle(info._replace(growth=0.0), "linear", large)
        return Info(self._join(large, moving), growth=growth, heads=(ops.place_of(large), *sizes))

    def _attention(self, large: fx.Node) -> Info:
        query, key, value = (self._infos[node] for node in large.args[:3] if isinstance(node, fx.Node))
        lost = next((info for info in (query, key, value) if info.lost), None)
        if lost is not None:
            return lost
        self._partners([query, key])
        nodes = self._twins[large], large
        sizes = [ops.shape_of(node.all_input_nodes[0])[-1] for node in nodes]
        if sizes[1] > sizes[0]:
            scales: list[Any] = [
                node.kwargs.get("scale") or size**-0.5 for node, size in zip(nodes, sizes, strict=True)
            ]
            growth = query.growth + key.growth + math.log(scales[1] * sizes[1] / scales[0] / sizes[0])
            self._unattributed(Info(growth=growth, heads=(ops.place_of(large), sizes[0], sizes[1])), large)
            query, key = query._replace(growth=0.0), key._replace(growth=0.0)
        factors = [self._settle(info, "linear", large) for info in (query, key, value)]
        return self._sum(large, [info for info in factors if info.source is not None])

    def _recurrent(self, large: fx.Node, weights: list[fx.Node]) -> Info:
        """``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells."""
        current = [self._infos[node] for node in large.all_input_nodes if node not in weights]
        current = [info for info in current if info.source is not None or info.lost is not None]
        steps: dict[str, dict[str, list[fx.Node]]] = {}
        for node in weights:
            kind, _, step = (self._infos[node].weight or "").rpartition(".")[2].removeprefix("weight_").partition("_")
            steps.setdefault(step.removesuffix("_reverse"), {}).setdefault(kind, []).append(node)
        for roles in steps.values():
            for kind in ("ih", "hh", "hr"):  # of the input, of the hidden state, and its projection
                outputs = []
                for node in roles.get(kind, ()):
                    fans = [ops.shape_of(each)[::-1] for each in (self._twin_input(large, node), node)]
                    role = _role_of(fans[0], fans[1], self._roles.get(self._infos[node].weight or ""))
                    output = self._layer(large, self._infos[node], *role, current)
                    outputs.append(self._settle(output, "nonlinear", large))
                current = [*current, *outputs] if kind == "hh" else outputs or current
        return self._sum(large, current)

    # Layers

    def _role(self, large: fx.Node, name: str, weight: fx.Node) -> tuple[str, tuple[int, int]] | None:
        """Role of a weight in an operation, and n in both models; None if the operation does not sum over it."""
        pair = self._twin_input(large, weight), weight
        fans = [ops.fans_of(*each) for each in zip((self._twins[large], large), (name, name), pair, strict=True)]
        given = self._roles.get(self._infos[weight].weight or "")
        if fans[0] is None or fans[1] is None:
            is_table = name in ops.VIEWS | ops.SUMS | {"mul", "div"}
            shapes = ops.shape_of(pair[0]), ops.shape_of(pair[1])
            return None if given is None or is_table else (given, widths_by_size(given, shapes))
        return _role_of(fans[0], fans[1], given)

    def _refuse_unknown(self, large: fx.Node, node: fx.Node) -> None:
        name = self._infos[node].weight or ""
        grows = ops.shape_of(node) != ops.shape_of(self._twin_input(large, node))
        if grows and name not in self._roles and self._parameters[name].requires_grad:
            raise ValueError(
                f"{ops.place_of(large)} uses {name}, which grows with width, for an unknown purpose: give its role, "
                f"parametrize(..., kinds={{{name!r}: 'hidden'}})"
            )

    def _twin_input(self, large: fx.Node, node: fx.Node) -> fx.Node:
        return self._twins[large].all_input_nodes[large.all_input_nodes.index(node)]

    def _layer(self, large: fx.Node, weight: Info, kind: str, widths: tuple[int, int], given: Iterable[Info]) -> Info:
        """The output of a weight's use."""
        name = weight.weight or ""
        parameter = self._parameters[name]
        moving = [info for info in given if info.source is not None or info.lost is not None]
        layer = self._layer_name(large, name, parameter)
        is_zero = not parameter.is_meta and not bool(parameter.any())
        if len(moving) > 1 or is_zero:
            moving = [self._settle(info, "zero" if is_zero else "linear", large) for info in moving]
        info = self._sum(large, moving)
        if info.lost is not None and name not in self._roles:
            raise program.TracingError(
                f"The graph can't be read: {layer} takes its input from {info.lost}. Change the model's code at this "
                f"place, or give the weight's role, parametrize(..., kinds={{{name!r}: {kind!r}}})"
            )
        growth = weight.growth + (0.0 if info.layer is not None else info.growth)
        self._settle(info, "linear", large)
        if not parameter.requires_grad or kind == "vector":
            return Info(info.source, growth=growth)
        if kind != "fixed":
            kind = self.uses.setdefault(layer, LayerUse(name, kind, widths)).kind
        count = self._counts[layer] = self._counts.get(layer, 0) + 1
        unique = layer if count == 1 else f"{layer}#{count}"
        shares = layer if count > 1 and kind != "fixed" else None
        self.nodes.append(Node(unique, kind, () if info.source is None else (info.source,), shares=shares))
        return Info(unique, layer=None if kind == "fixed" else layer, growth=growth)

    def _layer_name(self, large: fx.Node, name: str, parameter: nn.Parameter) -> str:
        """The name of the running module that owns a weight, else the weight's own name."""
        for path in reversed(program.stack_of(large)):
            held = dict(self._modules[path].named_parameters(recurse=False)) if path in self._modules else {}
            for key, each in held.items():
                if each is parameter:
                    owner = self._plain[path]
                    self._running.add(owner)
                    return owner if key == "weight" else f"{owner}.{key}".lstrip(".")
        owner, _, key = name.rpartition(".")
        if key != "weight":
            return name
        return f"{name}.{ops.name_of(large)}" if owner in self._running else owner

    def _find_modules(self) -> None:
        """Name the modules whose outputs are those of their weights."""
        names = {shown: path for path, shown in self._plain.items()}
        outputs: dict[str, list[Info]] = {}
        for node, info in self._infos.items():
            users = [set(program.stack_of(user)) for user in node.users]
            outside = {path for path in program.stack_of(node) if any(path not in each for each in users)}
            for path in outside:
                outputs.setdefault(path, []).append(info)
        for layer, use in self.uses.items():
            infos = outputs.get(names.get(layer, ""), []) if layer in names else []
            if infos and all(info.layer == layer for info in infos):
                use.module = layer

    # Helpers

    def _settle(self, info: Info, taker: str, large: fx.Node) -> Info:
        """Attribute a value's factor to the layer it comes from, if it comes straight from one."""
        if info.layer is None:
            return info
        use = self.uses[info.layer]
        use.takers.add(taker)
        if not any(abs(info.growth - growth) < FLAT for growth in use.own):
            use.own[info.growth] = ops.place_of(large)
        return info._replace(layer=None, growth=0.0)

    def _partners(self, moving: list[Info]) -> None:
        layers = {info.layer for info in moving if info.layer is not None}
        for layer in layers:
            self.uses[layer].partners |= layers - {layer}

    def _unattributed(self, info: Info, large: fx.Node) -> str | None:
        """The reason for which a factor belongs to no layer; None for scores, which only get a warning."""
        if info.heads is None:
            return (
                f"{ops.place_of(large)}, behind a factor that depends on the width (times {math.exp(info.growth):.3g} "
                "from the smaller model to the larger) and belongs to no layer before or after it"
            )
        place, small, size = info.heads
        if info.growth > 0.05:
            self.warnings.append(
                f"{place}: the heads grow with width, from {small} to {size}, and the scores are not divided by as "
                f"much: where queries and keys align, scores grow {math.exp(info.growth):.3g} times. Scale them by 1 / "
                "head dimension."
            )
        return None

    def _join(self, large: fx.Node, infos: Iterable[Info]) -> str | None:
        sources = tuple(dict.fromkeys(info.source for info in infos if info.source is not None))
        if len(sources) < 2:
            return sources[0] if sources else None
        key = tuple(sorted(sources))
        if key not in self._junctions:
            self._junctions[key] = f"{large.name}+{len(self._junctions)}"
            self.nodes.append(Node(self._junctions[key], "junction", sources))
        return self._junctions[key]


def _role_of(small: tuple[int, ...], large: tuple[int, ...], given: str | None) -> tuple[str, tuple[int, int]]:
    """Role and n in both models, from (inputs, outputs) in both."""
    grows = large[0] > small[0], large[1] > small[1]
    role = {(True, True): "hidden", (True, False): "readout", (False, True): "embedding"}.get(grows, "fixed")
    side = 1 if (given or role) == "embedding" else 0
    return given or role, (small[side], large[side])


def widths_by_size(role: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, int]:
    """N in both models: the size that grows, for hidden layers the last one, as PyTorch has inputs last."""
    pairs = [pair for pair in zip(*shapes, strict=True) if pair[0] < pair[1]]
    pairs = pairs[-1:] if role == "hidden" else pairs
    return math.prod(one for one, _ in pairs), math.prod(other for _, other in pairs)


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()) for each in values)


def _log_ratio(small: Any, large: Any) -> float:
    """Logarithm of the ratio of two constants that are uniform, or proportional to each other."""
    one, other = (torch.as_tensor(value, device="cpu").double().abs() for value in (small, large))
    means = [float(each.mean()) if each.numel() else math.nan for each in (one, other)]
    if not all(math.isfinite(mean) and mean > 0 for mean in means):
        return 0.0
    scaled = [each / mean for each, mean in zip((one, other), means, strict=True)]
    uniform = all(float((each - 1).abs().max()) < 1e-5 for each in scaled)
    alike = one.shape == other.shape and float((scaled[0] - scaled[1]).abs().max()) < 1e-5
    return math.log(means[1] / means[0]) if uniform or alike else 0.0

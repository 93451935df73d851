"""What the weights are used for that operations sum over, and the layers that they make."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.model.names import named_parameters
from ignite_monitor.scaling.graph import PRESETS, Node
from ignite_monitor.scaling.labels import CONSTANT, Label, Labels, TracingError
from ignite_monitor.scaling.module import norm_of
from ignite_monitor.scaling.operations import Fans, Operation, fans, summed_over

_ADDING = {"addmm", "addmv", "addbmm", "baddbmm"}


@dataclass
class WeightUse:
    """What a weight that is trained is used for."""

    weight: str
    module: str | None  # the one that it is the weight of, None where no module that runs has it
    kind: str  # "embedding", "hidden" or "readout"
    widths: tuple[int, int]  # n in the smaller and in the larger model
    is_module: bool = False  # whether the module's output is the layer's, so that it can be multiplied


class WeightUses(Labels):
    """The layers that a trace finds: uses of weights, and modules that are layers.

    Args:
        with_weights: whether every weight that is used outside of such a module is a layer, too.
        small: the trace of the smaller model; without it all weights are taken to be of a fixed size.

    Attributes:
        uses: layer -> :class:`WeightUse`.
        touched: the parameters that any operation has taken.
        unknown: parameter -> an operation that takes it for something that is not known.
    """

    def __init__(self, model: nn.Module, with_weights: bool, small: WeightUses | None) -> None:
        super().__init__(small)
        self.uses: dict[str, WeightUse] = {}
        self.touched: set[str] = set()
        self.unknown: dict[str, str] = {}
        self._with_weights = with_weights
        self._small: WeightUses | None = small
        self._fans: dict[str, Fans] = {}
        self._owners: dict[str, str | None] = {}
        self._taken_out = CONSTANT
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter, _ in named_parameters(model):
            self._parameters[name] = parameter
            self._put(parameter, Label(weight=name) if parameter.ndim > 1 else CONSTANT)

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
            side = 1 if kind == "embedding" else 0
            use = WeightUse(name, module, kind, (small[side], sizes[side]))
            kind = self.uses.setdefault(layer, use).kind
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

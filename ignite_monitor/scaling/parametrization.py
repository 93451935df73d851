"""A model whose initial weights, multipliers and learning rates are powers of its width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_real, check_type
from ignite_monitor.model.sampling import fnv1a_64
from ignite_monitor.monitor.ranks import from_every_rank
from ignite_monitor.scaling.graph import LAYER_TYPES, Alignment, LayerGraph, as_alignment, tied
from ignite_monitor.scaling.layers import FoundLayers, ParametrizedLayer, as_node, found_by_hand
from ignite_monitor.scaling.module import multiplier_of, set_norm
from ignite_monitor.scaling.solver import Solution, check_optimizer_type, solve

T = TypeVar("T")


class Parametrization:
    r"""Initialises a model and gives it multipliers and learning rates that are powers of its width.

    A layer of width n (arXiv:2407.05872) multiplies its output by :math:`n^{-a}`, starts from weights of standard
    deviation ``std_prefactor`` :math:`\cdot\, n^{-b}` and zero biases, and learns at ``lr_prefactor``
    :math:`\cdot\, n^{-c}`. (a, b) are those of muP if nothing else is given (:data:`PRESETS`); c are the smallest with
    which nothing grows with width (:func:`ignite_monitor.scaling.solve`). Biases have exponents of their own, with
    which they move the layer's output at the rate of the whole layer. Parameters outside of the layers (norms, position
    embeddings) keep their values and learn at ``lr_prefactor``.

    A checkpoint holds no multipliers: make the parametrization first, and load the weights into the model then.

    Overrides are mappings, in which a layer is looked up by its name, then by the last part of its name, then by its
    type. They prevail over what a :class:`ParametrizedModule` says, and that over the defaults.

    Args:
        model: the model, in which the layers are ParametrizedModules. Weights are drawn anew, but those that are frozen
            or zero, from a seed that is taken from torch's default generator; of several ranks, each of which has to
            make its own, from that of rank 0.
        optimizer_type: "adam" for Adam, AdamW and others that change each weight by as much, whatever the sizes of the
            gradient and of the layer; or "sgd". Muon is neither.
        alignment: "full", "no", or (alpha, omega, u) for all layers.
        lr_prefactor: the learning rate at width 1.
        std_prefactor: the weights' standard deviation at width 1.
        ab_overrides: (a, b).
        c_overrides: exponents of learning rates that are not to be solved for.
        alignment_overrides: alignments, as for ``alignment``.
        sample_input: an input, a tuple of arguments or a dict of keyword arguments for the model, with which the graph
            of layers is traced; None for a chain in the order of the modules.
        feature_learning: whether the readouts' inputs have to change by as much at any width.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, an override fits no layer, or there is no solution.
        RuntimeError: if the graph can't be traced.

    Attributes:
        model: the model.
        optimizer_type: as given.
        lr_prefactor: as given; :attr:`param_groups` are made with it.
        layers: name -> :class:`ParametrizedLayer`.
        graph: the :class:`LayerGraph`.
        alignment: name -> :class:`Alignment`, as the solution supposed it.
        solution: the :class:`Solution`.

    Examples:
        .. code-block:: python

            parametrization = Parametrization(model, lr_prefactor=0.01, sample_input=torch.zeros(1, 64))
            optimizer = torch.optim.Adam(parametrization.param_groups)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer_type: str = "adam",
        alignment: str | tuple[float, float, float] = "full",
        lr_prefactor: float = 1e-3,
        std_prefactor: float = 1.0,
        ab_overrides: Mapping[str, tuple[float, float]] | None = None,
        c_overrides: Mapping[str, float] | None = None,
        alignment_overrides: Mapping[str, Any] | None = None,
        sample_input: Any = None,
        feature_learning: bool = False,
    ) -> None:
        check_type("model", model, nn.Module, "torch.nn.Module")
        self.model = model
        self.optimizer_type = check_optimizer_type(optimizer_type)
        self.lr_prefactor = check_real("lr_prefactor", lr_prefactor, above=0.0)
        std_prefactor = check_real("std_prefactor", std_prefactor, above=0.0)
        self.feature_learning = feature_learning
        default = as_alignment("alignment", alignment)

        found = sample_input if isinstance(sample_input, FoundLayers) else found_by_hand(model, sample_input)
        types = {name: layer.layer_type for name, layer in found.layers.items()}
        ab = _overridden("ab_overrides", ab_overrides, types, _check_ab)
        c = _overridden("c_overrides", c_overrides, types, check_real)
        alignments = _overridden("alignment_overrides", alignment_overrides, types, as_alignment)
        self.alignment: dict[str, Alignment] = {name: alignments.get(name, default) for name in types}
        layers = {name: replace(layer, c=c.get(name, layer.c)) for name, layer in found.layers.items()}
        layers |= {name: replace(layers[name], a=a, b=b, from_zero=False) for name, (a, b) in ab.items()}
        nodes = [as_node(layers[node.layer], node) if node.layer in layers else node for node in found.nodes]
        self.graph = tied(LayerGraph(nodes), {name: layer.weights.values() for name, layer in layers.items()})
        self.solution = self.solve()
        self.layers = self._solved(layers, std_prefactor)
        self._initialise()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups for an optimizer: of each layer its weights, and its biases, and all other parameters.

        They are those that the model has now: where ``fully_shard`` replaces them, take the groups afterwards.

        Each has "params", "lr", "layer_name" ("_other" for the last), "fan_in", "c", and "bias", whether it is of
        biases: ``lr = lr_prefactor * fan_in ** -c``.
        """
        groups = []
        taken: set[int] = set()
        for layer in self.layers.values():
            if layer.c is None:
                continue
            for bias, held in ((False, layer.weights), (True, layer.biases)):
                params = [parameter for parameter in held.values() if id(parameter) not in taken]
                taken |= {id(parameter) for parameter in params}
                groups.append(self._group(layer.name, params, layer.fan_in, bias))
        rest = [parameter for parameter in self.model.parameters() if id(parameter) not in taken]
        return [group for group in (*groups, self._group("_other", rest, 1, False)) if group["params"]]

    def exponent(self, layer_name: str, *, bias: bool = False, solution: Solution | None = None) -> float:
        """The learning-rate exponent of one of the :attr:`param_groups`.

        Args:
            layer_name: the group's "layer_name".
            bias: the group's "bias".
            solution: what :meth:`solve` returned; None for the one the parametrization was made with.

        Raises:
            KeyError: if there is no such layer, or it has no weights.
        """
        if layer_name == "_other":
            return 0.0
        solution = solution or self.solution
        return solution.bias_c[layer_name] if bias else solution.c[self.graph[layer_name].layer]

    def solve(self, alignment: Mapping[str, Any] | None = None) -> Solution:
        """The exponents for other alignments; nothing is changed by it.

        Args:
            alignment: name -> alignment; layers that are not in it keep theirs.

        Raises:
            ValueError: if there is no solution, or a layer is not known.
        """
        unknown = sorted(set(alignment or ()) - set(self.alignment))
        if unknown:
            raise ValueError(f"Argument alignment should name layers, but given {unknown}")
        return solve(
            self.graph,
            self.alignment | dict(alignment or {}),
            optimizer_type=self.optimizer_type,
            feature_learning=self.feature_learning,
        )

    def _group(self, name: str, params: list[nn.Parameter], fan_in: int, bias: bool) -> dict[str, Any]:
        c = self.exponent(name, bias=bias)
        lr = self.lr_prefactor * fan_in**-c
        return {"params": params, "lr": lr, "layer_name": name, "fan_in": fan_in, "c": c, "bias": bias}

    def _solved(self, given: Mapping[str, ParametrizedLayer], std_prefactor: float) -> dict[str, ParametrizedLayer]:
        base = from_every_rank(int(torch.randint(2**62, (), device="cpu")))[0]
        seeds: dict[int, int] = {}
        layers: dict[str, ParametrizedLayer] = {}
        for name, layer in given.items():
            node = self.graph[name]
            for key, weight in layer.weights.items():
                seeds.setdefault(id(weight), (base ^ fnv1a_64(f"{name}.{key}")) >> 1)
            drawn = {} if layer.from_zero else {key: each for key, each in layer.weights.items() if _is_drawn(each)}
            layers[name] = replace(
                layer,
                a=node.a,
                b=node.b,
                c=self.solution.c.get(node.layer),
                std=std_prefactor * layer.fan_in**-node.b,
                seeds={key: seeds[id(weight)] for key, weight in drawn.items()},
            )
        for name, layer in layers.items():
            shared = layers.get(self.graph[name].layer, layer)
            if (shared.std, shared.fan_in) != (layer.std, layer.fan_in):
                bare = next((each.name for each in (shared, layer) if not each.multiplies), None)
                advice = (
                    f". What {bare} gives can't be multiplied, as no module gives it: compute it in a module, as an "
                    "nn.Linear whose weight is the same parameter"
                )
                raise ValueError(
                    f"Layers {shared.name} and {name} share their weights, so both should have the same width and b, "
                    f"but they have {shared.fan_in} and {layer.fan_in}, and {shared.b:g} and {layer.b:g}"
                    + ("" if bare is None else advice)
                )
        return layers

    @torch.no_grad()
    def _initialise(self) -> None:
        for layer in self.layers.values():
            for key, weight in layer.weights.items():
                weight.copy_(layer.initial_weight(key))
                set_norm(layer.module, key)
            for bias in layer.zeroed_biases.values():
                bias.zero_()
            start = 0.5 - layer.a - layer.b if layer.layer_type == "readout" and layer.seeds else 0.0
            hook = layer.hook
            if hook is not None and (layer.multiplies or start or layer.drift):
                if multiplier_of(layer.module) is None:
                    layer.module.register_forward_hook(hook)
                hook.value = float(layer.fan_in) ** -(layer.a + layer.own) if layer.multiplies else 1.0
                hook.start, hook.drift = start, layer.drift
                if self.optimizer_type == "adam" and layer.layer_type != "embedding" and layer.c is not None:
                    hook.rate = layer.a + layer.c


def _is_drawn(weight: Tensor) -> bool:
    """Whether a weight is drawn anew: neither frozen nor, on purpose, zero."""
    return weight.requires_grad and (weight.is_meta or bool(weight.any()))


def _check_ab(name: str, value: object) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"Argument {name} should be two numbers (a, b), but given {value!r}")
    return check_real(name, value[0]), check_real(name, value[1])


def _overridden(
    name: str, overrides: Mapping[str, Any] | None, types: Mapping[str, str], check: Callable[[str, Any], T]
) -> dict[str, T]:
    """What the overrides say of the layers, by the layers' names.

    Args:
        check: makes of (name, value) a value, or raises.

    Raises:
        TypeError: if they are no mapping, or a value is of another type.
        ValueError: if a key fits no layer, or a value can't be.
    """
    if overrides is None:
        return {}
    check_type(name, overrides, Mapping, "Mapping or None")
    checked = {key: check(f"{name}[{key!r}]", value) for key, value in overrides.items()}
    found: dict[str, T] = {}
    used = set(LAYER_TYPES)  # a preset has them all, whatever the model
    for layer, kind in types.items():
        keys = [key for key in (layer, layer.rpartition(".")[2], kind) if key in checked]
        used.update(keys)
        if keys:
            found[layer] = checked[keys[0]]
    if unknown := sorted(map(str, set(checked) - used)):
        raise ValueError(f"Argument {name} should name layers of the model or layer types, but given {unknown}")
    return found

"""A model whose initial weights, multipliers and learning rates are powers of its width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ignite_monitor.model._torch import DispatchMode, pytree
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.monitor.ranks import from_every_rank
from ignite_monitor.scaling.solver import Alignment, LayerGraph, Solution, solve


class ParametrizedLayer(NamedTuple):
    """One layer of a :class:`Parametrization`, of width n."""

    name: str  # its name in the model
    layer_type: str  # "embedding", "hidden" or "readout"
    fan_in: int  # n: the fan-in, for an embedding the number of its outputs
    a: float  # exponent of the multiplier
    b: float  # exponent of the initial standard deviation
    c: float  # exponent of the learning rate, as solved for when the parametrization was made
    weight: str  # name of its parameter
    biases: tuple[str, ...]  # names of its other parameters
    module: str | None  # name of the module whose output is the layer's output; None if there is none
    multiplier: float  # factor by which a forward hook multiplies the output; 1.0 without a hook
    std: float | None  # standard deviation of the initial weights; None if they were kept


@dataclass(eq=False)
class Parametrization:
    """A model with initial weights, multipliers and learning rates that follow its width, made by :func:`parametrize`.

    A checkpoint holds no multipliers: call :func:`parametrize` first, and load the weights into its model then.

    Attributes:
        model: the model.
        layers: name -> :class:`ParametrizedLayer`, in the order of the forward pass.
        graph: the :class:`LayerGraph`.
        alignment: name -> :class:`Alignment` that the solution assumes.
        solution: the :class:`Solution`.
        optimizer_type: as given.
        lr_prefactor: as given; :attr:`param_groups` are made with it.
        weight_decay: as given.
    """

    model: nn.Module
    layers: dict[str, ParametrizedLayer]
    graph: LayerGraph
    alignment: dict[str, Alignment]
    solution: Solution
    optimizer_type: str
    lr_prefactor: float
    weight_decay: float | None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups for an optimizer: for each layer its weight and its biases, and all other parameters.

        With ``optimizer_type="muon"`` they are those for AdamW, without :attr:`muon_groups`. They hold the parameters
        that the model has now: with ``fully_shard``, take the groups afterwards.

        Keys are "params", "lr", "layer_name" ("_other" for the last), "fan_in", "c", and "bias", True for biases:
        ``lr = lr_prefactor * fan_in ** -c``. With ``weight_decay``, "weight_decay" is
        ``weight_decay * fan_in ** c``, so that its product with "lr" is the same in all groups, at every width.
        """
        return self._groups(muon=False)

    @property
    def muon_groups(self) -> list[dict[str, Any]]:
        """The groups for ``torch.optim.Muon``: hidden weights of two dimensions, if ``optimizer_type="muon"``."""
        return self._groups(muon=True)

    def exponent(self, layer_name: str, *, bias: bool = False, solution: Solution | None = None) -> float:
        """The learning-rate exponent of the group with this "layer_name" and "bias".

        Args:
            layer_name: the group's "layer_name".
            bias: the group's "bias".
            solution: what :meth:`solve` returned; None for :attr:`solution`.
        """
        if layer_name == "_other":
            return 0.0
        solution = solution or self.solution
        return solution.bias_c[layer_name] if bias else solution.c[self.graph[layer_name].layer]

    def solve(self, alignment: Mapping[str, Any] | None = None) -> Solution:
        """Solve for the exponents of other alignments; nothing is changed.

        Args:
            alignment: name -> alignment; other layers keep theirs.

        Raises:
            ValueError: if there is no solution, or a layer is unknown.
        """
        if unknown := sorted(set(alignment or ()) - set(self.alignment)):
            raise ValueError(f"Argument alignment should name layers, but given {unknown}")
        return solve(self.graph, self.alignment | dict(alignment or {}), optimizer_type=self.optimizer_type)

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        left = {name: parameter for name, parameter, _ in named_parameters(self.model)}
        parts = [(layer, layer.name, bias) for layer in self.layers.values() for bias in (False, True)]
        groups = []
        for layer, name, bias in [*parts, (None, "_other", False)]:
            names = list(left) if layer is None else layer.biases if bias else [layer.weight]
            params = [left.pop(item) for item in names if item in left]  # tied weights belong to the first layer
            is_muon = layer is not None and not bias and self.graph[name].update is not None
            if not params or is_muon is not muon:
                continue
            fan_in, c = 1 if layer is None else layer.fan_in, self.exponent(name, bias=bias)
            lr = self.lr_prefactor * fan_in**-c
            group = {"params": params, "lr": lr, "layer_name": name, "fan_in": fan_in, "c": c, "bias": bias}
            decay = {} if self.weight_decay is None else {"weight_decay": self.weight_decay * fan_in**c}
            groups.append(group | decay)
        return groups


class Multiplier:
    """A forward hook that multiplies a module's output; it is copied and pickled with the module."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * self.value


class RandomTensors(DispatchMode):
    """Records, while tensors are made, which of them hold random numbers, or what was computed from these."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}  # while such a reference lives, its number is not reused

    def __contains__(self, tensor: Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()).cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = func.overloadpacket.__name__ == "copy_"
        sources = pytree.tree_leaves((args[is_copy:], kwargs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags or any(
            isinstance(source, Tensor) and source in self for source in sources
        )
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self._storages.pop(reference.cdata, None)
                if is_random:
                    self._storages[reference.cdata] = reference
        return result


def is_zero(parameter: Tensor) -> bool:
    """True for a weight whose values are known, and 0."""
    return not parameter.is_meta and not bool(parameter.any())


@torch.no_grad()
def initialize_weights(model: nn.Module, layers: Mapping[str, ParametrizedLayer]) -> None:
    """Set the initial weights, the same on every rank and device, and zero biases, and add multipliers."""
    seed = from_every_rank(int(torch.randint(2**62, (), device="cpu")))[0]
    generator = torch.Generator("cpu").manual_seed(seed)
    parameters = {name: parameter for name, parameter, _ in named_parameters(model)}
    modules = dict(named_modules(model))
    for layer in layers.values():
        module: Any = None if layer.module is None else modules[layer.module]
        if layer.std is not None:
            weight = parameters[layer.weight]
            values = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
            values.normal_(0.0, layer.std, generator=generator)
            if getattr(module, "padding_idx", None) is not None:
                values[module.padding_idx] = 0.0
            weight.copy_(values)
        for name in layer.biases:
            if "bias" in name.rpartition(".")[2] and parameters[name].requires_grad:
                parameters[name].zero_()
        if layer.multiplier != 1.0:
            module.register_forward_hook(Multiplier(layer.multiplier))

"""A model whose initial weights, multipliers and learning rates are powers of its width."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ignite_monitor.model._torch import DispatchMode, pytree
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.scaling.operations import LIKE
from ignite_monitor.scaling.solver import Alignment, Node, ParametrizedLayer, Solution, solve


@dataclass(eq=False)
class Parametrization:
    """A model with initial weights, multipliers and learning rates that follow its width, made by :func:`parametrize`.

    A checkpoint holds no multipliers: call :func:`parametrize` first, and load the weights into its model then.

    Attributes:
        model: the model.
        layers: name -> layer, in the order of the forward pass: ``role``, ``width``, ``a``, ``b``, ``c``, ...
        graph: name -> node of the graph of layers.
        solution: the exponents under full alignment; ``c`` is a mapping from layers, ``{layer}.bias`` for biases.
        c_overrides: weight -> given exponent of its learning rate.
        optimizer_type: as given.
        lr_prefactor: as given; :attr:`param_groups` are made with it.
        weight_decay: as given.
    """

    model: nn.Module
    layers: dict[str, ParametrizedLayer]
    graph: dict[str, Node]
    solution: Solution
    c_overrides: dict[str, float]
    optimizer_type: str
    lr_prefactor: float
    weight_decay: float | None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups for an optimizer: for each layer its weight and its biases, and all other parameters.

        With ``optimizer_type="muon"`` they are those for AdamW, without :attr:`muon_groups`. They hold the parameters
        that the model has now: with ``fully_shard``, take the groups afterwards.

        Keys are "params", "lr", "layer_name" ("_other" for the last), "width", "c", and "bias", True for biases:
        ``lr = lr_prefactor * width ** -c``. With ``weight_decay``, "weight_decay" is
        ``weight_decay * width ** c``, so that its product with "lr" is the same in all groups, at every width.
        """
        return self._groups(muon=False)

    @property
    def muon_groups(self) -> list[dict[str, Any]]:
        """The groups for ``torch.optim.Muon``: hidden weights of two dimensions, if ``optimizer_type="muon"``."""
        return self._groups(muon=True)

    def solve(self, alignment: Mapping[str, Alignment]) -> Solution:
        """Return the exponents that solve the graph with an alignment.

        Args:
            alignment: layer -> (alpha, omega, u); other layers are fully aligned.
        """
        return solve(self.graph, alignment, self.c_overrides, sgd=self.optimizer_type == "sgd")

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        left = {name: parameter for name, parameter, _ in named_parameters(self.model)}
        groups = []
        for layer, bias in [*itertools.product(self.layers.values(), (False, True)), (None, False)]:
            names = list(left) if layer is None else layer.biases if bias else [layer.weight]
            params = [left.pop(item) for item in names if item in left]  # tied weights belong to the first layer
            is_muon = layer is not None and not bias and layer.muon_update is not None
            if not params or is_muon is not muon:
                continue
            name, width = ("_other", 1) if layer is None else (layer.name, layer.width)
            c = self.solution.c.get(f"{name}{'.bias' * bias}", 0.0)
            lr = self.lr_prefactor * width**-c
            group = {"params": params, "lr": lr, "layer_name": name, "width": width, "c": c, "bias": bias}
            decay = {} if self.weight_decay is None else {"weight_decay": self.weight_decay * width**c}
            groups.append(group | decay)
        return groups


class Multiplier:
    """A forward hook that multiplies a module's output; it is copied and pickled with the module."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * self.value


class RandomTensors(DispatchMode):
    """Records, while tensors are made, which of them hold random values, or values computed from these."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}  # while such a reference lives, its number is not reused

    def __contains__(self, tensor: Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()).cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_overwritten = name in ("copy_", "fill_", "zero_") and args[0].nbytes == args[0].untyped_storage().nbytes()
        sources = [] if name in LIKE else pytree.tree_leaves(args[is_overwritten:])  # not what is written to as "out"
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
    seed = [int(torch.randint(2**62, (), device="cpu"))]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(seed)
    generator = torch.Generator("cpu").manual_seed(seed[0])
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

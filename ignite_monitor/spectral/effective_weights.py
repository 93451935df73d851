"""The weights that a model's modules compute with: as matrices, stacks of matrices or tables, made of which parameters.

What a parameter is decides. The weight of a convolution is flattened. A parameter of three and more dimensions that
belongs to no convolution holds one matrix after the other (the experts of a mixture); with leading dimensions of size
1 it is a table, as position tables of shape (1, L, d) are, or a vector, as class tokens of shape (1, 1, d). Where a
module computes its weight of others (a parametrization, weight or spectral normalisation, LoRA), the result acts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ignite_monitor.model._torch import hooks_before_forward, modules_in, parameters_in
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.linear_maps import CONVOLUTIONS, TRANSPOSED, is_conv1d
from ignite_monitor.model.names import named_modules
from ignite_monitor.model.norms import is_sharded
from ignite_monitor.model.samples import is_measurable
from ignite_monitor.reference.isolation import put_back
from ignite_monitor.reference.rng import preserved_rng_state
from ignite_monitor.spectral.matrices import work_dtype

MATRIX, STACK, TABLE = "matrix", "stack", "table"

_TABLE_NAMES = re.compile("embed|token|table|position|pos_")


class EffectiveWeight(NamedTuple):
    """A weight as it acts."""

    name: str  # the parameter's, without wrappers, or that of what is computed, such as ``layer.weight``
    parameters: tuple[Tensor, ...]  # what it is made of
    shape: torch.Size
    value: Callable[[], Tensor]  # gives the weight; to be called under ``no_grad``
    kind: str = MATRIX  # or ``STACK`` of matrices along all dimensions but the last two, or ``TABLE``
    by_input: bool = False  # whether the first dimension of a matrix is what goes in
    groups: int = 0  # how many, where the shape is (in, out / groups, k…)


class Weight(NamedTuple):
    """One weight as a matrix."""

    name: str  # the parameter's
    local: Tensor  # what this rank holds of it, of shape (rows, in·k…)
    rows: int  # how many there are on all ranks
    groups: tuple[Any, ...]  # of processes, over whose ranks the rows are shared out; none where they are all here
    scale: float  # sqrt(out / in); NaN for a table, which maps nothing

    def less(self, before: Tensor) -> Weight:
        """What has been added to what this rank held of it before, which is used up."""
        if before.dtype != work_dtype(before.dtype):
            before = before.to(work_dtype(before.dtype))
        return self._replace(local=torch.sub(self.local, before, out=before))


def effective_weights(model: nn.Module) -> Iterator[EffectiveWeight]:
    """All weights that are matrices or hold some, each once; complex ones are left out."""
    modules = list(named_modules(model))
    computed = {path: list(_computed(module)) for path, module in modules}
    known = {id(parameter) for each in computed.values() for weight in each for parameter in weight.parameters}
    for path, module in modules:
        for weight in computed[path]:
            owner = getattr(module, "base_layer", module)
            yield from _described(path, owner, weight)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in known:
                known.add(id(parameter))
                itself = EffectiveWeight(name, (parameter,), parameter.shape, parameter.detach)
                yield from _described(path, module, itself)


def as_weights(acting: EffectiveWeight, whole: bool) -> list[Weight]:
    """A weight as matrices: one, or those of a stack, called ``{name}/{i}``.

    Where a DTensor's rows are shared out, each rank keeps its own; placed in any other way it is gathered, as it is
    where all of it is needed.
    """
    value: Any = acting.value()
    local = value
    groups: tuple[Any, ...] = ()
    if is_sharded(value):
        whole = whole or acting.kind != MATRIX or bool(acting.groups)
        sharded = [i for i, placement in enumerate(value.placements) if not placement.is_replicate()]
        if all(value.placements[i].is_shard(0) for i in sharded) and not (whole and sharded):
            groups = tuple(value.device_mesh.get_group(i) for i in sharded)
            local = value.to_local()
        else:
            value = local = value.full_tensor()
    if acting.kind == STACK:
        stack = value.flatten(0, -3)
        scale = math.sqrt(stack.shape[2] / stack.shape[1] if acting.by_input else stack.shape[1] / stack.shape[2])
        return [Weight(f"{acting.name}/{i}", each, len(each), (), scale) for i, each in enumerate(stack)]
    if acting.groups:
        value = local = local.unflatten(0, (acting.groups, -1)).transpose(1, 2).flatten(0, 1)
    rows = value.numel() // value.shape[-1] if acting.kind == TABLE else len(value)
    columns = value.numel() // rows
    scale = math.sqrt(columns / rows if acting.by_input else rows / columns)
    return [Weight(acting.name, local.reshape(-1, columns), rows, groups, math.nan if acting.kind == TABLE else scale)]


def _described(path: str, module: nn.Module, weight: EffectiveWeight) -> Iterator[EffectiveWeight]:
    if not all(is_measurable(each) and not each.is_complex() for each in weight.parameters):
        return
    if weight.name.endswith("bias"):  # stacked experts have one vector each
        return
    shape, is_own = weight.shape, weight.name == "weight"
    kind, by_input, groups = MATRIX, False, 0
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        kind = TABLE
    elif isinstance(module, TRANSPOSED) and is_own:
        groups = module.groups
    elif is_conv1d(module) and is_own:
        by_input = True
    elif not (isinstance(module, CONVOLUTIONS) and is_own):
        leading = next((i for i, size in enumerate(shape) if size != 1), len(shape)) if len(shape) > 2 else 0
        shape = shape[leading:]
        if leading or (len(shape) == 2 and not is_own and _TABLE_NAMES.search(weight.name)):
            kind = TABLE
        elif len(shape) > 2:
            kind, by_input = STACK, _is_stacked_by_input(module, weight.name, shape)
    if len(shape) >= 2 and shape.numel():
        name = f"{path}.{weight.name}".lstrip(".")
        yield weight._replace(name=name, kind=kind, by_input=by_input, groups=groups)


def _is_stacked_by_input(module: nn.Module, name: str, shape: torch.Size) -> bool:
    """Whether matrices of shape (in, out) are stacked: as the bias beside them, or the module itself, says."""
    rows, columns = shape[-2:]
    for bias_name in {f"{name}_bias", name.replace("weight", "bias")} - {name}:
        bias = parameters_in(module).get(bias_name)
        if bias is not None and rows != columns and bias.shape[-1] in (rows, columns):
            return bias.shape[-1] == columns
    return bool(getattr(module, "is_transposed", False))


def _computed(module: nn.Module) -> Iterator[EffectiveWeight]:
    """The weights that a module computes of its parameters, by their names in it; scripted ones are as they are."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    parametrizations = modules_in(module).get("parametrizations")
    if isinstance(parametrizations, nn.ModuleDict):
        for name, recipe in parametrizations.items():
            make = partial(_parametrized, recipe)
            yield EffectiveWeight(name, tuple(recipe.parameters()), make().shape, make)
    of: Any = parameters_in(module)
    for hook in hooks_before_forward(module):
        name = getattr(hook, "name", "")
        if isinstance(hook, WeightNorm):
            parts = of[f"{name}_g"], of[f"{name}_v"]
            yield EffectiveWeight(name, parts, parts[1].shape, partial(hook.compute_weight, module))
        elif isinstance(hook, SpectralNorm):
            original = of[f"{name}_orig"]
            yield EffectiveWeight(name, (original,), original.shape, partial(hook.compute_weight, module, False))
    yield from _low_rank(module)


def _parametrized(recipe: nn.Module) -> Tensor:
    """What a parametrization makes in eval mode, of copies of its buffers: it may change them, and draw numbers."""
    buffers = {name: buffer.clone() for name, buffer in recipe.named_buffers()}
    modules = list(recipe.modules())
    with put_back(modules, []), preserved_rng_state({device_of(recipe)}):
        for module in modules:
            module.training = False
        weight: Tensor = functional_call(recipe, buffers, ())
    return weight


def _low_rank(module: nn.Module) -> Iterator[EffectiveWeight]:
    """LoRA as PEFT keeps it: base_layer.weight + scaling · B A of the active adapters, where that is all there is."""
    base, down, up = (modules_in(module).get(name) for name in ("base_layer", "lora_A", "lora_B"))
    weight = None if base is None else parameters_in(base).get("weight")
    scaling = getattr(module, "scaling", None)
    if not isinstance(down, nn.ModuleDict) or not isinstance(up, nn.ModuleDict) or weight is None:
        return
    matrices: dict[nn.Module, Tensor] = {
        each: each.weight for each in [*down.values(), *up.values()] if isinstance(each, nn.Linear)
    }
    if not isinstance(scaling, Mapping) or len(matrices) < len(down) + len(up):
        return
    if any(getattr(module, "use_dora", {}).values()) or not is_measurable(weight):
        return
    inactive = getattr(module, "merged", False) or getattr(module, "disable_adapters", False)
    active = [] if inactive else [each for each in getattr(module, "active_adapters", []) if each in down]

    def merged(weight: Tensor = weight) -> Tensor:
        total = weight
        for name in active:
            product = scaling[name] * (matrices[up[name]].float() @ matrices[down[name]].float())
            total = total + (product.T if getattr(module, "fan_in_fan_out", False) else product)
        return total

    yield EffectiveWeight("weight", (weight, *matrices.values()), weight.shape, merged)

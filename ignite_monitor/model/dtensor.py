"""DTensors: this rank's part, all elements, and sums over a mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn


def any_dtensor(tensors: Iterable[Tensor]) -> bool:
    """Return True if there is a DTensor among tensors."""
    # No DTensor exists before its module is imported, which takes a while.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(map(issubclass, set(map(type, tensors)), repeat(module.DTensor)))


def is_dtensor(tensor: Tensor) -> bool:
    """Return True for a DTensor: as :func:`any_dtensor`, in half the calls."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[no-any-return]


def whole_tensor(tensor: Any) -> Tensor:
    """A detached dense tensor of all elements; of a DTensor a collective, for which all ranks have to ask."""
    whole: Tensor = tensor.detach().full_tensor() if is_dtensor(tensor) else tensor.detach()
    return whole if whole.layout == torch.strided else whole.to_dense()


def without_partial_sums(tensor: Any) -> Any:
    """A DTensor, on all ranks of its mesh if its parts are to be added."""
    from torch.distributed.tensor import Replicate

    is_partial = any(placement.is_partial() for placement in tensor.placements)
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim) if is_partial else tensor


def local_elements(parameter: Any, elements: Tensor) -> Tensor:
    """Indices within this rank's part of a DTensor, from indices within the whole; other elements are dropped."""
    chunk = parameter.__create_chunk_list__()[0]  # what torch.distributed.checkpoint asks for: offset and size
    offsets, sizes, strides = torch.tensor(
        [chunk.offsets, chunk.sizes, torch.empty(chunk.sizes, device="meta").stride()], device="cpu"
    ).unsqueeze(-1)
    places = torch.stack(torch.unravel_index(elements, parameter.shape)) - offsets
    held = ((places >= 0) & (places < sizes)).all(0)
    at: Tensor = (places * strides).sum(0)[held]
    return at


def reshard(model: nn.Module) -> None:
    """Restore FSDP2's sharded parameters, which the optimizer holds, where a forward pass left unsharded ones."""
    modules: Iterable[Any] = (module for module in model.modules() if hasattr(module, "set_reshard_after_forward"))
    for module in modules:
        if not all(map(is_dtensor, module.parameters(recurse=False))):
            module.reshard()


def all_reduce(values: Tensor, largest: bool = False, group: Any = None) -> Tensor:
    """The sum of the tensors of a process group, or their maximum, element by element."""
    known = [backend.partition(":")[0] for backend in torch.distributed.get_backend_config(group).split(",")]
    # NCCL alone knows no tensors of the CPU, where FSDP2 may have offloaded parameters.
    device = values.device if values.device.type in known else torch.device(known[0])
    reduced = values.to(device).clone(memory_format=torch.contiguous_format)
    kind = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(reduced, kind, group=group)
    return reduced.to(values.device)

"""What the modules of a model return in its forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.capture.aside import aside
from ignite_monitor.capture.forward import after_forward
from ignite_monitor.capture.tensors import tagged_tensors


@contextlib.contextmanager
def outputs(
    modules: Mapping[nn.Module, str],
    root: nn.Module,
    wanted: Callable[[], bool],
    seen: Callable[[str, str, Tensor], None],
    ended: Callable[[], None],
) -> Iterator[None]:
    """While it lasts, hands on the floating-point tensors that modules return, each before anything can change it.

    Args:
        modules: the modules, and what they are called.
        root: the whole model.
        wanted: whether the forward pass that is going on counts.
        seen: is given a module's name, the place in its output, empty for a single tensor, and the tensor, detached;
            no mode sees what it does.
        ended: is called after each forward pass of the whole model.
    """
    function_modes, dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack

    def hand_on(name: str, output: Any) -> None:
        for place, tensor in tagged_tensors(output):
            seen(name, place, tensor.detach())

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not wanted():
            return
        name = modules.get(module)
        if name is not None:
            if function_modes() or dispatch_modes():
                with aside():
                    hand_on(name, output)
            elif type(output) is not Tensor:
                hand_on(name, output)
            elif output.is_floating_point():  # what nearly all return, without the detour
                seen(name, "", output.detach())
        if module is root:
            ended()

    with after_forward({**modules, root: ""}, hook):
        yield

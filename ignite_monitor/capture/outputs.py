"""What the modules of a model return in its forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.capture.aside import aside
from ignite_monitor.capture.forward import ModuleHook, outputs_to
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
        seen: is given a module's name, the place in its output, empty for a single tensor, and the tensor, under
            ``no_grad``; no mode sees what it does.
        ended: is called after each forward pass of the whole model.
    """
    names = {id(module): name for module, name in modules.items()}
    with outputs_to({**modules, root: ""}, _Outputs(names, id(root), wanted, seen, ended)):
        yield


class _Outputs(ModuleHook):
    # A part of a microsecond here is a part of a millisecond in a model.
    def __init__(
        self,
        names: Mapping[int, str],
        root: int,
        wanted: Callable[[], bool],
        seen: Callable[[str, str, Tensor], None],
        ended: Callable[[], None],
    ) -> None:
        self._names = names
        self._root = root
        self._wanted = wanted
        self._seen = seen
        self._ended = ended

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._wanted():
            return
        name = self._names.get(id(module))
        if name is not None:
            if _function_modes() or _dispatch_modes():
                with aside():
                    self._hand_on(name, output)
            else:
                with_graph = torch.is_grad_enabled()
                _set_grad_enabled(False)
                try:
                    if type(output) is not Tensor:
                        self._hand_on(name, output)
                    elif output.is_floating_point():  # what nearly all return, without the detour
                        self._seen(name, "", output)
                finally:
                    _set_grad_enabled(with_graph)
        if id(module) == self._root:
            self._ended()

    def _hand_on(self, name: str, output: Any) -> None:
        for place, tensor in tagged_tensors(output):
            self._seen(name, place, tensor)


_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_set_grad_enabled = torch._C._set_grad_enabled

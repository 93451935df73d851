"""What the modules of a model return in its forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import dispatch_modes, function_modes, set_grad_enabled
from ignite_monitor.model.aside import aside
from ignite_monitor.model.forward import ModuleHook, outputs_to
from ignite_monitor.model.tensors import tagged_tensors


@contextlib.contextmanager
def outputs(
    modules: Mapping[nn.Module, str],
    wanted: Callable[[], bool],
    seen: Callable[[str, str, Tensor], None],
    seen_again: Callable[[str, Tensor], bool],
) -> Iterator[None]:
    """While it lasts, hands on the floating-point tensors that modules return, each before anything can change it.

    Args:
        seen: is given a module's name, the place in its output, empty for a single tensor, and the tensor, under
            ``no_grad``; no mode sees what it does.
        seen_again: is given a module's name and a tensor that is all of its output, first; returns whether it is like
            one that was seen before, and has been taken in.
    """
    with outputs_to(modules, _Outputs(modules, wanted, seen, seen_again)):
        yield


class _Outputs(ModuleHook):
    # Called between the operations of a model, which leave nothing of it in the processor's caches: what looks like
    # a microsecond here is three.
    def __init__(
        self,
        modules: Mapping[nn.Module, str],
        wanted: Callable[[], bool],
        seen: Callable[[str, str, Tensor], None],
        seen_again: Callable[[str, Tensor], bool],
    ) -> None:
        self._names = {id(module): name for module, name in modules.items()}
        self._wanted = wanted
        self._seen = seen
        self._seen_again = seen_again

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        name = self._names.get(id(module))
        if name is None or not self._wanted():  # a shallow copy has the hooks of the module itself
            return
        if function_modes() or dispatch_modes():
            with aside():
                self._hand_on(name, output)
            return
        with_graph = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            if type(output) is not Tensor or not self._seen_again(name, output):
                self._hand_on(name, output)
        finally:
            set_grad_enabled(with_graph)

    def _hand_on(self, name: str, output: Any) -> None:
        for place, tensor in tagged_tensors(output):
            self._seen(name, place, tensor)

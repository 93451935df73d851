"""What is put on models and engines while a run lasts, and comes off again."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model._torch import drop_gradient_hooks, gradient_hooks


class GradientHook:
    """One post-accumulate-grad hook on many parameters, put on and taken off at a tenth of what registering it costs.

    Hooks that cost nothing in iterations that are not monitored have to come off after those that are. What
    ``Tensor.register_post_accumulate_grad_hook`` does is done here for all parameters at once; unlike there, a frozen
    parameter takes the hook too: it may be unfrozen in the middle of a train step.

    Attributes:
        places: the parameters that it is on, each with its hooks.
    """

    def __init__(self) -> None:
        self.places: list[tuple[Any, dict[Any, Any]]] = []

    def register(self, parameters: Iterable[nn.Parameter], hook: Callable[[Tensor], None]) -> None:
        """Have a hook called whenever a gradient has been accumulated into one of those that can have one."""
        self.remove()
        self.places = gradient_hooks(each for each in parameters if each.is_floating_point() or each.is_complex())
        for _, hooks in self.places:
            hooks[self] = hook

    def remove(self) -> None:
        """Take the hook off all of them."""
        for _, hooks in self.places:
            hooks.pop(self, None)
        drop_gradient_hooks(self.places)
        self.places = []


class Patch:
    """Something callable of an engine, replaced until it is removed.

    Args:
        replacement: a method that is called with the original, and what the original is called with; the original
            alone where its object is gone.
    """

    def __init__(self, engine: Engine, name: str, replacement: Callable[..., Any]) -> None:
        self._engine = weakref.ref(engine)
        self._name = name
        self._original = original = vars(engine).get(name)
        if original is None:  # a method of its class, which must not hold the engine
            method = getattr(type(engine), name)
            owner = self._engine

            def original(*args: Any) -> Any:
                return method(owner(), *args)

        method_of = weakref.WeakMethod(replacement)

        @functools.wraps(original)
        def patched(*args: Any) -> Any:
            replacing = method_of()
            return original(*args) if replacing is None else replacing(original, *args)

        self._patched = patched
        setattr(engine, name, patched)

    def remove(self) -> None:
        """Put the original back."""
        engine = self._engine()
        if engine is None or vars(engine).get(self._name) is not self._patched:
            return
        if self._original is None:
            delattr(engine, self._name)
        else:
            setattr(engine, self._name, self._original)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """What calls a method as long as its object is there."""
    method_of = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = method_of()
        return None if found is None else found(*args, **kwargs)

    return call


def remove_all(handles: list[Any]) -> None:
    """Remove what handles stand for, and empty the list."""
    while handles:
        handles.pop().remove()


def is_nested(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is made inside of another one, as those of wrapped optimizers and base classes are.

    If not, an earlier one has raised an error that the train step lives with.
    """
    hooked = getattr(type(optimizer).step, "__code__", None)  # the function around every step that calls its hooks
    frame, steps = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        steps += frame.f_code is hooked
    return steps > 1

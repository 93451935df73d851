"""The private names of torch and Ignite: an installed version without one of them fails at import, by name."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

_torch: Any = torch  # whose stubs lack private names
try:
    backward_number: Callable[[], int] = _torch._C._current_graph_task_id
    current_node: Callable[[], Any] = _torch._C._current_autograd_node  # of a backward, for its hooks
    queue_callback: Callable[[Callable[[], None]], None] = _torch.autograd.Variable._execution_engine.queue_callback
    is_functorch_wrapped: Callable[[Tensor], bool] = _torch._C._functorch.is_functorch_wrapped_tensor
    running_transform: Callable[[], Any] = _torch._C._functorch.peek_interpreter_stack
    function_modes: Callable[[], int] = _torch._C._len_torch_function_stack
    dispatch_modes: Callable[[], int] = _torch._C._len_torch_dispatch_stack
    disabled_dispatch_modes: Callable[[], Any] = _torch.utils._python_dispatch._disable_current_modes
    unseen_by_dispatch: Callable[[], AbstractContextManager[Any]] = _torch._C._DisableTorchDispatch
    foreach_norm: Callable[..., list[Tensor]] = _torch._foreach_norm
    foreach_add: Callable[..., list[Tensor]] = _torch._foreach_add
    foreach_mul: Callable[..., list[Tensor]] = _torch._foreach_mul
    foreach_scale: Callable[..., None] = _torch._foreach_mul_
    foreach_copy: Callable[..., None] = _torch._foreach_copy_
    _optimizer: dict[str, Any] = vars(sys.modules["torch.optim.optimizer"])
    _PRE_HOOKS: dict[int, Any] = _optimizer["_global_optimizer_pre_hooks"]
    _POST_HOOKS: dict[int, Any] = _optimizer["_global_optimizer_post_hooks"]
    _STEP: Any = _torch.optim.Optimizer.profile_hook_step(
        print
    ).__code__  # of the function that calls a step and its hooks
    AFTER_STEP: str = _torch.optim.Optimizer._optimizer_step_code.__name__  # which it calls before all post-hooks
    unseen_by_functions: Callable[[], AbstractContextManager[Any]] = _torch._C.DisableTorchFunction
    _BACKWARD = _torch.autograd.graph._engine_run_backward.__code__
except (AttributeError, KeyError) as error:  # which an import from the package would hide
    raise ImportError(f"ignite_monitor does not support torch {torch.__version__}: {error}") from error
# Missing in torch 2.6: there may be hooks.
hooks_of_saved_tensors = getattr(_torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)
pytree: Any = _pytree  # outputs are multiplied leaf by leaf


def in_backward() -> bool:
    """Return True in a backward of this thread."""
    return backward_number() != -1


_APPLY = torch.autograd.function.BackwardCFunction.apply.__code__


def calling_node() -> Any:
    """The node of a backward whose function has called the running backward, as reentrant checkpoints do; or None."""
    frame: Any = sys._getframe(1)
    is_within = False
    while frame is not None:
        if is_within and frame.f_code is _APPLY:
            return frame.f_locals["self"]
        is_within |= frame.f_code is _BACKWARD
        frame = frame.f_back
    return None


class GradientHook:
    """One post-accumulate-grad hook on many parameters, frozen ones too: the train step may unfreeze them.

    Public registration refuses frozen parameters, takes eight times as long, and leaves dictionaries that every
    later backward consults.
    """

    def __init__(self) -> None:
        self.places: list[tuple[Any, dict[Any, Any]]] = []  # parameters with torch's dictionaries

    def register(self, parameters: Iterable[Tensor], hook: Callable[[Tensor], None]) -> None:
        """Register the hook on parameters whose dtype has gradients."""
        for parameter in parameters:
            if parameter.is_floating_point() or parameter.is_complex():
                hooks: Any = parameter._post_accumulate_grad_hooks
                if hooks is None:
                    hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
                self.places.append((parameter, hooks))
                hooks[self] = hook

    def remove(self) -> None:
        """Remove the hook from all parameters."""
        while self.places:
            parameter, hooks = self.places[-1]
            hooks.pop(self, None)
            if not hooks and parameter._post_accumulate_grad_hooks is hooks:
                parameter._post_accumulate_grad_hooks = None
            self.places.pop()


def finalizes_manually(module: nn.Module) -> bool:
    """Return True if a wrapper reduces gradients in ``finalize_backward()`` alone, since torch 2.15."""
    state = getattr(module, "_get_fsdp_state", None)  # of fully_shard
    if state is not None:
        return getattr(state()._state_ctx, "manual_backward_finalization", False)
    return getattr(module, "require_manual_backward_finalization", False)


# Optimizers


def has_step_hooks(optimizer: Any) -> bool:
    """Return True if the steps of an optimizer call hooks: its constructor has called torch's."""
    return hasattr(type(optimizer).step, "hooked") and hasattr(optimizer, "_optimizer_step_pre_hooks")


def pre_hooks(optimizer: Any) -> dict[int, Callable[..., Any]]:
    """The hooks before a step among which is the last: the optimizer's own, else those of all optimizers."""
    return optimizer._optimizer_step_pre_hooks or _PRE_HOOKS


def post_hooks(optimizer: Any) -> list[Callable[..., Any]]:
    """The hooks after a step, in order."""
    return [*optimizer._optimizer_step_post_hooks.values(), *_POST_HOOKS.values()]


def running_steps() -> int:
    """The number of steps of optimizers that run, each within the one before."""
    return sum(frame.f_code is _STEP for frame, _ in walk_stack(sys._getframe(1)))


# Modules

# What is a module's own: parameters, without those that a parametrization computes, and buffers.
parameters_in: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
forward_pre_hooks: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")
buffers_in: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")

# The code of the frame in which a module is called.
module_call = getattr(nn.Module, "_call_impl", nn.Module.__call__).__code__

# The attributes under which wrappers keep a module.
_COMPILED = "_orig_mod"
WRAPPED = {_COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

is_in_join: Callable[[nn.Module], bool] = attrgetter("_join_config.enable")  # of a DistributedDataParallel
has_communication_hook: Callable[[nn.Module], Any] = attrgetter("_comm_hooks")


def is_compilers_wrapper(module: nn.Module) -> bool:
    """Return True for the wrapper that ``torch.compile`` returns."""
    return _COMPILED in module._modules


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return True if ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def registries(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The dictionaries of modules' own parameters and submodules, except of those that have been scripted meanwhile."""
    candidates = [registry for module in modules for registry in (module._parameters, module._modules)]
    return [registry for registry in candidates if isinstance(registry, dict)]


def known_forward_hooks(module: nn.Module) -> dict[tuple[str, int], Any]:
    """Forward hooks and pre-hooks of a module, by the keys that :func:`remove_hooks` takes."""
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return {(kind, key): hook for kind in kinds for key, hook in getattr(module, kind).items()}


def remove_hooks(module: nn.Module, known: Iterable[tuple[str, int]]) -> None:
    """Remove forward hooks by their keys in :func:`known_forward_hooks`, and all backward hooks."""
    for kind, key in known:
        del getattr(module, kind)[key]
    for kind in ("_backward_hooks", "_backward_pre_hooks"):
        getattr(module, kind, {}).clear()


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if a module overrides none of the methods of a layer's forward."""
    names = [name for name in ("forward", "_conv_forward", "_output_padding") if hasattr(kind, name)]
    return all(name not in vars(module) and getattr(type(module), name) is getattr(kind, name) for name in names)


def with_weights(module: nn.Module, parameters: Mapping[str, Tensor | None], buffers: dict[str, Any]) -> Any:
    """Shallow copy of a module without children, with other parameters and buffers."""
    other = object.__new__(type(module))
    vars(other).update(vars(module), _parameters={**parameters_in(module), **parameters}, _buffers=buffers)
    return other


# Tensors and modes


class DispatchMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` that sees higher-order operators too; it counts operations, and traces models."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


# Of a sparse tensor, coalesced or not, without synchronization.
indices_of: Callable[[Tensor], Tensor] = methodcaller("_indices")
values_of: Callable[[Tensor], Tensor] = methodcaller("_values")


def version(tensor: Tensor) -> int:
    """The number of in-place changes that autograd knows of; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def changes_gradients(output: Tensor | nn.Module) -> bool:
    """Return True if hooks may change the gradient of a tensor, or of a module's output."""
    kind = "_backward_hooks" if isinstance(output, Tensor) else "_backward_pre_hooks"
    return bool(getattr(output, kind, None))


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function, but not the functions that it calls, from tracing; importing the compiler takes seconds."""
    from torch._dynamo.decorators import skip

    skip(function)  # type: ignore[no-untyped-call, unused-ignore]
    return function


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled functions eagerly, except FlexAttention, which would need memory for all attention weights.

    Hooks registered after the first compiled call would not run otherwise. Nothing is compiled again.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds
    if frames is None:  # nothing is compiled yet
        yield
        return
    decide, is_forced = frames._callback_from_stance, frames._stance.stance == "force_eager"

    @untraced
    def decide_by_function(callback: Any) -> Any:
        function: Any = inspect.unwrap(sys._getframe(1).f_locals["fn"])
        is_attention = str(getattr(function, "__module__", "")).startswith("torch.nn.attention")
        return callback if is_attention else decide(callback)

    with torch.compiler.set_stance("force_eager"):
        frames._callback_from_stance = decide if is_forced else decide_by_function
        try:
            yield
        finally:
            frames._callback_from_stance = decide


# Ignite's engines

TRAIN_STEP, HANDLE_EXCEPTION, EVENT_HANDLERS = "_process_function", "_handle_exception", "_event_handlers"


def put_first(engine: Any, event: Any) -> None:
    """Move the latest handler of an event to the first place; in a new list, since the event may be firing."""
    handlers = getattr(engine, EVENT_HANDLERS)
    handlers[event] = [handlers[event][-1], *handlers[event][:-1]]

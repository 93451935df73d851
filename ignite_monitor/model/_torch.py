"""The private names of torch and Ignite; the package can be imported without them."""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn


class Gone:
    """A private name that the installed torch or Ignite does not have; a RuntimeError where it is called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> None:
        need("ignite_monitor", self)


def need(feature: str, *names: Any) -> None:
    """Refuse a feature with a RuntimeError if a private name is missing."""
    for name in names:
        if isinstance(name, Gone):
            package = name.name.partition(".")[0]
            version = sys.modules[package].__version__ if package in sys.modules else "installed"
            raise RuntimeError(f"{feature} needs {name.name}, which {package} {version} does not have")


def _find(path: str) -> Any:
    owner, _, name = path.rpartition(".")
    try:
        return getattr(pkgutil.resolve_name(owner), name)
    except (ImportError, AttributeError):
        return Gone(path)


# Backward passes

backward_number: Callable[[], int] = _find("torch._C._current_graph_task_id")  # in this thread; -1 outside of any
queue_callback: Callable[[Callable[[], None]], None] = _find("torch.autograd.Variable._execution_engine.queue_callback")
_gradient_hooks = _find("torch.Tensor._post_accumulate_grad_hooks")


def in_backward() -> bool:
    """Return True in a backward of this thread."""
    return backward_number() != -1


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


# Modules

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_MODULES = ("_parameters", "_buffers", "_modules", *_HOOKS, *(f"{kind}_with_kwargs" for kind in _HOOKS))

# What is a module's own: parameters, without those that a parametrization computes, buffers, and submodules.
parameters_in: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_in: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
modules_in: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")

# The code of the frame in which a module is called.
module_call = getattr(nn.Module, "_call_impl", nn.Module.__call__).__code__

# The attributes under which wrappers keep a module.
_COMPILED = "_orig_mod"
WRAPPED = {_COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

# What every module has; the compiled call of a module is none of its copies.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}

is_in_join: Callable[[nn.Module], bool] = attrgetter("_join_config.enable")  # of a DistributedDataParallel


def computes_alike(kind: type[nn.Module], other: type[nn.Module]) -> bool:
    """Return True if two classes share the methods that compute their output."""
    return all(getattr(kind, name, None) is getattr(other, name, None) for name in ("forward", "_conv_forward"))


def is_compilers_wrapper(module: nn.Module) -> bool:
    """Return True for the wrapper that ``torch.compile`` returns."""
    return _COMPILED in module._modules


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return True if ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def registries(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The dictionaries of modules' own parameters and submodules; scripted modules have none, and never change."""
    pairs = ((module._parameters, module._modules) for module in modules)
    return [registry for pair in pairs for registry in pair if isinstance(registry, dict)]


def known_forward_hooks(module: nn.Module) -> dict[tuple[str, int], Any]:
    """Forward hooks and pre-hooks of a module, by the keys that :func:`remove_forward_hook` takes."""
    return {(kind, key): hook for kind in _HOOKS for key, hook in getattr(module, kind).items()}


def hooks_before_forward(module: nn.Module) -> list[Any]:
    """The forward pre-hooks; weight and spectral normalization are among them."""
    return list(module._forward_pre_hooks.values())


def remove_forward_hook(module: nn.Module, known: tuple[str, int]) -> None:
    """Remove a hook by its key in :func:`known_forward_hooks`."""
    kind, key = known
    for place in (kind, f"{kind}_with_kwargs", f"{kind}_always_called"):
        getattr(module, place, {}).pop(key, None)


def remove_backward_hooks(module: nn.Module) -> None:
    """Remove all backward hooks of a module."""
    for kind in ("_backward_hooks", "_backward_pre_hooks"):
        getattr(module, kind, {}).clear()


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module's own parameters and buffers, without those of submodules."""
    module._apply(lambda tensor: tensor.to(device), recurse=False)


def with_weights(module: nn.Module, parameters: Mapping[str, Tensor | None], buffers: dict[str, Any]) -> Any:
    """Shallow copy of a module without children, with other parameters and buffers."""
    other = object.__new__(type(module))
    vars(other).update(vars(module), _parameters={**parameters_in(module), **parameters}, _buffers=buffers)
    return other


# Tensors and modes

is_functorch_wrapped: Callable[[Tensor], bool] = _find("torch._C._functorch.is_functorch_wrapped_tensor")
# The transform of torch.func that is running, or None.
running_transform: Callable[[], Any] = _find("torch._C._functorch.peek_interpreter_stack")
function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack")  # how many of the user's are active
dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack")
set_grad_enabled: Callable[[bool], Any] = _find("torch._C._set_grad_enabled")  # a third of the public function's cost
unseen_by_functions: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
unseen_by_dispatch: Callable[[], AbstractContextManager[Any]] = _find("torch._C._DisableTorchDispatch")

# ActivationHandler(attention=True) puts its function mode below those of others.
push_mode = _find("torch.overrides._push_mode")
pop_mode = _find("torch.overrides._pop_mode")
device_mode = _find("torch.utils._device.DeviceContext")

# Operations are counted, and models traced, by a dispatch mode; outputs are multiplied leaf by leaf.
_dispatch_mode = _find("torch.utils._python_dispatch.TorchDispatchMode")
_Mode: Any = object if isinstance(_dispatch_mode, Gone) else _dispatch_mode
pytree = _find("torch.utils._pytree")

foreach_norm: Callable[..., list[Tensor]] = _find("torch._foreach_norm")
foreach_add: Callable[..., list[Tensor]] = _find("torch._foreach_add")
foreach_mul: Callable[..., list[Tensor]] = _find("torch._foreach_mul")
foreach_scale: Callable[..., None] = _find("torch._foreach_mul_")
foreach_addcdiv: Callable[..., list[Tensor]] = _find("torch._foreach_addcdiv")
counts_changes = _find("torch.Tensor._version")


class DispatchMode(_Mode):  # type: ignore[misc]
    """A ``TorchDispatchMode`` that sees higher-order operators too."""

    def __init__(self) -> None:
        need(type(self).__name__, _dispatch_mode)
        super().__init__()
        self.supports_higher_order_operators = True


def sparse_parts(sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor, coalesced or not, without synchronization."""
    return sparse._indices(), sparse._values()


def version(tensor: Tensor) -> int:
    """The number of in-place changes that autograd knows of; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def part_of_rank(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


# Compiled functions


def frame_skipper() -> Callable[[Any], Any]:
    """The function that makes the compiler skip the code of a function; imports the compiler, which takes seconds."""
    return _find("torch._dynamo.decorators.skip")  # type: ignore[no-any-return]


# Conditions on a compiled function and its arguments, of all contexts that are entered.
_eager: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]] = []


@contextlib.contextmanager
def eager_where(is_eager: Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]) -> Iterator[None]:
    """Run a compiled function eagerly where a condition on it and its arguments holds.

    Without the private names all compiled functions run eagerly.
    """
    frames: Any = _find("torch._dynamo.eval_frame")
    decide: Any = getattr(frames, "_callback_from_stance", None)
    stance = getattr(frames, "_stance", None)

    def decide_by_function(callback: Any) -> Any:
        call = sys._getframe(1).f_locals
        if callback is None or callback is False or "fn" not in call:
            return decide(callback)
        function, args, kwargs = call["fn"], call.get("args", ()), call.get("kwargs", {})
        if any(condition(function, args, kwargs) for condition in _eager):
            return decide(callback)
        forced, frames._stance = frames._stance, stance  # the user's own
        try:
            return decide(callback)
        finally:
            frames._stance = forced

    with contextlib.ExitStack() as exits:
        _eager.append(is_eager)
        exits.callback(_eager.remove, is_eager)
        exits.enter_context(torch.compiler.set_stance("force_eager"))
        if decide is not None and stance is not None and len(_eager) == 1:
            frames._callback_from_stance = decide_by_function
            exits.callback(setattr, frames, "_callback_from_stance", decide)
        yield


# Ignite's engines

_OF_ENGINES = TRAIN_STEP, HANDLE_EXCEPTION, EVENT_HANDLERS = "_process_function", "_handle_exception", "_event_handlers"


def check_engine(engine: Any) -> None:
    """Refuse an engine with a RuntimeError if a private name is missing that all monitors share."""
    module = nn.Module()
    need(
        "attach()",
        *(backward_number, queue_callback, _gradient_hooks, counts_changes, is_functorch_wrapped, running_transform),
        *(function_modes, dispatch_modes, set_grad_enabled, unseen_by_dispatch, foreach_norm, foreach_add),
        *(foreach_mul, foreach_scale, foreach_addcdiv),
        *(Gone(f"torch.nn.Module.{name}") for name in _OF_MODULES if not hasattr(module, name)),
        *(Gone(f"ignite.engine.Engine.{name}") for name in _OF_ENGINES if not hasattr(engine, name)),
    )


def put_first(engine: Any, event: Any) -> None:
    """Move the latest handler of an event to the first place."""
    handlers = getattr(engine, EVENT_HANDLERS)[event]
    handlers.insert(0, handlers.pop())

"""The private names of torch and of Ignite that the package uses: what each is for, and what there is without it.

They stand here alone, so that the package can be imported, and does all it can, with a torch or an Ignite that has
lost one. Most have a public way round. What has none is :class:`Gone`, and the feature that can't do without says so by
name, by :func:`need`, where it is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import pkgutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Gone(NamedTuple):
    """A private name that the installed torch or Ignite does not have."""

    name: str


def need(feature: str, *found: Any) -> None:
    """Refuse, with a RuntimeError, a feature that can't do without a private name that is gone."""
    for each in found:
        if isinstance(each, Gone):
            package = each.name.partition(".")[0]
            raise RuntimeError(f"{feature} needs {each.name}, which the installed {package} does not have")


@functools.cache
def _say(text: str) -> None:
    """Warn, once."""
    _logger.warning(text)


def _find(path: str) -> Any:
    owner, _, name = path.rpartition(".")
    try:
        return getattr(pkgutil.resolve_name(owner), name)
    except (ImportError, AttributeError):
        return Gone(path)


def _or(path: str, otherwise: Any) -> Any:
    found = _find(path)
    return otherwise if isinstance(found, Gone) else found


# Backward passes

# The number of the backward that is going on in this thread, and what to call at its end: GRADIENTS_READY needs both.
backward_number = _find("torch._C._current_graph_task_id")
queue_callback = _find("torch.autograd.Variable._execution_engine.queue_callback")


def sees_backward() -> bool:
    """Whether the end of a backward pass can be seen."""
    return not isinstance(backward_number, Gone) and not isinstance(queue_callback, Gone)


def _called_from_backward() -> bool:
    callers = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code not in callers:
        frame = frame.f_back
    return frame.f_code in callers


# The number of the backward that is going on in this thread, -1 for none. Without the name 0 for any that has been
# called from here, which the device's own threads are not.
current_backward: Callable[[], int] = (
    (lambda: _called_from_backward() - 1) if isinstance(backward_number, Gone) else backward_number
)


def in_backward() -> bool:
    """Whether a backward is going on in this thread."""
    return current_backward() != -1


def gradient_hooks(parameters: Iterable[Tensor]) -> list[tuple[Tensor, dict[Any, Any]]]:
    """Parameters and their post-accumulate hooks: putting one on costs a tenth of registering it.

    Without them each is registered, on the parameters that require gradients when the train step starts.
    """
    found: list[tuple[Tensor, dict[Any, Any]]] = []
    for parameter in parameters:
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", False)
        if hooks is None:
            hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
        elif hooks is False:
            hooks = _Registered(parameter.register_post_accumulate_grad_hook) if parameter.requires_grad else {}
        found.append((parameter, hooks))
    return found


def drop_gradient_hooks(found: Iterable[tuple[Tensor, dict[Any, Any]]]) -> None:
    """Leave parameters whose last hook has been taken off as they were without any."""
    for parameter, hooks in found:
        if not hooks and getattr(parameter, "_post_accumulate_grad_hooks", None) is hooks:
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


class _Registered(dict[Any, Any]):
    """Hooks in the way that torch documents."""

    def __init__(self, register: Callable[[Any], Any]) -> None:
        super().__init__()
        self._register = register

    def __setitem__(self, key: Any, hook: Any) -> None:
        super().__setitem__(key, self._register(hook))

    def move_to_end(self, key: Any, last: bool) -> None:
        """Hooks that are registered stay in their order, as far as nobody knows better."""

    def pop(self, key: Any, default: Any = None) -> Any:
        handle = super().pop(key, None)
        return default if handle is None else handle.remove()


# Modules


def parameters_in(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, without what a parametrization computes. Without the name, a copy."""
    kept: dict[str, nn.Parameter | None] | None = getattr(module, "_parameters", None)
    return dict(module.named_parameters(recurse=False, remove_duplicate=False)) if kept is None else kept


def buffers_in(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers. Without the name, a copy: what a run puts in a buffer's place stays there."""
    kept: dict[str, Tensor | None] | None = getattr(module, "_buffers", None)
    return dict(module.named_buffers(recurse=False, remove_duplicate=False)) if kept is None else kept


def modules_in(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own submodules. Without the name, a copy."""
    kept: dict[str, nn.Module | None] | None = getattr(module, "_modules", None)
    return dict(module.named_children()) if kept is None else kept


def _of_each(name: str, of_one: Callable[[nn.Module], dict[str, T]]) -> Callable[[Iterable[nn.Module]], list[Any]]:
    """The same of many modules, at half the cost."""

    def of_each(modules: Iterable[nn.Module]) -> list[Any]:
        modules = list(modules)
        found = [getattr(module, name, None) for module in modules]
        return [*map(of_one, modules)] if None in found else found

    return of_each


parameters_of_each = _of_each("_parameters", parameters_in)
buffers_of_each = _of_each("_buffers", buffers_in)
modules_of_each = _of_each("_modules", modules_in)

# The code that runs where a module is called, whose frames say which one is running.
module_call = _or("torch.nn.Module._call_impl", nn.Module.__call__).__code__


def registries(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The dictionaries of modules' own parameters and submodules; scripted modules have none, and never change."""
    return [
        registry
        for module in modules
        for registry in (module._parameters, module._modules)
        if isinstance(registry, dict)
    ]


def finalizes_manually(module: nn.Module) -> bool:
    """Whether a wrapper leaves gradients unreduced until ``finalize_backward()`` is called on it, since torch 2.15."""
    state = getattr(module, "_get_fsdp_state", None)  # of fully_shard
    if state is not None:
        return getattr(state()._state_ctx, "manual_backward_finalization", False)
    return getattr(module, "require_manual_backward_finalization", False)


def forward_hooks(modules: Iterable[nn.Module], before: bool, with_kwargs: bool) -> list[list[Any]]:
    """The forward hooks of each module, and which of them are given keyword arguments; without, each is registered.

    Putting one on costs a tenth of registering it.
    """
    kind = _HOOKS[before]
    given_kind = f"{kind}_with_kwargs"
    found: list[list[Any]] = []
    for module in modules:
        hooks = [getattr(module, kind, None)]
        if with_kwargs:
            hooks.append(getattr(module, given_kind, None))
        if None in hooks:
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            hooks = [_Registered(functools.partial(register, with_kwargs=with_kwargs))]
        found.append(hooks)
    return found


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def known_forward_hooks(modules: Iterable[nn.Module]) -> list[dict[tuple[str, int], Any]]:
    """All forward hooks of each module, others' too, as :func:`remove_forward_hook` knows them; else a RuntimeError."""
    found = []
    for module in modules:
        kinds: dict[str, Any] = {kind: getattr(module, kind, Gone(f"torch.nn.Module.{kind}")) for kind in _HOOKS}
        need("A reference or a parametrization", *kinds.values())
        found.append({(kind, key): hook for kind in kinds for key, hook in kinds[kind].items()})
    return found


def hooks_before_forward(module: nn.Module) -> list[Any]:
    """The forward pre-hooks of a module, as which weight and spectral normalisation compute; none without the name."""
    return list(getattr(module, "_forward_pre_hooks", {}).values())


def remove_forward_hook(module: nn.Module, known: tuple[str, int]) -> None:
    """Take off a hook that :func:`known_forward_hooks` gave."""
    kind, key = known
    for place in (kind, f"{kind}_with_kwargs", f"{kind}_always_called"):
        getattr(module, place, {}).pop(key, None)


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module's own parameters and buffers. Without the private way those of its submodules go too."""
    apply: Any = getattr(module, "_apply", None)
    if apply is None:
        module.to(device)
    else:
        apply(lambda tensor: tensor.to(device), recurse=False)


def conv_forward(kind: type[nn.Module]) -> Any:
    """What a class of convolutions computes its output with, which others may override; None where it has no such."""
    return getattr(kind, "_conv_forward", None)


def convolution(module: Any) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A convolution's output of input, weight and bias; without the name that of one that pads with zeros."""

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if module.padding_mode != "zeros":
            raise RuntimeError(f"padding_mode={module.padding_mode!r} needs torch.nn.Conv2d._conv_forward")
        function: Any = (F.conv1d, F.conv2d, F.conv3d)[len(module.kernel_size) - 1]
        output: Tensor = function(x, weight, bias, module.stride, module.padding, module.dilation, module.groups)
        return output

    return getattr(module, "_conv_forward", convolve)


# The class of BatchNorm and InstanceNorm, other libraries' too; without it torch's own.
_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
batch_norm: Any = _or("torch.nn.modules.batchnorm._NormBase", (*_BATCH, *_INSTANCE))

# The attributes that wrappers put a module under; no user calls a module so. By others names are those in the wrapper.
_COMPILED = "_orig_mod"
WRAPPED = {_COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def is_compilers_wrapper(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` puts around another one, on which hooks are called."""
    return _COMPILED in modules_in(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` has been called; without the name it has not."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_in_join(replica: nn.Module) -> bool:
    """Whether a DistributedDataParallel is in its ``join()``; where that can't be known, yes."""
    config = getattr(replica, "_join_config", None)
    return True if config is None else bool(config.enable)


# Tensors and modes


def _has_no_data(tensor: Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


# Whether a tensor is one in a transform of torch.func; without the name, whether its memory can't be had.
is_functorch_wrapped: Callable[[Tensor], bool] = _or("torch._C._functorch.is_functorch_wrapped_tensor", _has_no_data)
_transform = _or("torch._C._functorch.peek_interpreter_stack", None)


def is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Whether a transform of torch.func is going on; without the name, whether one of the tensors is in one."""
    return any(map(is_functorch_wrapped, tensors)) if _transform is None else _transform() is not None


# How many modes of the user's are on; without the names as if there were some, which takes longer.
function_modes: Callable[[], int] = _or("torch._C._len_torch_function_stack", lambda: 1)
dispatch_modes: Callable[[], int] = _or("torch._C._len_torch_dispatch_stack", lambda: 1)

# ``torch.set_grad_enabled`` at a third of its cost.
set_grad_enabled: Callable[[bool], Any] = _or("torch._C._set_grad_enabled", torch.set_grad_enabled)


@contextlib.contextmanager
def _seen_by_modes() -> Iterator[None]:
    if dispatch_modes() or function_modes():
        _say("With this torch its modes that are on see what monitors compute, and may count or keep it")
    yield


# What keeps modes of the user's from seeing operations; without them they do.
unseen_by_functions: Callable[[], AbstractContextManager[Any]] = _or("torch._C.DisableTorchFunction", _seen_by_modes)
unseen_by_dispatch: Callable[[], AbstractContextManager[Any]] = _or("torch._C._DisableTorchDispatch", _seen_by_modes)

# Putting a function mode below those of others: ActivationHandler(attention=True) needs all four.
push_mode = _find("torch.overrides._push_mode")
pop_mode = _find("torch.overrides._pop_mode")
modes_on = _find("torch._C._len_torch_function_stack")
device_mode = _find("torch.utils._device.DeviceContext")

# Seeing every operation: operations of a train step are counted, and the layers of a model traced with it.
dispatch_mode = _find("torch.utils._python_dispatch.TorchDispatchMode")
_Seen: Any = object if isinstance(dispatch_mode, Gone) else dispatch_mode
_fake = _or("torch._subclasses.fake_tensor.FakeTensor", ())


class DispatchMode(_Seen):  # type: ignore[misc]
    """A ``TorchDispatchMode`` of higher-order operators too; a RuntimeError if this torch has none."""

    def __init__(self) -> None:
        need(type(self).__name__, dispatch_mode)
        super().__init__()
        self.supports_higher_order_operators = True


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is one that has a shape alone, as those by which DTensor finds out shapes."""
    return isinstance(tensor, _fake)


def cpu_attention() -> list[Any]:
    """The operators of the CPU's attention, forward and backward; those that there are not are None."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return [getattr(torch.ops.aten, each, None) for each in (name, f"{name}_backward")]


def _foreach(path: str, one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """An operation on lists; without the name one on each of their members, with what is no list for all of them."""

    def one_by_one(*given: Any, **options: Any) -> list[Tensor]:
        lists = [each if isinstance(each, (list, tuple)) else itertools.repeat(each) for each in given]
        return [one(*members, **options) for members in zip(*lists, strict=False)]

    return _or(path, one_by_one)  # type: ignore[no-any-return]


foreach_norm = _foreach("torch._foreach_norm", torch.linalg.vector_norm)
foreach_add = _foreach("torch._foreach_add", torch.add)
foreach_sub = _foreach("torch._foreach_sub", torch.sub)
foreach_mul = _foreach("torch._foreach_mul", torch.mul)
foreach_scale = _foreach("torch._foreach_mul_", Tensor.mul_)
foreach_copy = _foreach("torch._foreach_copy_", Tensor.copy_)
foreach_addcdiv = _foreach("torch._foreach_addcdiv", lambda *tensors: torch.addcdiv(*tensors[:3], value=tensors[3]))

# All elements of dense tensors of one dtype, one after the other: a third of the time that this takes in Python.
flattened: Callable[[Sequence[Tensor]], Tensor] = _or(
    "torch._C._nn.flatten_dense_tensors", lambda tensors: torch.cat([each.reshape(-1) for each in tensors])
)


def sparse_parts(sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor, coalesced or not; without the names coalesced, which waits."""
    indices, values = getattr(sparse, "_indices", None), getattr(sparse, "_values", None)
    if indices is None or values is None:
        whole = sparse.coalesce()
        return whole.indices(), whole.values()
    return indices(), values()


def version(tensor: Tensor) -> int:
    """Grows with every change in place that autograd knows of; 0 for inference tensors. A reference needs it."""
    return 0 if tensor.is_inference() else int(getattr(tensor, "_version", 0))


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """The :func:`version` of each."""
    return list(map(version, tensors))


counts_changes = _find("torch.Tensor._version")


def part_of_rank(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def storage_of(tensor: Tensor) -> int:
    """What all views of a strided tensor have in common; without the name the address of their memory."""
    storage = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", 0) or storage.data_ptr())


# What tensors are in: tracing a model and multiplying the parts of an output need it.
pytree = _find("torch.utils._pytree")

# Compiled functions


def frame_skipper() -> Callable[[Any], Any] | None:
    """What has the compiler pass over the code of a function; it comes with the compiler, which takes seconds."""
    return _or("torch._dynamo.decorators.skip", None)  # type: ignore[no-any-return]


# What is to run eagerly, innermost last, and what the user's own stance is.
_eager: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]] = []


@contextlib.contextmanager
def eager_where(wanted: Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]) -> Iterator[None]:
    """While it lasts, compiled functions run eagerly where that is wanted of them and their arguments.

    Without the names, all do; a warning says so.
    """
    frames = _find("torch._dynamo.eval_frame")
    decide, stance = getattr(frames, "_callback_from_stance", None), getattr(frames, "_stance", None)
    if decide is None or stance is None:
        _say("In a monitored iteration all that is compiled runs eagerly: this torch can't tell models apart")
    _eager.append(wanted)
    try:
        with torch.compiler.set_stance("force_eager"):
            if decide is None or stance is None or len(_eager) > 1:
                yield
                return

            def decide_by_function(callback: Any) -> Any:
                call = sys._getframe(1).f_locals
                if callback is None or callback is False or "fn" not in call:
                    return decide(callback)
                function, args, kwargs = call["fn"], call.get("args", ()), call.get("kwargs", {})
                answers = [each(function, args, kwargs) for each in _eager]  # each wants to be asked
                if any(answers):
                    return decide(callback)
                forced, frames._stance = frames._stance, stance  # as it would be without us
                try:
                    return decide(callback)
                finally:
                    frames._stance = forced

            frames._callback_from_stance = decide_by_function
            try:
                yield
            finally:
                frames._callback_from_stance = decide
    finally:
        _eager.remove(wanted)


# Ignite's engines

TRAIN_STEP = "_process_function"  # attaching a monitor needs it
HANDLE_EXCEPTION = "_handle_exception"  # without it what is on a model stays there after an error, until the next run


def check_engine(engine: Any) -> None:
    """Refuse, with a RuntimeError, an engine whose train step can't be followed."""
    need("attach", getattr(engine, TRAIN_STEP, Gone(f"ignite.engine.Engine.{TRAIN_STEP}")))


def handles_exceptions(engine: Any) -> bool:
    """Whether what an engine does with an exception can be seen."""
    return getattr(engine, HANDLE_EXCEPTION, None) is not None


EVENT_HANDLERS = "_event_handlers"  # an engine's handlers by event


def event_handlers(engine: Any) -> Any:
    """An engine's handlers by event; ``log_to`` needs it."""
    return getattr(engine, EVENT_HANDLERS, Gone("ignite.engine.Engine._event_handlers"))


def put_first(engine: Any, event: Any) -> None:
    """Have the latest handler of an event called first; where that can't be, it stays the last."""
    handlers = event_handlers(engine)
    if not isinstance(handlers, Gone):
        handlers[event].insert(0, handlers[event].pop())

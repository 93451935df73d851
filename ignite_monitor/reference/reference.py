"""A frozen model to compare with, and copies of models that share nothing with the training run."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.model._torch import buffers_in, eager, known_forward_hooks, parameters_in, remove_hooks
from ignite_monitor.model.forward import before_forward
from ignite_monitor.model.isolation import generators_of, in_second_pass, isolated_pass, preserved_rng_state
from ignite_monitor.model.modes import without_dispatch_modes, without_saved_tensors_hooks
from ignite_monitor.model.names import named_modules, unwrapped
from ignite_monitor.monitor.arguments import check_generators


class NotComparableError(Exception):
    """Reason why a call is not compared; its message completes "it is not compared: ..."."""


class Reference:
    """A frozen copy of a model as it is now (``"init"``), or a module of the same structure, which is not changed.

    Attributes:
        root: the model without wrappers.
        module: the reference.
        modules: the reference's modules by name.
        is_copy: whether the reference is a copy, which is without the users' hooks, and is saved with the run.

    Raises:
        TypeError: if ``reference`` is neither, or ``generators`` holds something else.
        ValueError: if it is of another structure, or the model can't be copied.
    """

    def __init__(self, model: nn.Module, reference: str | nn.Module, generators: Iterable[Any] = ()) -> None:
        self._generators = check_generators(generators)
        self.root = unwrapped(model)
        self.is_copy = reference == "init"
        if isinstance(reference, nn.Module):
            self.module = unwrapped(reference)
            if self.module is self.root:
                raise ValueError("Argument reference should be another module than model, but given the same")
            _check_same(_structure(self.root), _structure(self.module), "reference")
        elif self.is_copy:
            try:
                self.module = separate_copy(self.root, self._generators)
            except ValueError as error:
                text = "Argument reference should be a module, since the model has no copy"
                raise ValueError(f"{text}: {error}") from error
        else:
            error_kind = ValueError if isinstance(reference, str) else TypeError
            raise error_kind(f"Argument reference should be 'init' or a module, but given {reference!r}")
        self.modules = dict(named_modules(self.module))
        self._model_modules = dict(named_modules(self.root))

    def state_dict(self) -> dict[str, Any] | None:
        """Weights of a copy; None for a module that was given."""
        return dict(self.module.state_dict()) if self.is_copy else None

    def load_state_dict(self, state: Any) -> None:
        """Load saved weights, of the same kind of reference and the same structure."""
        if self.is_copy != isinstance(state, Mapping):
            saved = "no reference, since it was saved with a module" if state is None else "that of reference='init'"
            raise ValueError(f"Argument state_dict holds {saved}: give the same again, or resume without this state")
        if self.is_copy:
            _check_same(_shapes(self.module.state_dict()), _shapes(state), "state_dict")
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                tensor.data = tensor.data.clone()  # what state_dict() has returned stays as it is
            self.module.load_state_dict(state)

    def match_model(self) -> None:
        """Move a copy to the model's devices, freeze the parameters that are frozen, and set numbers as in the model.

        Numbers among the attributes of modules may be scheduled, as the probability of dropout.
        """
        for name, copied in self.modules.items() if self.is_copy else ():
            model = self._model_modules[name]
            for key, value in vars(model).items():
                if type(value) in (int, float, bool) and key != "training" and vars(copied).get(key) != value:
                    setattr(copied, key, value)
            tensors = parameters_in(model) | buffers_in(model)
            for key, tensor in (parameters_in(copied) | buffers_in(copied)).items():
                current = tensors.get(key)
                if tensor is None or current is None:
                    continue
                if isinstance(tensor, nn.Parameter):
                    tensor.requires_grad_(current.requires_grad)
                if tensor.device != current.device:
                    copied.to(current.device)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the reference's output for inputs of the model, which are copied.

        Training flags, generators, autocast, grad mode and RNG state are the model's: the last bits depend on all of
        them.

        Raises:
            NotComparableError: if the reference has another generator than the model.
        """
        generators, own = (generators_of(item, self._generators) for item in (self.module, self.root))
        if not {*map(id, generators)} <= {*map(id, own)}:
            raise NotComparableError("the reference has a random number generator that is not the model's")
        isolated = isolated_pass(self.module, generators)
        # Checkpointing counts the tensors that its block saves and, if it is selective, its operations.
        with isolated, without_saved_tensors_hooks(), without_dispatch_modes(), forbid_calls_to(self.root, self.module):
            for name, module in self.modules.items():
                training = self._model_modules[name].training
                if module.training != training:
                    module.training = training
            args, kwargs = detached_copy((args, kwargs))
            return self.module(*args, **kwargs)


def _check_same(model: dict[str, str], other: dict[str, str], argument: str) -> None:
    for name in (*model, *other):
        if model.get(name) != other.get(name):
            difference = f"{name} is {other.get(name, 'missing')} in it, not {model.get(name, 'missing')}"
            raise ValueError(f"Argument {argument} should be of the model's structure, but {difference}")


def _structure(model: nn.Module) -> dict[str, str]:
    """The classes of modules and the shapes of parameters by name, whatever wraps or shards them."""
    modules = dict(named_modules(model)).items()
    # fully_shard makes a class FSDPLinear out of Linear.
    kinds = {f"module {name!r}": type(module).__name__.removeprefix("FSDP") for name, module in modules}
    parameters = [(name, *item) for name, module in modules for item in module.named_parameters(recurse=False)]
    return kinds | _shapes({f"{name}.{last}".lstrip("."): parameter for name, last, parameter in parameters})


def _shapes(state: Mapping[str, Any]) -> dict[str, str]:
    """The shapes of the tensors in a state_dict, and the types of its other entries, by name."""
    return {
        f"entry {name!r}": str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
        for name, value in state.items()
    }


def detached_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Deep copy, with a memo as that of ``copy.deepcopy``, in which tensors belong to no graph.

    A tensor's copy requires gradients if the tensor does: kernels are selected by that.
    """
    with _DetachedTensors():
        return copy.deepcopy(value, memo)


class _DetachedTensors(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                # The clone is no leaf, so that it can be changed in place.
                memo[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad).clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def separate_copy(model: nn.Module, generators: Iterable[Any]) -> nn.Module:
    """Deep copy of a model that shares generators, without the users' hooks; ValueError if it can't be made."""
    hooks = [hook for registry in user_forward_hooks(model.modules()).values() for hook in registry.values()]
    memo = {id(item): item for item in (*hooks, *generators_of(model, generators))}
    # The empty dictionaries of modules take most of the time of a deep copy.
    members = [item for module in model.modules() for item in vars(module).values()]
    memo |= {id(item): type(item)() for item in members if type(item) in (dict, OrderedDict) and not item}
    try:
        with preserved_rng_state({item.device for item in model.parameters()}):
            separate: nn.Module = detached_copy(model, memo)
    except Exception as error:
        raise ValueError(f"it can't be copied ({type(error).__name__}: {error})") from error
    model_ids, others = ({*map(id, item.modules()), *map(id, item.parameters())} for item in (model, separate))
    if _structure(model) != _structure(separate) or model_ids & others:
        raise ValueError("its __deepcopy__ returns the same modules, the same parameters, or another structure")
    hooked = user_forward_hooks(separate.modules())
    for module in separate.modules():
        remove_hooks(module, hooked.get(module, ()))
    return separate


@contextlib.contextmanager
def isolated_copy(model: nn.Module, loss: Callable[..., Any], generators: Iterable[Any]) -> Iterator[nn.Module]:
    """A copy of a model, on which a loss of the user's is evaluated and differentiated apart from the training run."""
    shared = generators_of(model, generators, loss)
    separate = separate_copy(model, shared)
    isolated = isolated_pass(separate, generators_of(separate, shared))
    with isolated, forbid_calls_to(model, separate), eager(), torch.enable_grad():
        yield separate


def evaluate(loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a copy of a batch, 0-dim; RuntimeError if a reentrant checkpoint hides a part of its graph."""
    value = loss(model, detached_copy(batch)).reshape(())
    nodes = {value.grad_fn}
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        if node is not None:
            if node.name().startswith("CheckpointFunction"):
                raise RuntimeError("torch.utils.checkpoint should be given use_reentrant=False")
            following = {other for other, _ in node.next_functions} - nodes
            nodes |= following
            waiting += following
    return value


def user_forward_hooks(modules: Iterable[nn.Module]) -> dict[nn.Module, dict[tuple[str, int], Any]]:
    """Modules with forward hooks that users registered, and these hooks; without those of libraries and monitors."""
    hooked = {}
    for module in modules:
        hooks = known_forward_hooks(module)
        if user_hooks := {key: hook for key, hook in hooks.items() if not _is_of_library(hook)}:
            hooked[module] = user_hooks
    return hooked


def _is_of_library(hook: Any) -> bool:
    package = getattr(hook, "__module__", None) or type(hook).__module__
    return package.partition(".")[0] in ("torch", "transformers", "ignite_monitor")


@contextlib.contextmanager
def forbid_calls_to(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """Stop a second pass of another model before it uses a module of the training model.

    A call raises a NotComparableError. Code beside the modules' calls finds no parameters and buffers.
    """
    excluded = set(other.modules())
    names = {module: name or "the root module" for name, module in model.named_modules() if module not in excluded}
    errors: list[NotComparableError] = []

    def stop(module: nn.Module, *_: Any) -> None:
        if in_second_pass():
            errors.append(NotComparableError(f"a copy calls {names[module]} of the model that trains"))
            raise errors[0]

    both: list[Any] = [registry for module in names for registry in (parameters_in(module), buffers_in(module))]
    registries = [registry for registry in both if type(registry) is dict]
    saved = [dict(registry) for registry in registries]
    with before_forward(names, stop, first=True):
        try:
            for registry in registries:
                registry.clear()
            yield
        finally:
            for registry, members in zip(registries, saved, strict=True):
                registry.update(members)
    if errors:  # the other model's own code may have caught it
        raise errors[0]

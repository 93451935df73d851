"""A frozen model to compare with."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ignite_monitor.model._torch import buffers_in, counts_changes, move, need, parameters_in
from ignite_monitor.model.isolation import (
    copy_generator_state,
    generators_of,
    preserved_buffers,
    preserved_rng_state,
    reference_run,
)
from ignite_monitor.model.names import named_modules, unwrapped
from ignite_monitor.model.structure import first_difference, first_difference_of_states, modules_by_name
from ignite_monitor.reference.copies import detached_copy, guarded, separate_copy

_logger = logging.getLogger(__name__)


class Reference:
    """A model of the same structure as another one, or its earlier state.

    Args:
        model: the model that is trained, as the train step uses it.
        reference: ``"init"`` for a frozen copy of the model as it is now, or a module of the same structure, which is
            neither copied nor changed.

    Attributes:
        root: the model without wrappers.
        module: the reference.
        modules: the reference's modules by name.
        is_copy: whether the reference is a copy, which is without the users' hooks, and is saved with the run.

    Raises:
        TypeError: if ``reference`` is neither.
        ValueError: if it is of another structure, or the model can't be copied.
    """

    def __init__(self, model: nn.Module, reference: str | nn.Module) -> None:
        need("A reference", counts_changes)  # in-place changes exclude a call
        _check_model(model)
        self.root = unwrapped(model)
        self.is_copy = isinstance(reference, str)
        if isinstance(reference, nn.Module):
            self.module = unwrapped(reference)
            if self.module is self.root:
                raise ValueError("Argument reference should be another module than model, but given the same")
            _refuse(first_difference(self.root, self.module))
        elif isinstance(reference, str):
            self.module = self._copy(reference)
        else:
            raise TypeError(f"Argument reference should be 'init' or a module, but given {type(reference)}")
        self.modules = modules_by_name(self.module)
        self._model_modules = modules_by_name(self.root)
        self._scopes: dict[str, _Scope] = {}

    def _copy(self, reference: str) -> nn.Module:
        if reference != "init":
            raise ValueError(f"Argument reference should be 'init' or a module, but given {reference!r}")
        try:
            module, hooked = separate_copy(self.root)
        except ValueError as error:
            raise ValueError(f"Argument reference should be a module, since the model has no copy: {error}") from error
        if hooked:
            _logger.warning(
                "Reference: the copy of the model has none of the forward hooks on %s; if they change inputs or "
                "outputs, give a module as the reference",
                ", ".join(hooked),
            )
        return module

    def state_dict(self) -> dict[str, Any] | None:
        """Weights of a copy; None for a module that was given."""
        return dict(self.module.state_dict()) if self.is_copy else None

    def load_state_dict(self, state: Any) -> None:
        """Load saved weights.

        Raises:
            ValueError: if they were saved with another kind of reference, or another structure.
        """
        if not self.is_copy and state is not None:
            raise ValueError(
                "Argument state_dict holds the reference of a run with reference='init': resume it with "
                "reference='init', or without this state"
            )
        if self.is_copy and not isinstance(state, Mapping):
            raise ValueError(
                "Argument state_dict holds no reference: it was saved with a module as reference, so give the same "
                "one again, or resume without this state"
            )
        if self.is_copy:
            _refuse(first_difference_of_states(self.module.state_dict(), state), "state_dict")
            self.module.load_state_dict(state)

    def follow(self) -> None:
        """Move a copy to the model's devices, and freeze the parameters that are frozen in the model."""
        if not self.is_copy:
            return
        for name, copied in self.modules.items():
            own = parameters_in(self._model_modules[name])
            tensors = [*own.values(), *buffers_in(self._model_modules[name]).values()]
            device = next((item.device for item in tensors if item is not None), None)
            theirs = [*parameters_in(copied).values(), *buffers_in(copied).values()]
            if device is not None and any(item is not None and item.device != device for item in theirs):
                move(copied, device)
            for key, parameter in parameters_in(copied).items():
                weight = own.get(key)
                if parameter is not None and weight is not None and parameter.requires_grad != weight.requires_grad:
                    parameter.requires_grad_(weight.requires_grad)

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a reference module, ``""`` for the whole, for inputs of the model.

        Autocast, training flags, grad mode and RNG state are those of the model: the last bits depend on all of them.
        Inputs, buffers, RNG state and generators are the same afterwards.
        """
        with self.isolated(name), guarded(self.root, self.module) if not name else contextlib.nullcontext():
            args, kwargs = detached_copy((args, kwargs))
            return self.modules[name](*args, **kwargs)

    @contextlib.contextmanager
    def isolated(self, name: str) -> Iterator[None]:
        """Isolate a pass of a reference module, with the model's training flags and RNG state.

        Buffers of the reference, RNG state, and generators of both are restored on exit.
        """
        if name not in self._scopes:
            self._scopes[name] = _Scope.of(name, self._model_modules, self.modules)
        scope, module = self._scopes[name], self.modules[name]
        devices = {item.device for item in chain(module.parameters(), module.buffers())}
        # A generator that is an attribute may have been replaced since.
        sources = [vars(own).get(path[0], known) if len(path) == 1 else known for own, path, known, _ in scope.draws]
        generators = [*sources, *(copied for *_, copied in scope.draws)]
        with preserved_rng_state(devices, generators), preserved_buffers(scope.pairs), reference_run():
            for source, (*_, copied) in zip(sources, scope.draws, strict=True):
                copy_generator_state(copied, source)
            for copied, own in scope.pairs.items():
                copied.training = own.training
            yield


class _Scope(NamedTuple):
    """Modules that run with one module of the reference.

    Attributes:
        pairs: module of the reference -> module of the model.
        draws: module of the model, path and generator in it, and the reference's generator at this path.
    """

    pairs: dict[nn.Module, nn.Module]
    draws: list[tuple[nn.Module, tuple[Any, ...], Any, Any]]

    @classmethod
    def of(cls, name: str, model: Mapping[str, nn.Module], reference: Mapping[str, nn.Module]) -> _Scope:
        inside = set(reference[name].modules())
        pairs = {module: model[path] for path, module in reference.items() if module in inside}
        draws = []
        for copied, own in pairs.items():
            known = generators_of(own)
            draws += [(own, path, known[path], item) for path, item in generators_of(copied).items() if path in known]
        return cls(pairs, draws)


def _check_model(model: nn.Module) -> None:
    for name, module in named_modules(model):
        if isinstance(module, torch.jit.ScriptModule):
            # Its optimization depends on the number of calls, which a copy shares.
            raise ValueError(f"Argument model has a scripted module {name or '_root_'!r}, which has no reference")
        sharded = "FullyShardedDataParallel" in {kind.__name__ for kind in type(module).__mro__}
        if sharded or (isinstance(module, DataParallel) and len(module.device_ids) > 1):
            raise ValueError(
                f"Argument model has a {type(module).__name__} {name!r}, which has no reference: use fully_shard or "
                "DistributedDataParallel"
            )


def _refuse(difference: str | None, argument: str = "reference") -> None:
    if difference is not None:
        raise ValueError(f"Argument {argument} should be of the model's structure, but {difference}")

"""A frozen model to compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ignite_monitor.model._torch import buffers_in, counts_changes, move, need, parameters_in
from ignite_monitor.model.isolation import copy_generator_state, generators_of, isolated_pass
from ignite_monitor.model.names import named_modules, unwrapped
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.model.structure import first_difference, first_difference_of_states, modules_by_name
from ignite_monitor.reference.copies import detached_copy, guarded, separate_copy


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
        check_whole(model)
        for name, module in named_modules(model):
            # Scripted modules are optimized by their number of calls, which a copy shares.
            replicated = isinstance(module, DataParallel) and len(module.device_ids) > 1
            if replicated or isinstance(module, torch.jit.ScriptModule):
                kind = "DataParallel over several devices" if replicated else "scripted module"
                raise ValueError(f"Argument model has a {kind} {name or '_root_'!r}, which has no reference")
        self.root = unwrapped(model)
        self.is_copy = reference == "init"
        if isinstance(reference, nn.Module):
            self.module = unwrapped(reference)
            if self.module is self.root:
                raise ValueError("Argument reference should be another module than model, but given the same")
            _refuse(first_difference(self.root, self.module))
        elif self.is_copy:
            try:
                self.module = separate_copy(self.root)
            except ValueError as error:
                text = "Argument reference should be a module, since the model has no copy"
                raise ValueError(f"{text}: {error}") from error
        else:
            error_kind = ValueError if isinstance(reference, str) else TypeError
            raise error_kind(f"Argument reference should be 'init' or a module, but given {reference!r}")
        self.modules = modules_by_name(self.module)
        self._model_modules = modules_by_name(self.root)

    def state_dict(self) -> dict[str, Any] | None:
        """Weights of a copy; None for a module that was given."""
        return dict(self.module.state_dict()) if self.is_copy else None

    def load_state_dict(self, state: Any) -> None:
        """Load saved weights.

        Raises:
            ValueError: if they were saved with another kind of reference, or another structure.
        """
        if self.is_copy != isinstance(state, Mapping):
            saved = "no reference, since it was saved with a module" if state is None else "that of reference='init'"
            raise ValueError(f"Argument state_dict holds {saved}: give the same again, or resume without this state")
        if self.is_copy:
            _refuse(first_difference_of_states(self.module.state_dict(), state), "state_dict")
            self.module.load_state_dict(state)

    def follow(self) -> None:
        """Move a copy to the model's devices, and freeze the parameters that are frozen in the model."""
        for name, copied in self.modules.items() if self.is_copy else ():
            model = self._model_modules[name]
            weights, buffers = parameters_in(model), buffers_in(model)
            for key, parameter in parameters_in(copied).items():
                weight = weights.get(key)
                if parameter is not None and weight is not None and parameter.requires_grad != weight.requires_grad:
                    parameter.requires_grad_(weight.requires_grad)
            device = next((item.device for item in (*weights.values(), *buffers.values()) if item is not None), None)
            copies = (*parameters_in(copied).values(), *buffers_in(copied).values())
            if device is not None and any(item is not None and item.device != device for item in copies):
                move(copied, device)

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a reference module, ``""`` for the whole, for inputs of the model.

        Autocast, training flags, grad mode and RNG state are those of the model: the last bits depend on all of them.
        Inputs, buffers, RNG state and generators are the same afterwards.
        """
        with self.isolated(name), contextlib.nullcontext() if name else guarded(self.root, self.module):
            args, kwargs = detached_copy((args, kwargs))
            return self.modules[name](*args, **kwargs)

    @contextlib.contextmanager
    def isolated(self, name: str) -> Iterator[None]:
        """Isolate a pass of a reference module, with the model's training flags and states of generators."""
        inside = set(self.modules[name].modules())
        with isolated_pass(self.modules[name]):
            for path, copied in self.modules.items():
                if copied in inside:
                    copied.training = self._model_modules[path].training
                    if own := generators_of(copied):
                        sources = generators_of(self._model_modules[path])
                        for place in own.keys() & sources.keys():
                            copy_generator_state(own[place], sources[place])
            yield


def _refuse(difference: str | None, argument: str = "reference") -> None:
    if difference is not None:
        raise ValueError(f"Argument {argument} should be of the model's structure, but {difference}")

"""A frozen model to compare with."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DataParallel

from ignite_monitor.model._torch import buffers_in, counts_changes, move, need, parameters_in
from ignite_monitor.model.isolation import reference_run
from ignite_monitor.model.names import named_modules, unwrapped
from ignite_monitor.model.structure import first_difference, first_difference_of_states, modules_by_name
from ignite_monitor.reference.copies import detached_copy, separate_copy
from ignite_monitor.reference.isolation import Fence, put_back
from ignite_monitor.reference.rng import copy_generator_state, generators_of, preserved_rng_state

_logger = logging.getLogger(__name__)


class Reference:
    """A model of the same structure as another one, or one of its earlier selves.

    Args:
        model: the model that is trained, as the train step uses it.
        reference: ``"init"`` for a frozen copy of the model as it is now; a module of the same structure, which is
            neither copied nor changed; or the path of a file with a state_dict, for a copy with these weights.

    Attributes:
        module: the reference.
        modules: its modules by name.
        is_copy: whether it is the monitor's own, without the hooks of the user's.
        saves: whether a run saves tensors for a backward pass; True once one has failed for want of them.
        kept: whether it has to be saved with a run: it can't be given once more when that is resumed.

    Raises:
        TypeError: if ``reference`` is none of these.
        ValueError: if it is of another structure, or can't be made.
    """

    def __init__(self, model: nn.Module, reference: str | os.PathLike[str] | nn.Module) -> None:
        need("A reference", counts_changes)  # of what is kept for its runs
        for name, module in named_modules(model):
            if isinstance(module, torch.jit.ScriptModule):
                # Not even a copy: it shares what is compiled after some calls, and with that the calls are counted.
                raise ValueError(
                    f"Argument model has a scripted module {name or '_root_'!r}, beside which no reference can be "
                    "run: its calls would change when the model's own code is optimized"
                )
            flat = "FullyShardedDataParallel" in {kind.__name__ for kind in type(module).__mro__}
            if flat or (isinstance(module, DataParallel) and len(module.device_ids) > 1):
                raise ValueError(
                    f"Argument model has a {type(module).__name__} {name!r}, beside which no reference can be run: "
                    "use fully_shard or DistributedDataParallel"
                )
        self.root = unwrapped(model)
        self.is_copy = not isinstance(reference, nn.Module)
        self.saves = False
        copies: dict[nn.Module, nn.Module] = {}
        self.kept = isinstance(reference, str) and reference == "init"
        if isinstance(reference, nn.Module):
            self.module = unwrapped(reference)
            if self.module is self.root:
                raise ValueError("Argument reference should be another module than model, but given the same")
            self._refuse(first_difference(self.root, self.module))
        elif isinstance(reference, (str, os.PathLike)):
            self.module, copies, stripped = separate_copy(self.root)
            if stripped:
                _logger.warning(
                    "The copy of the model that serves as its reference is without your forward hooks, on %s: if they "
                    "change inputs or outputs, give a module as the reference",
                    ", ".join(stripped),
                )
            if not self.kept:
                self._load(_read(reference, set(self.module.state_dict())))
        else:
            raise TypeError(
                f"Argument reference should be 'init', a module or the path of a state_dict, but given "
                f"{type(reference)}"
            )
        self.modules = modules_by_name(self.module)
        ours = modules_by_name(self.root)
        # Also those that a copy holds without having them registered.
        self._twins = copies | {module: ours[name] for name, module in self.modules.items()}
        self._within: dict[str, tuple[list[tuple[nn.Module, nn.Module]], list[dict[str, Any]]]] = {}
        self._lone = copies.keys() - set(self.module.modules())  # not registered
        self._fence = Fence(self.root, self.module, copies)
        self._generators = {
            theirs: [(path, held[path], each) for path, each in generators_of(theirs).items() if path in held]
            for theirs, mine in self._twins.items()
            if (held := generators_of(mine))
        }

    # Its weights

    def state_dict(self) -> dict[str, Any] | None:
        """Its weights, where they have to be saved; else None."""
        return dict(self.module.state_dict()) if self.kept else None

    def load_state_dict(self, state: Any) -> None:
        """Take saved weights over; a ValueError if they are of a reference of another kind or structure."""
        if not self.kept and state is not None:
            raise ValueError(
                "Argument state_dict holds the reference of a run that had reference='init': resume it with "
                "reference='init', or leave this state out"
            )
        if self.kept and not isinstance(state, Mapping):
            raise ValueError(
                "Argument state_dict holds no reference: it was saved where reference was a module or a path, so give "
                "the same one again, or leave this state out"
            )
        if self.kept:
            self._load(state, "state_dict")

    def _load(self, state: Mapping[str, Any], argument: str = "reference") -> None:
        self._refuse(first_difference_of_states(self.module.state_dict(), state), argument)
        self.module.load_state_dict(state)

    @staticmethod
    def _refuse(difference: str | None, argument: str = "reference") -> None:
        if difference is not None:
            raise ValueError(f"Argument {argument} should be of the model's structure, but {difference}")

    # Running it

    def follow(self) -> None:
        """Move a copy that is its own to where the model has been moved; frozen parameters are frozen in it too."""
        if not self.is_copy:
            return
        tops = [(self.module, self.root), *((each, ours) for each, ours in self._twins.items() if each in self._lone)]
        if all(_alike(*each) for each in tops):
            return
        for copied, ours in self._twins.items():
            for name, mine in parameters_in(ours).items():
                theirs = parameters_in(copied)[name]
                if mine is None or theirs is None:
                    continue
                if theirs.device != mine.device:
                    move(copied, mine.device)
                    theirs = parameters_in(copied)[name]
                if theirs is not None and theirs.requires_grad != mine.requires_grad:
                    theirs.requires_grad_(mine.requires_grad)

    def run(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: dict[str, Tensor] | None = None
    ) -> Any:
        """What one of its modules, ``""`` the whole, makes of the model's inputs.

        Draws the random numbers that the model is about to draw, with autocast, training flags and the recording of
        gradients as the model has them: what is computed depends on all of these, if only in its last bits. Inputs,
        buffers of either, and random number generators are the same afterwards. Given parameters, by name, take the
        place of its own.
        """
        with self._unnoticed(name), self._nothing_saved():
            args, kwargs = detached_copy((args, kwargs))
            if parameters is not None:
                return functional_call(self.modules[name], parameters, args, kwargs)
            output = self.modules[name](*args, **kwargs)
            if not name:
                self._fence.check(output)
            return output

    def _nothing_saved(self) -> contextlib.AbstractContextManager[Any]:
        """No backward pass of the reference will want what autograd saves, unless the forward pass has one in it."""
        if self.saves:
            return contextlib.nullcontext()
        self_reference = weakref.ref(self)

        def unpack(_: None) -> Tensor:
            owner = self_reference()
            if owner is not None:
                owner.saves = True
            raise RuntimeError("the reference makes a backward pass of its own")

        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, unpack)

    @contextlib.contextmanager
    def _unnoticed(self, name: str) -> Iterator[None]:
        if name not in self._within:
            modules = self.modules[name].modules() if name else self._twins
            pairs = [(self._twins[each], each) for each in modules if each in self._twins]
            self._within[name] = pairs, [buffers_in(theirs) for _, theirs in pairs]
        within, registries = self._within[name]
        top = self.modules[name]
        devices = {each.device for each in chain(top.parameters(), top.buffers())}
        generators = [
            (vars(mine).get(path[0], held) if len(path) == 1 else held, copied)
            for mine, theirs in within
            for path, held, copied in self._generators.get(theirs, ())
        ]
        with (
            preserved_rng_state(devices, [mine for mine, _ in generators]),
            put_back([theirs for _, theirs in within], registries),
            reference_run(),
            contextlib.nullcontext() if name else self._fence.around(),
        ):
            for mine, copied in generators:
                copy_generator_state(copied, mine)
            for ours, theirs in within:
                if theirs.training != ours.training:
                    theirs.training = ours.training
            yield


def _alike(copied: nn.Module, ours: nn.Module) -> bool:
    """Whether parameters lie where those of another module do, and are frozen where those are."""
    one, other = ([(each.device, each.requires_grad) for each in module.parameters()] for module in (copied, ours))
    return one == other


def _read(path: str | os.PathLike[str], names: set[str]) -> Mapping[str, Any]:
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"Argument reference should be 'init', a module or the path of a state_dict, but {os.fspath(path)!r} "
            f"can't be loaded: {error}"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"Argument reference should be the path of a state_dict, but {os.fspath(path)!r} holds none")
    while state and names.isdisjoint(state) and all(name.startswith(("module.", "_orig_mod.")) for name in state):
        state = {name.partition(".")[2]: value for name, value in state.items()}
    weights: Mapping[str, Any] = state
    return weights

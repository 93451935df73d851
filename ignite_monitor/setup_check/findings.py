"""Faults of the setup: one function of the evidence for each."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ignite_monitor.model.names import held_by, listed, named_modules, parameters_of
from ignite_monitor.model.sampling import NARROW
from ignite_monitor.setup_check.evidence import Evidence, Numbers

MOST = 100  # iterations to wait for steps, and for gradients of parameters without one
_NAMED = 5
_UNUSED_FROM = 0.05  # of the optimizer's elements; less are mask tokens and poolers of released models
_LARGE_MOMENTUM = 0.99  # steps a hundred times the learning rate times the gradient
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass
class Finding:
    """A fault or a note: the arguments of :meth:`Monitor.report`."""

    kind: str
    text: str
    severity: str = "problem"
    names: tuple[str, ...] = ()


def find_all(evidence: Evidence, numbers: Numbers, epoch_length: int | None) -> Iterator[Finding]:
    """Return all findings but that of :func:`unused_parameters`, which may take more iterations."""
    if evidence.stepped:
        yield from _without_optimizer(evidence, numbers)
        yield from _without_gradient(evidence)
        yield from _wrapper_bypassed(evidence)
    else:
        yield from _without_step(evidence, numbers)
    yield from _without_requires_grad(evidence)
    yield from _gradients_not_zeroed(evidence, numbers)
    if len(evidence.steps) > 1 and numbers.rate_is_zero:
        text = f"the learning rate of all parameter groups was 0 in {len(evidence.steps)} optimizer steps"
        yield Finding("zero_learning_rate", text, "warning")
    yield from _large_momentum(evidence.optimizer)
    if evidence.seen and not evidence.is_training:
        yield from evaluation_mode(evidence.model)
    if evidence.same and numbers.batch_repeats and epoch_length != 1:
        text = f"the first {len(evidence.same) + 1} batches are bitwise equal: check the data loader"
        yield Finding("batch_repeats", text, "warning")


def idle_parameters(evidence: Evidence) -> list[Any]:
    """Return the optimizer's parameters without a gradient so far, if they are a part that counts.

    Those in a list of which others had a gradient are not: they may be experts.
    """
    trained = [item for item in evidence.held if item.requires_grad]
    idle = [item for item in trained if id(item) not in evidence.seen]
    if not evidence.stepped or not 0 < len(idle) < len(trained):
        return []
    lists = [f"{path}." if path else "" for path, module in named_modules(evidence.model) if isinstance(module, _LISTS)]
    used = [name for key, name in evidence.names.items() if key in evidence.seen]
    partly_used = tuple(path for path in lists if any(name.startswith(path) for name in used))
    idle = [item for item in idle if not evidence.names[id(item)].startswith(partly_used)]
    return idle if sum(p.numel() for p in idle) >= _UNUSED_FROM * sum(p.numel() for p in trained) else []


def unused_parameters(evidence: Evidence) -> Iterator[Finding]:
    """Find parameters of the optimizer without a gradient."""
    names = _names(evidence, idle_parameters(evidence))
    if names:
        text = f"in the optimizer, but without a gradient in {evidence.iterations} iterations: {listed(names, _NAMED)}"
        yield Finding("unused_parameters", text, "warning" if evidence.iterations >= MOST else "note", names)


def _without_optimizer(evidence: Evidence, numbers: Numbers) -> Iterator[Finding]:
    copied = {*NARROW} - {item.dtype for item in parameters_of(evidence.optimizer)}  # may have float32 copies
    left = [item for item in evidence.others if id(item) in evidence.seen and item.dtype not in copied]
    if not left or numbers.others_change:
        return
    # Also optimizers without a step; there may be millions of objects to look at.
    alive = [item for item in gc.get_objects() if issubclass(type(item), Optimizer) and hasattr(item, "param_groups")]
    held = set().union(*map(held_by, alive))
    left = [item for item in left if id(item) not in held]
    gone = [p for p in parameters_of(evidence.optimizer) if id(p) not in evidence.names and p.grad is None]
    shapes = {item.shape for item in gone}
    rest = _names(evidence, (item for item in left if item.shape not in shapes))
    stale = _names(evidence, (item for item in left if item.shape in shapes))
    if rest:
        text = f"in no optimizer, although they have gradients: {listed(rest, _NAMED)}. Add them to one"
        yield Finding("not_in_optimizer", f"{text}, or set requires_grad=False", names=rest)
    if stale:
        text = f"{len(gone)} parameters of the optimizer are not the model's, {listed(stale, _NAMED)} are in none: "
        yield Finding("stale_optimizer", f"{text}create the optimizer after the last change of the model", names=stale)


def _without_gradient(evidence: Evidence) -> Iterator[Finding]:
    trained = {id(item) for item in evidence.held if item.requires_grad}
    # An optimizer of another class may compute gradients, or keep them elsewhere.
    if trained and evidence.stepped > 1 and all(evidence.is_torch) and evidence.seen.isdisjoint(trained):
        text = f"no parameter of the optimizer had a gradient in {evidence.stepped} iterations with a step. Check for "
        yield Finding("no_gradients", f"{text}detach(), no_grad() and item() between the model's output and the loss")


def _wrapper_bypassed(evidence: Evidence) -> Iterator[Finding]:
    if evidence.calls and not any(evidence.calls):
        text = "the module in DistributedDataParallel is called, without reducing gradients: call the wrapper"
        yield Finding("wrapper_bypassed", text)


def _without_step(evidence: Evidence, numbers: Numbers) -> Iterator[Finding]:
    name, count = type(evidence.optimizer).__name__, int(numbers.discarded)
    text = f"{name} made no step in {evidence.iterations} iterations with {len(evidence.initial_norms)} backward passes"
    if count > 1 and not numbers.held_change:
        yield Finding("no_step", f"{text}, whose gradients were discarded {count} times: call optimizer.step()")
    else:
        yield Finding("no_step", f"{text}: steps are not checked", "note")


def _without_requires_grad(evidence: Evidence) -> Iterator[Finding]:
    names = _names(evidence, (item for item in evidence.parameters if not item.requires_grad))
    if 0 < len(names) < len(evidence.parameters):
        text = f"{len(names)} of {len(evidence.parameters)} parameters do not require gradients: "
        yield Finding("requires_grad_false", text + listed(names, _NAMED), "note", names)


def _gradients_not_zeroed(evidence: Evidence, numbers: Numbers) -> Iterator[Finding]:
    count = sum(bool(step.initial_norms) for step in evidence.steps)
    if count > 1 and numbers.keeps_gradients:
        text = f"the backward after each of {count} steps added to the gradients of that step"
        yield Finding("gradients_not_zeroed", f"{text}: call optimizer.zero_grad()")


def _large_momentum(optimizer: Optimizer) -> Iterator[Finding]:
    momenta = (it["momentum"] for it in optimizer.param_groups if it.get("momentum") and not it.get("dampening"))
    largest = max(map(float, momenta), default=0.0)
    if largest > _LARGE_MOMENTUM:
        factor = f"up to {1 / (1 - largest):.3g} times" if largest < 1 else "without bound above"
        text = f"a momentum of {largest:g} makes steps grow to {factor} the learning rate times the gradient"
        yield Finding("large_momentum", text, "warning")


def evaluation_mode(model: nn.Module) -> Iterator[Finding]:
    """Find layers that depend on the mode, in a model that is trained in evaluation mode."""
    layers = tuple(name for name, module in named_modules(model) if _depends_on_mode(module))
    if layers:
        text = f"the model was trained in evaluation mode, on which {listed(layers, _NAMED)} depend: call model.train()"
        yield Finding("evaluation_mode", text, "warning", layers)


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, _BATCH_NORMS):
        return module.running_mean is not None
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def _names(evidence: Evidence, parameters: Iterable[Any]) -> tuple[str, ...]:
    return tuple(evidence.names[id(item)] for item in parameters)

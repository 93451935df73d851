"""Faults of the setup: one function of the evidence for each, which calls ``report(kind, text, severity, names)``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer, RMSprop

from ignite_monitor.model.names import held_by, listed, named_modules, parameters_of
from ignite_monitor.model.sampling import NARROW
from ignite_monitor.setup_check.evidence import COMPARED, Evidence

ITERATIONS = 3  # with a step, to check
MOST = 100  # iterations to wait for steps, and for gradients of parameters without one
_NAMED = 5
_UNUSED_FROM = 0.05  # of the optimizer's elements; less are mask tokens and poolers of released models
_LARGE_MOMENTUM = 0.99  # steps a hundred times the learning rate times the gradient
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Report = Callable[..., None]  # as Monitor.report; the severity is "problem" if none is given


def idle_parameters(evidence: Evidence) -> list[Any]:
    """Return the optimizer's parameters without a gradient so far, if they are a part that counts.

    Members of a list in which others had a gradient are not: they may be experts.
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


def _unused_parameters(evidence: Evidence, report: Report) -> None:
    """Report parameters of the optimizer without a gradient."""
    names = _names(evidence, idle_parameters(evidence))
    if names:
        count = evidence.iterations - min(evidence.stepped) + 1
        text = f"in the optimizer, but without a gradient in {count} iterations: "
        is_long = evidence.iterations >= MOST and 2 * count > MOST
        report("unused_parameters", text + listed(names, _NAMED), "warning" if is_long else "note", names)


def evaluation_mode(model: nn.Module, report: Report) -> None:
    """Report layers that depend on the mode, in a model that is trained in evaluation mode."""
    layers = tuple(name for name, module in named_modules(model) if _depends_on_mode(module))
    if layers:
        text = f"the model was trained in evaluation mode, which affects {listed(layers, _NAMED)}: call model.train()"
        report("evaluation_mode", text, "warning", layers)


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, _BATCH_NORMS):
        return module.running_mean is not None
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def _not_in_optimizer(evidence: Evidence, report: Report) -> None:
    copied = {*NARROW} - {item.dtype for item in parameters_of(evidence.optimizer)}  # may have float32 copies
    left = [item for item in evidence.others if id(item) in evidence.seen and item.dtype not in copied]
    if not (left and evidence.stepped) or evidence.others_change:
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
        report("not_in_optimizer", f"{text}, or set requires_grad=False", names=rest)
    if stale:
        text = f"{len(gone)} parameters of the optimizer are not the model's, {listed(stale, _NAMED)} are in none: "
        report("stale_optimizer", f"{text}create the optimizer after the last change of the model", names=stale)


def _no_gradients(evidence: Evidence, report: Report) -> None:
    trained = {id(item) for item in evidence.held if item.requires_grad}
    count = len(evidence.stepped)
    # An optimizer of another class may compute gradients, or keep them elsewhere.
    if not trained or count < 2 or not evidence.steps_of_torch:
        return
    if not evidence.seen.isdisjoint(trained):
        if evidence.loses_gradients:
            text = f"all gradients were 0 at each step in {count} iterations, and were not after the backward before: "
            report("no_gradients", f"{text}check the norm to which they are clipped, and zero_grad()", "warning")
        elif not (evidence.uses_gradients or evidence.held_change or evidence.rate_is_zero):
            text = f"the gradients were discarded before each step in {count} iterations, so no parameter changed: "
            report("no_gradients", f"{text}call zero_grad() before backward(), or after step()")
    else:
        text = f"no parameter of the optimizer had a gradient in {count} iterations with a step. Check for detach(), "
        report("no_gradients", f"{text}no_grad() and item() between the model's output and the loss")


def _wrapper_bypassed(evidence: Evidence, report: Report) -> None:
    if evidence.stepped and evidence.calls and not any(evidence.calls):
        text = "the module in DistributedDataParallel is called, the wrapper, which reduces gradients, is not: call it"
        report("wrapper_bypassed", text)


def _no_step(evidence: Evidence, report: Report) -> None:
    if evidence.stepped:
        return
    name, count, backwards = type(evidence.optimizer).__name__, evidence.discarded, len(evidence.initial_norms[0])
    text = f"{name} made no step in {evidence.iterations} iterations with {backwards} backward passes"
    if count > 1 and not (evidence.held_change or evidence.others_stepped):
        report("no_step", f"{text}, whose gradients were discarded {count} times: call optimizer.step()")
    else:
        report("no_step", f"{text}: steps are not checked", "note")


def _requires_grad_false(evidence: Evidence, report: Report) -> None:
    names = _names(evidence, (item for item in evidence.parameters if not item.requires_grad))
    if 0 < len(names) < len(evidence.parameters):
        text = f"{len(names)} of {len(evidence.parameters)} parameters do not require gradients: "
        report("requires_grad_false", text + listed(names, _NAMED), "note", names)


def _gradients_not_zeroed(evidence: Evidence, report: Report) -> None:
    if evidence.followed > 1 and evidence.keeps_gradients:
        text = f"the backward after each of {evidence.followed} steps added to the gradients of that step"
        report("gradients_not_zeroed", f"{text}: call optimizer.zero_grad()")


def _zero_learning_rate(evidence: Evidence, report: Report) -> None:
    if len(evidence.norms) > 1 and evidence.rate_is_zero:
        text = f"the learning rate of all parameter groups was 0 in {len(evidence.norms)} optimizer steps"
        report("zero_learning_rate", text, "warning")


def _large_momentum(evidence: Evidence, report: Report) -> None:
    if not isinstance(evidence.optimizer, (SGD, RMSprop)):  # the momentum of others may be a mean
        return
    groups = [group for group in evidence.optimizer.param_groups if not group.get("dampening")]
    largest = max((float(group["momentum"]) for group in groups), default=0.0)
    if largest > _LARGE_MOMENTUM:
        factor = f"up to {1 / (1 - largest):.3g} times" if largest < 1 else "without bound above"
        text = f"a momentum of {largest:g} makes steps grow to {factor} the learning rate times the gradient"
        report("large_momentum", text, "warning")


def _batch_repeats(evidence: Evidence, report: Report) -> None:
    batches = [batch for batch in evidence.batches if batch is not None]
    if len(batches) == COMPARED and all(torch.equal(batch, batches[0]) for batch in batches):
        text = f"the first {COMPARED} batches are bitwise equal: check the data loader, unless each is all data"
        report("batch_repeats", text, "warning")


def _names(evidence: Evidence, parameters: Iterable[Any]) -> tuple[str, ...]:
    return tuple(evidence.names[id(item)] for item in parameters)


FINDINGS = (
    *(_not_in_optimizer, _no_gradients, _wrapper_bypassed, _no_step, _requires_grad_false, _gradients_not_zeroed),
    *(_zero_learning_rate, _large_momentum, _batch_repeats, _unused_parameters),
)

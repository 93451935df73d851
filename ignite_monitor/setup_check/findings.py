"""Faults of the setup: one function of the evidence for each."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ignite_monitor.model.names import held_by, listed, named_modules, parameters_of
from ignite_monitor.model.sampling import NARROW
from ignite_monitor.setup_check.evidence import Evidence

_NAMED = 5
_UNUSED_FROM = 0.05  # of the optimizer's elements; less are mask tokens and poolers of released models
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Finding(NamedTuple):
    """A fault or a note, with the arguments of :meth:`Monitor.report`."""

    kind: str
    text: str
    severity: str = "problem"
    names: tuple[str, ...] = ()


def find_all(evidence: Evidence, epoch_length: int | None) -> list[Finding]:
    """Return all findings but that of :func:`unused_parameters`, which may take more iterations."""
    return [
        *_without_optimizer(evidence),
        *_without_requires_grad(evidence),
        *_without_step(evidence),
        *_without_gradient(evidence),
        *_gradients_not_zeroed(evidence),
        *_zero_learning_rate(evidence),
        *_evaluation_mode(evidence),
        *_wrapper_bypassed(evidence),
        *_batch_repeats(evidence, epoch_length),
        *_low_precision_updates(evidence),
    ]


def idle_parameters(evidence: Evidence) -> list[Any]:
    """Return the optimizer's parameters without a gradient so far, if they are a part that counts."""
    trained = evidence.trained
    idle = [item for item in trained if id(item) not in evidence.seen]
    share = sum(item.numel() for item in idle) / max(sum(item.numel() for item in trained), 1)
    return idle if evidence.steps and _UNUSED_FROM <= share < 1 else []


def unused_parameters(evidence: Evidence) -> Iterator[Finding]:
    """Find parameters of the optimizer without a gradient; a note if they are in a list of which others have one."""
    idle = idle_parameters(evidence)
    lists = [f"{path}." if path else "" for path, module in named_modules(evidence.model) if isinstance(module, _LISTS)]
    used = [name for key, name in evidence.names.items() if key in evidence.seen]
    lazy = tuple(path for path in lists if any(name.startswith(path) for name in used))
    names = _names(evidence, idle)
    certain = tuple(name for name in names if not name.startswith(lazy))
    count = len(evidence.iterations)
    if certain:
        share = sum(item.numel() for item in idle) / sum(item.numel() for item in evidence.trained)
        text = f"in the optimizer ({share:.0%} of its elements), but without a gradient in {count} iterations: "
        yield Finding("unused_parameters", text + listed(names, _NAMED), "warning", names)
    elif names:
        text = f"of their list only others had a gradient in {count} iterations: {listed(names, _NAMED)}"
        yield Finding("unused_parameters", text, "note", names)


def _without_optimizer(evidence: Evidence) -> Iterator[Finding]:
    copied = {*NARROW} - {item.dtype for item in parameters_of(evidence.optimizer)}  # may have float32 copies
    left = [item for item in evidence.others if id(item) in evidence.seen and item.dtype not in copied]
    if not left or not evidence.steps or evidence.moved[1]:
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
        yield Finding("not_in_optimizer", f"{text}, or set requires_grad=False", "problem", rest)
    if stale:
        text = f"{len(gone)} parameters of the optimizer are not the model's, {listed(stale, _NAMED)} are in none"
        yield Finding(
            "stale_optimizer", f"{text}: create the optimizer after the last change of the model", names=stale
        )


def _without_requires_grad(evidence: Evidence) -> Iterator[Finding]:
    names = _names(evidence, (item for item in evidence.parameters if not item.requires_grad))
    if names and len(names) < len(evidence.parameters):
        text = (
            f"{len(names)} of {len(evidence.parameters)} parameters do not require gradients: {listed(names, _NAMED)}"
        )
        yield Finding("requires_grad_false", text, "note", names)


def _without_step(evidence: Evidence) -> Iterator[Finding]:
    if evidence.steps:
        return
    name, count = type(evidence.optimizer).__name__, len(evidence.iterations)
    backwards = [norm for iteration in evidence.iterations for norm in iteration.norms_before]
    if len(backwards) > 1 and not any(backwards) and not evidence.moved[0]:
        text = (
            f"{name} made no step in {count} iterations, and the gradients of {len(backwards)} of them were discarded"
        )
        yield Finding("no_step", f"{text}: call optimizer.step()")
    else:
        text = f"{name} made no step in {count} iterations, {len(backwards)} of them with a backward: steps not checked"
        yield Finding("no_step", text, "note")


def _without_gradient(evidence: Evidence) -> Iterator[Finding]:
    trained, steps = evidence.trained, len(evidence.steps)
    if trained and steps > 1 and _are_of_torch(evidence) and evidence.seen.isdisjoint(map(id, trained)):
        text = (
            f"no parameter of the optimizer had a gradient in {steps} steps. Check for detach(), no_grad() and item()"
        )
        yield Finding("no_gradients", f"{text} between the model's output and the loss")


def _gradients_not_zeroed(evidence: Evidence) -> Iterator[Finding]:
    steps: list[list[float]] = []  # the norm of its gradients, and those that the backward passes after it found
    for iteration in evidence.iterations:
        for step in steps[-1:]:
            step.extend(iteration.norms_before)
        if iteration.has_step:
            steps.append([iteration.numbers.get("norm_at_step", 0.0)])
    # Backward passes of other losses may come before zero_grad().
    kept = [found[0] == norm and all(found) for norm, *found in steps if found]
    if len(kept) > 1 and all(kept):
        text = f"the backward after each of {len(kept)} steps added to the gradients of that step"
        yield Finding("gradients_not_zeroed", f"{text}: call optimizer.zero_grad()")


def _zero_learning_rate(evidence: Evidence) -> Iterator[Finding]:
    rates = [iteration.numbers.get("rate") for iteration in evidence.steps]
    if len(rates) > 1 and all(rate == 0 for rate in rates):
        text = f"the learning rate of all parameter groups was 0 in {len(rates)} optimizer steps"
        yield Finding("zero_learning_rate", text, "warning")


def _evaluation_mode(evidence: Evidence) -> Iterator[Finding]:
    layers = [name for name, module in named_modules(evidence.model) if _depends_on_mode(module)]
    if layers and evidence.seen and not any(iteration.is_training for iteration in evidence.iterations):
        text = f"the model was trained in evaluation mode, on which {listed(layers, _NAMED)} depend: call model.train()"
        yield Finding("evaluation_mode", text, "warning", tuple(layers))


def _wrapper_bypassed(evidence: Evidence) -> Iterator[Finding]:
    calls = [call for iteration in evidence.iterations for call in iteration.calls]
    if evidence.steps and calls and not any(calls):
        text = "the module in DistributedDataParallel is called, without reducing gradients: call the wrapper"
        yield Finding("wrapper_bypassed", text)


def _batch_repeats(evidence: Evidence, epoch_length: int | None) -> Iterator[Finding]:
    same = [item.numbers["same"] for item in evidence.iterations if "same" in item.numbers]
    if len(same) > 1 and all(same) and epoch_length != 1:
        yield Finding(
            "batch_repeats", f"the first {len(same)} batches are bitwise equal: check the data loader", "warning"
        )


def _low_precision_updates(evidence: Evidence) -> Iterator[Finding]:
    lost = [item.numbers["lost"] for item in evidence.steps if item.numbers.get("lost") is not None]
    is_warm_up = len({item.numbers.get("rate") for item in evidence.steps}) > 1
    if (
        len(lost) > 1 and min(lost) > 0.5 and _are_of_torch(evidence) and not is_warm_up
    ):  # others may round stochastically
        text = f"rounding lost at least {min(lost):.0%} of the weight updates: use float32 weights and autocast"
        yield Finding("low_precision_updates", text, "warning")


def _are_of_torch(evidence: Evidence) -> bool:
    return all(kind.__module__.startswith("torch.optim.") for kind in evidence.kinds)


def _names(evidence: Evidence, parameters: Iterable[Any]) -> tuple[str, ...]:
    return tuple(evidence.names.get(id(item), "?") for item in parameters)


def _depends_on_mode(module: nn.Module) -> bool:
    """Return True for a module whose forward pass reads ``training``, unless its dropout is 0."""
    code = getattr(type(module).forward, "__code__", None)
    if "training" not in getattr(code, "co_names", ()):
        return False
    rates = [value for name, value in vars(module).items() if name == "p" or "drop" in name]
    numbers = [value for value in rates if isinstance(value, (float, int))]
    return any(numbers) if numbers else not any(module.children())  # a part of torch asks for its fast path

"""Evidence of faults in the setup of a training run, and what follows from it."""

from __future__ import annotations

import gc
from collections import defaultdict
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ignite_monitor.model.dtensor import local
from ignite_monitor.model.names import held_by, listed, named_parameters, parameters_of, unwrapped
from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.sampling import NARROW, is_measurable
from ignite_monitor.model.tensors import is_same, leaves_of
from ignite_monitor.routing.decisions import is_of_transformers

TEXTS = {
    "not_optimized": "in no optimizer, but with requires_grad=True: {}. Add them to one, or set requires_grad=False",
    "no_gradient": "in the optimizer ({:.0%} of its elements), but without a gradient in the first {} iterations: {}",
    "gradients_not_zeroed": "every backward adds to the gradients of the previous step: call optimizer.zero_grad()",
    "stale_optimizer": "{} parameters of the optimizer are not the model's, {} are in none: create the optimizer last",
    "zero_learning_rate": "the learning rate of all parameter groups was 0 in {} optimizer steps",
    "eval_mode": "the model is trained in evaluation mode: call model.train()",
    "wrapper_bypassed": "the module in DistributedDataParallel is called, without reducing gradients: call the wrapper",
    "scaler_not_given": "a GradScaler scales the gradients that {} measures: give the argument scaler",
    "repeated_batch": "the batches of {} iterations are bitwise equal: check the data loader",
    "constant_loss": "the loss was {:.6g} in {} iterations, with the same gradient norm: the steps have no effect",
    "low_precision_updates": "rounding lost at least {:.0%} of the weight updates: use float32 weights and autocast",
}


class Finding(NamedTuple):
    """A fault: a key of ``TEXTS``, and a sentence with advice."""

    kind: str
    text: str


class Evidence:
    """Measurements of the checked iterations; tensors among ``values`` become numbers before :meth:`findings`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, parameters: list[Any], state: Any) -> None:
        self.model, self.optimizer, ids = model, optimizer, held_by(optimizer)
        self.first, self._batch = state.iteration, leaves_of(state.batch)
        self.held = [item for item in parameters if id(item) in ids]
        others = [item for item in parameters if id(item) not in ids and item.requires_grad and is_measurable(item)]
        self.others = [item for item in others if local(item).numel()]  # also on this rank
        self.norm, self.values = total_norm(self.others), defaultdict[str, list[Any]](list)
        self.seen: set[int] = set()  # ids of parameters with a gradient

    def start(self, batch: Any) -> None:
        """Note the start of an iteration."""
        for name, value in (("same", is_same(self._batch, leaves_of(batch))), ("step", 0), ("backward", 0)):
            self.values[name].append(value)
        self.note()

    def note(self) -> None:
        """Note the mode, and the parameters that have a gradient."""
        self.values["mode"].append(any(module.training for module in unwrapped(self.model).modules()))
        self.seen.update(id(item) for item in (*self.held, *self.others) if item.grad is not None)

    def findings(self, epoch_length: int | None) -> list[Finding]:
        """Return all faults that are certain."""
        values, count, groups = self.values, len(self.values["step"]), len(self.optimizer.param_groups)
        rates, losses, norms, always = values["rate"], values["loss"], values["norm"], count > 1 and all(values["step"])
        is_known = all(type(item).__module__.startswith("torch.optim.") for item in values["optimizer"])
        is_lost = len(values["lost"]) > 1 and min(values["lost"]) > 0.5 and is_known  # others may round stochastically
        is_warm_up = any(rate != rates[i % groups] for i, rate in enumerate(rates))
        is_kept = all(values["before"][1:]) and values["before"][1:] == norms[:-1]
        is_constant = norms and losses[0] and all(item == group[0] for group in (losses, norms) for item in group)
        calls = [is_wrapper for is_wrapper, has_gradient in values["call"] if has_gradient]
        conditions: dict[str, tuple[Any, list[Any]]] = {
            **self._of_parameters(),
            "gradients_not_zeroed": (always and is_kept and values["backward"] == values["step"] == [1] * count, []),
            "zero_learning_rate": (len(rates) > groups and not any(rates), [len(rates) // groups]),
            "eval_mode": (self.seen and not any(values["mode"]), []),
            "wrapper_bypassed": (any(values["step"]) and calls and not any(calls), []),
            "scaler_not_given": (values["unscaled"], [", ".join(values["unscaled"])]),
            "repeated_batch": (count > 1 and epoch_length != 1 and all(values["same"]), [count]),
            "constant_loss": (always and is_constant, [losses[0], count]),
            "low_precision_updates": (is_lost and not is_warm_up, values["lost"] and [min(values["lost"])]),
        }
        return [Finding(kind, TEXTS[kind].format(*words)) for kind, (is_true, words) in conditions.items() if is_true]

    def _of_parameters(self) -> dict[str, tuple[Any, list[Any]]]:
        names = {id(parameter): name for name, parameter, _ in named_parameters(self.model)}
        trained = [item for item in self.held if item.requires_grad]
        blocks = [item for item in self.model.modules() if any(map(is_of_transformers, item.children()))]
        experts = {id(parameter) for block in blocks for parameter in block.parameters()}  # may get no tokens
        idle = [item for item in trained if id(item) not in self.seen | experts]
        share = sum(item.numel() for item in idle) / max(sum(item.numel() for item in trained), 1)
        is_left = any(self.values["step"]) and all(self.values["unchanged"])
        copied = {*NARROW} - {item.dtype for item in parameters_of(self.optimizer)}  # may have float32 copies
        left = [item for item in self.others if id(item) in self.seen and is_left and item.dtype not in copied]
        # Also those without a step; there may be millions of objects to look at.
        alive = [item for item in gc.get_objects() if issubclass(type(item), Optimizer)] if left else []
        held = set().union(*(held_by(item) for item in alive if hasattr(item, "param_groups")))
        left = [item for item in left if id(item) not in held]
        gone = [item for item in parameters_of(self.optimizer) if id(item) not in names and item.grad is None]
        stale = [item for item in left if any(item.shape == other.shape for other in gone)]
        rest = [item for item in left if all(item.shape != other.shape for other in gone)]
        words = [listed([names.get(id(item), "?") for item in items], 5) for items in (idle, stale, rest)]
        return {
            "not_optimized": (rest, [words[2]]),
            "no_gradient": (0.05 <= share < 1, [share, len(self.values["step"]), words[0]]),  # less: mask tokens
            "stale_optimizer": (stale, [len(gone), words[1]]),
        }

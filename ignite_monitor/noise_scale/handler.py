"""GradientNoiseScaleHandler: how large a batch may be before a larger one gains nothing."""

from __future__ import annotations

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_monitor.checks import check_count, check_function, check_real
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import NOISE_SCALE
from ignite_monitor.model._torch import current_backward, foreach_norm
from ignite_monitor.model.devices import upload, wide_dtype
from ignite_monitor.model.eager import out_of_compiler
from ignite_monitor.model.modes import aside
from ignite_monitor.model.norms import any_sharded, summed_values
from ignite_monitor.model.optimizers import check_holds, check_optimizer
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.model.tensors import count_items
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import all_take_part, sum_over_ranks, world_size
from ignite_monitor.noise_scale.estimate import RatioOfMeans, noise_and_signal

_WIDEST = 10.0  # upper end of an interval over its lower one
_PATIENCE = 50  # monitored steps without a value, after which a warning says why


class GradientNoiseScaleHandler(Monitor, schema=NOISE_SCALE):
    r"""Estimates the simple noise scale: the batch size at which noise and signal of a gradient are equally large.

    .. math:: B = \frac{\mathrm{tr}\,\Sigma}{|G|^2}

    with the covariance :math:`\Sigma` of the gradients of single items, and the true gradient G (arXiv:1812.06162,
    equation 2.9). With batches much smaller than B a batch of twice the size halves the number of steps; with much
    larger ones it gains hardly anything.

    Both are estimated without bias from the gradients of the parts that an optimizer step is made from: micro-batches,
    ranks of DistributedDataParallel, or both (appendix A.1, for parts of any size). Each has to be the gradient of a
    mean over its own items. Numerator and denominator are smoothed apart, since their ratio in a single step means
    nothing.

    {keys}

    The value is the ratio of the averages over the last ``1 / (1 - decay)`` steps, and the interval is one of 95 % for
    it: in small trainings it held the exact ratio of these averages in 91 to 99 % of the looks. The noise scale mostly
    grows, and the value lags behind: that of the step itself lay in the interval in 22 to 62 % of the looks, with
    ``decay=0.95`` in 62 to 91 %, but then two looks of five had no value. Where the interval spans more than a factor
    of ten there is none: the gradients seen do not tell.

    Steps with another number of backward passes than ``micro_batches`` are left out, as are those whose gradient did
    not start from zero, was changed between two backward passes, or is not finite. Where a window of gradients extends
    over several iterations all of them have to be monitored.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: the optimizer whose parameters count.
        micro_batches: how many backward passes an optimizer step is made from, each over items of its own.
        items: from a batch, as the train step gets it, to how many items it holds, which the backward passes share
            equally, or to a list of how many each of these has; None for the length of its first tensor.
        decay: how slowly earlier steps are forgotten, between 0 and 1.
        prefix: what the values' names start with.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, the optimizer holds none of the model's parameters, they
            are sharded, or there is one micro-batch and no DistributedDataParallel, so that nothing can be compared.

    Examples:
        .. code-block:: python

            noise = GradientNoiseScaleHandler(model, optimizer, micro_batches=4)
            noise.attach(trainer)
            noise.log_to(tensorboard_logger, trainer)
    """

    _state_dict_all_req_keys = ("moments",)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        micro_batches: int = 1,
        items: Callable[[Any], float | Sequence[float]] | None = None,
        decay: float = 0.99,
        prefix: str = "noise_scale",
    ) -> None:
        super().__init__(model, prefix)
        check_whole(model)
        check_optimizer(optimizer)
        check_holds(optimizer, model)
        if any_sharded(model.parameters()):
            raise ValueError("Argument model should not be sharded: no rank has a gradient of its own part of a batch")
        self._over_ranks = any(isinstance(each, DistributedDataParallel) for each in model.modules())
        self.micro_batches = check_count("micro_batches", micro_batches, least=1)
        if micro_batches == 1 and not self._over_ranks:
            raise ValueError(
                "Argument micro_batches should be at least 2 without DistributedDataParallel, but given 1: make each "
                "optimizer step from several backward passes, each over a part of the batch"
            )
        check_function("items", items, "the batch")
        self.optimizer = optimizer
        self.items = items
        self._ratio = RatioOfMeans(check_real("decay", decay, above=0, below=1))
        self._window: list[_Part] = []  # what the next optimizer step is made from
        self._closed: list[list[_Part]] = []
        self._iteration = -1
        self._items: float | Sequence[float] | None = None
        self._steps_without = 0

    def state_dict(self) -> OrderedDict[str, Any]:
        """The moments that numerator and denominator are derived from."""
        return OrderedDict(moments=self._ratio.moments.cpu())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        moments = state_dict["moments"]
        if not isinstance(moments, Tensor) or moments.shape != (7,):
            raise TypeError(f"Argument state_dict should hold seven moments, but it holds {moments}")
        self._ratio.moments = moments.detach().clone()

    # What it listens to

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def start_iteration(self, engine: Engine) -> None:
        if engine.state.iteration != self._iteration + 1:
            self._window.clear()  # backward passes went unseen
        self._iteration = engine.state.iteration
        self._closed = []
        batch = engine.state.batch
        self._items = count_items(batch) if self.items is None else self.items(batch)

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        return [self._hooks()] if self._is_running else []

    def reset_run_state(self) -> None:
        self._window, self._closed = [], []
        self._iteration = -1

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Hooks that see what a backward is about to add to each gradient, before ranks put theirs together."""
        if self._source is None:
            return
        tracker = self._source.tracker(self.model)
        parameters = [
            each for each in tracker.parameters_of(self.optimizer) if each.requires_grad and not each.is_inference()
        ]
        increments = _Increments(weakref.WeakMethod(self._add), parameters)
        hook = functools.partial(out_of_compiler(_Increments.before_adding), increments)
        handles = [each.register_hook(hook) for each in parameters]
        tracker.observers.append(increments)
        try:
            yield
        finally:
            tracker.observers.remove(increments)
            for handle in handles:
                handle.remove()

    def _add(self, part: _Part) -> None:
        if part.before is None:
            self._window.clear()  # what there was has been thrown away
        self._window.append(part)

    def _on_gradients_ready(self, engine: Engine, ready: GradientsReady) -> None:
        if self._window and ready.reaches(self.optimizer):
            self._window[-1].is_reduced = True

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        if step.is_of(self.optimizer):
            self._closed.append(self._window)
            self._window = []

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        new = [part for window in (*self._closed, self._window) for part in window if part.items is None]
        # A backward after the last step may be one of another batch, through a model that is not being trained.
        is_clear = not (self._closed and self._window)
        for part, items in zip(new, _shared(self._items, len(new), is_clear), strict=True):
            part.items = items
        for window in self._closed:
            self._observe(window)
        self._closed = []

    def _observe(self, window: list[_Part]) -> None:
        if self._over_ranks and not all_take_part(self.model):
            return
        reason = self._lacks(window)
        device = next(self.model.parameters()).device
        sums = torch.full((5,), math.nan, dtype=wide_dtype(device), device=device)
        if reason is None:
            self._steps_without = -1
            sums = _sums(window)
        else:
            self._warn_without(reason)
        if self._over_ranks:  # where one lacks something the others know by its NaN
            sums = sum_over_ranks(sums)
        square_sum, weighted_sum, items, count, total = sums.unbind()
        if self._over_ranks:  # DistributedDataParallel has left the ranks' mean on each
            total = total * world_size()
        new = noise_and_signal(square_sum, weighted_sum, items, total, count)
        self._ratio.observe(new)
        interval = self._ratio.interval()
        _, low, high = interval.unbind()
        is_known = (low > 0) & (high <= _WIDEST * low) & new.isfinite().all()
        value, low, high = torch.where(is_known, interval, math.nan).unbind()
        self.publish(value=value, low=low, high=high, batch=items)

    def _lacks(self, window: list[_Part]) -> str | None:
        """Why a window tells nothing; None where it does."""
        if len(window) != self.micro_batches or not window[-1].is_reduced:
            return (
                f"the last was made from {len(window)} backward passes in monitored iterations, and micro_batches is "
                f"{self.micro_batches}"
            )
        if any(math.isnan(part.items or math.nan) for part in window):
            return "how many items each backward pass had is not known: give the argument items"
        return None

    def _warn_without(self, reason: str) -> None:
        if self._steps_without >= 0:
            self._steps_without += 1
        if self._steps_without == _PATIENCE:
            self.logger.warning("%s: no value after %d optimizer steps: %s", self.prefix, _PATIENCE, reason)


class _Part:
    """What one backward has added to the gradients.

    Attributes:
        square: its squared norm.
        before: the squared norm of what it was added to; None where there was nothing.
        after: that of the gradients that it has left.
        is_reduced: whether these are the ranks' mean.
        items: of how many items it is the gradient; NaN where that can't be known, None as long as it is not.
    """

    def __init__(self, square: Tensor, before: Tensor | None, after: Tensor) -> None:
        self.square = square
        self.before = before
        self.after = after
        self.is_reduced = False
        self.items: float | None = None


def _sums(window: list[_Part]) -> Tensor:
    """What :func:`noise_and_signal` needs of a window, the squared norm last: NaN where it was changed on the way."""
    squares = torch.stack([part.square for part in window])
    counts = torch.tensor([part.items for part in window], dtype=squares.dtype, device="cpu")
    items = upload(counts, squares.device)
    nothing = squares.new_zeros(())
    befores = torch.stack([nothing if part.before is None else part.before for part in window])
    afters = torch.stack([nothing, *(part.after for part in window)])
    # Each adds to what the one before has left, and the first to nothing.
    adds = torch.isclose(befores, afters[:-1], atol=0.0).all()
    left = torch.where(adds, afters[-1], math.nan)
    return torch.stack([squares.sum(), (items * squares).sum(), items.sum(), torch.ones_like(squares).sum(), left])


class _Increments:
    """Collects the norms of what each backward adds; those that turn out to be ``autograd.grad`` are dropped."""

    def __init__(self, add: weakref.WeakMethod[Callable[[_Part], None]], parameters: list[nn.Parameter]) -> None:
        self._add = add
        self._parameters = parameters
        self._before: dict[int, Tensor | None] = {}  # by number of the backward
        self._norms: dict[int, list[Tensor]] = {}

    def before_adding(self, gradient: Tensor) -> None:
        """A backward is about to add to a gradient."""
        task = current_backward()
        with aside():
            if task not in self._norms:
                self._before[task] = self._square()
                self._norms[task] = []
            self._norms[task] += _norms([gradient.detach()])

    def backward_ended(self, task: int, reached: Set[int], running: Set[int]) -> None:
        """A backward that has reached parameters of the model has ended; the others have left nothing."""
        norms, add = self._norms.pop(task, None), self._add()
        with aside():
            after = self._square()
            if norms and after is not None and add is not None:
                add(_Part(torch.stack(norms).square().sum(), self._before[task], after))
        self._norms.clear()
        self._before.clear()

    def _square(self) -> Tensor | None:
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        return torch.stack(_norms(gradients)).square().sum() if gradients else None


def _shared(items: Any, count: int, is_clear: bool) -> list[float]:
    """How many items each of some backward passes had; NaN where that can't be known.

    Args:
        items: those of each, or of all of them.
        is_clear: whether all of them share a batch.
    """
    if isinstance(items, Sequence):
        return [float(each) for each in items] if len(items) == count else [math.nan] * count
    is_equal = is_clear and items is not None and count and float(items) % count == 0
    return [float(items) / count if is_equal else math.nan] * count


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each, in the widest dtype: a difference of their squares is what counts."""
    plain = [summed_values(each) if each.is_sparse else each for each in tensors]
    real = [torch.view_as_real(each) if each.is_complex() else each for each in plain]
    return foreach_norm(real, 2.0, dtype=wide_dtype(tensors[0].device))

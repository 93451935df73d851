"""The loss that belongs to a gradient: the mean over the micro-batches that have been accumulated in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.monitor.ranks import all_take_part, sum_over_ranks, world_size

LossSource = nn.Module | Callable[[Any], Any]


class Losses:
    """Collects losses from one step of the optimizer to the next.

    Args:
        source: a module whose output is the loss, or a function of the engine that is asked when a backward has ended.
        model: the model, whose wrapper says whether every rank takes part.

    Raises:
        TypeError: if the source is neither.
    """

    def __init__(self, source: LossSource, model: nn.Module) -> None:
        if not callable(source):
            raise TypeError(f"Argument loss should be a module or a function of the engine, but given {type(source)}")
        self._source, self._model = source, model
        self._sum_and_count: Tensor | None = None
        self._earlier: Tensor | None = None  # of a gradient that may have been given up, or may grow

    @contextmanager
    def listening(self) -> Iterator[None]:
        """What has to be around a train step."""
        if not isinstance(self._source, nn.Module):
            yield
            return
        handle = self._source.register_forward_hook(lambda module, arguments, output: self._add_output(output))
        try:
            yield
        finally:
            handle.remove()

    def backward_ended(self, engine: Any) -> None:
        """A backward has ended: ask the function, if it is one."""
        if not isinstance(self._source, nn.Module):
            self._add(self._source(engine))

    def mean(self, device: torch.device) -> Tensor:
        """The mean of what there is, over ranks too, in one collective if there are several; 0 if there is nothing.

        Every rank calls it after every backward. Under ``join()`` some may be gone: then there is nothing.
        """
        wide = wide_dtype(device)
        both = torch.zeros(2, dtype=wide, device=device)
        if self._sum_and_count is not None:
            both = move(self._sum_and_count.to(wide), device)
        if world_size() > 1:
            both = sum_over_ranks(both) if all_take_part(self._model) else torch.zeros_like(both)
        total, count = both.unbind()
        return torch.where(count > 0, total / count, 0.0)

    def forget(self) -> None:
        """The gradient is used up."""
        self._sum_and_count = self._earlier = None

    def set_aside(self) -> None:
        """The gradient may have been given up, or may grow."""
        self._earlier, self._sum_and_count = self._sum_and_count, None

    def decided(self, grows: Tensor) -> None:
        """Whether it grows is known, a 0-dim bool tensor."""
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            self._include(torch.where(move(grows, earlier.device), earlier, 0.0))

    def _add_output(self, output: Any) -> None:
        # What is evaluated without gradients belongs to none.
        if isinstance(output, Tensor) and output.requires_grad:
            self._add(output)

    def _add(self, loss: Any) -> None:
        if loss is None:
            return
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss), device="cpu")
        with torch.no_grad():
            value = value.to(wide_dtype(value.device)).mean()
            self._include(torch.stack((value, torch.ones_like(value))))

    def _include(self, both: Tensor) -> None:
        if self._sum_and_count is not None:
            both = both + move(self._sum_and_count, both.device)
        self._sum_and_count = both

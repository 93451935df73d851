"""ReplicaCheckHandler: exact comparison of weights, buffers and optimizer state between ranks."""

from __future__ import annotations

import math
from collections import Counter

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_type
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import REPLICAS
from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.dtensor import reshard
from ignite_monitor.model.names import Pattern, Selection, tags
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import all_take_part, own_rank, sum_over_ranks, world_size
from ignite_monitor.monitor.transfer import DeferredFlag
from ignite_monitor.replicas.items import (
    Items,
    as_numbers,
    first_holders,
    hash_of,
    hashes_of,
    is_dtensor_item,
    items_of,
    rng_items,
)

_OTHERS = "items that are new, or not on all ranks"
_NAMED = 8


class ReplicaCheckHandler(Monitor, schema=REPLICAS):
    r"""Check that all ranks hold the same weights, buffers, optimizer state and iteration.

    After the train step every tensor is hashed to 64 bits, exactly: one flipped bit or two exchanged elements change
    the hash. One collective compares the hashes of all ranks. A warning names what differs, and the ranks with the
    rarer value; if there is none, those that differ from the first rank.

    {keys}

    Every part of a DTensor is compared among the ranks that hold it. Skipped are the running statistics of
    unsynchronized batch norms, and sparse, nested and packed tensors. All ranks have to monitor the same iterations.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: the optimizer whose state to compare; None for none.
        exclude: a regular expression; items in whose name it matches are not compared, such as buffers of one rank.
        random_state: compare the RNG state of torch, Python and NumPy; it often differs on purpose, for dropout.
        hashes: publish the hash of every tensor, with one rank too; ``ignite-monitor compare`` then names the first
            iteration and tensor in which two runs differ.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument is of another type.

    Examples:
        .. code-block:: python

            check = ReplicaCheckHandler(model, optimizer)
            check.attach(trainer, Events.ITERATION_STARTED(every=100))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        exclude: Pattern = None,
        random_state: bool = False,
        hashes: bool = False,
        prefix: str = "replicas",
    ) -> None:
        super().__init__(model, prefix)
        if optimizer is not None:
            check_optimizer(optimizer, optional=True)
        check_type("random_state", random_state, bool, "bool")
        check_type("hashes", hashes, bool, "bool")
        self.optimizer = optimizer
        self.random_state, self.hashes = random_state, hashes
        self._selection = Selection(exclude=exclude)
        self._differ = DeferredFlag()
        self._reported: dict[str, list[int]] = {}  # name -> ranks
        self._forget_names()

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def start_iteration(self, engine: Engine) -> None:
        self._warn(wait=False)

    def reset_run_state(self) -> None:
        self._warn(wait=True)
        self._forget_names()

    def _forget_names(self) -> None:
        self._checks = 0  # since names were first set up
        self._names: list[str] = []  # that all ranks have, sorted
        self._holders: list[list[int]] = []  # for every name, and all other items together
        self._holder_table: Tensor | None = None
        self._table: Tensor | None = None  # hashes of the last check by rank, for a warning

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        world, device = world_size(), device_of(self.model)
        if world == 1:
            self.publish(in_sync=torch.ones((), device=device), differing_count=torch.zeros((), device=device))
        if not (world > 1 or self.hashes) or not all_take_part(self.model):
            return
        # Every rank makes the same collectives, of the same size, whatever it holds and whatever fails.
        items, hashes = None, None
        try:
            items = self._items(engine, device)
            hashes = hashes_of(items, device)
        except Exception as error:  # noqa: BLE001 - the other ranks are about to wait in a collective
            self._warn_once("nothing is compared, since the state of this rank can't be read: %s", error)
        if self.hashes and items is not None and hashes is not None:
            names = [f"hash/{name}" for name in tags(items)]
            self.publish_table(names, as_numbers(hashes[: len(names)]))
        if world == 1:
            return
        self._checks += 1
        if self._checks & (self._checks - 1) == 0:  # the first, second, fourth, … check
            self._set_up(items or {}, world, device)
        if self._holder_table is not None:
            row = torch.zeros(len(self._names) + 2, dtype=torch.int64, device=device)
            row[-1:].fill_(hashes is None)
            if items is not None and hashes is not None:
                row[:-1] = self._in_order(items, hashes)
            self._compare(row, self._holder_table)

    def _items(self, engine: Engine, device: torch.device) -> Items:
        reshard(self.model)
        items = items_of(self.model, self.optimizer)
        items |= {"the iteration": engine.state.iteration, "the epoch": engine.state.epoch}
        items |= rng_items(device) if self.random_state else {}
        return {name: item for name, item in items.items() if name in self._selection}

    def _set_up(self, items: Items, world: int, device: torch.device) -> None:
        """Compare by this rank's names if all ranks have the same; else by those of the last set-up."""
        names = sorted(items)
        hashes = torch.zeros(world, dtype=torch.int64, device="cpu")
        hashes[own_rank()] = hash_of(names)
        everyone = sum_over_ranks(move(hashes, device)).tolist()
        if names and len(set(everyone)) == 1:
            self._names = names
        if self._names == names or self._holder_table is None:
            self._holders = [*(first_holders(items.get(name), world) for name in self._names), [0] * world]
            self._holder_table = move(torch.tensor(self._holders, device="cpu").T.contiguous(), device)

    def _in_order(self, items: Items, hashes: Tensor) -> Tensor:
        """Return the hashes of all names, 0 for missing items, and one hash of all items without a name."""
        known, place = set(self._names), {name: i for i, name in enumerate(items)}
        others = [name for name in items if name not in known and not is_dtensor_item(items[name])]
        index, key = (
            move(torch.tensor(column, dtype=torch.int64, device="cpu"), hashes.device)
            for column in ([place.get(name, -1) for name in self._names + others], list(map(hash_of, others)))
        )
        named, unnamed = hashes[index].split([len(self._names), len(others)])
        return torch.cat([named, ((unnamed + key) * (2 * key + 1)).sum().reshape(1)])

    def _compare(self, row: Tensor, holders: Tensor) -> None:
        """Compare the hashes of all ranks, of which the last element is 1 if the rank has none."""
        table = torch.zeros((len(holders), len(row)), dtype=torch.int64, device=row.device)
        table[own_rank()] = row
        table = sum_over_ranks(table)
        hashes, failed = table[:, :-1], table[:, -1].any()
        differs = (hashes != hashes.gather(0, holders)).any(0)
        any_differs = differs.any() & ~failed
        # What is not compared by name can't be counted.
        unknown = failed | differs[-1] if self._names else failed | any_differs
        self._differ.set(any_differs)
        self._table = hashes
        self.publish(
            in_sync=torch.where(failed, math.nan, (~any_differs).float()),
            differing_count=torch.where(unknown, math.nan, differs.sum().float()),
        )
        self._warn(wait=False)

    def _warn(self, wait: bool) -> None:
        """Name the items and ranks that differ, as soon as the host knows of it."""
        if not self._differ.take(wait) or self._table is None:
            return
        differing: dict[str, list[int]] = {}
        for name, hashes, holders in zip([*self._names, _OTHERS], self._table.T.tolist(), self._holders, strict=True):
            odd: list[int] = []
            for part in set(holders):
                ranks = [rank for rank, holder in enumerate(holders) if holder == part]
                usual = Counter(hashes[rank] for rank in ranks).most_common(1)[0][0]
                odd += [rank for rank in ranks if hashes[rank] != usual]
            if odd:
                differing[name] = odd
        new = [name for name, odd in differing.items() if not set(odd) <= set(self._reported.get(name, ()))]
        self._reported = differing
        if new:
            named = [f"{name} (rank {', '.join(map(str, differing[name]))})" for name in new[:_NAMED]]
            more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
            self.logger.warning("%s: the ranks differ in %s%s", self._title, ", ".join(named), more)

"""ReplicaCheckHandler: exact comparison of weights, buffers and optimizer state between ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Engine
from torch import nn
from torch.optim import Optimizer

from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import REPLICAS
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.dtensor import all_reduce, reshard
from ignite_monitor.model.hashes import hashes_of
from ignite_monitor.model.names import Pattern, Selection
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.monitor.transfer import DeferredFlag, NamedValues
from ignite_monitor.replicas.items import items_of, replica_groups

_SHOWN = 8  # ranks, and items of each, in a report


class ReplicaCheckHandler(Monitor, schema=REPLICAS):
    r"""Check that all ranks hold the same weights, buffers, optimizer state and iteration.

    After the train step every tensor is hashed to 64 bits. One collective compares a hash of all these hashes over the
    ranks, or over every dimension of a device mesh. If a check finds a difference, the next one reports the items and
    the ranks that differed from the first rank.

    {keys}

    Every part of a DTensor is compared among the ranks that hold it. Skipped are the running statistics of
    unsynchronized batch norms, and sparse, nested and packed tensors. All ranks have to monitor the same iterations.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: the optimizer whose state to compare; None for none.
        exclude: a regular expression; items in whose name it matches are not compared, such as buffers of one rank.
        group: the ranks that hold the same, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument has the wrong type.

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
        group: Group = None,
        prefix: str = "replicas",
    ) -> None:
        super().__init__(model, prefix, group=group)
        check_optimizer(optimizer, optional=True)
        self.optimizer = optimizer
        self._selection = Selection(exclude=exclude)
        self.reset_run_state()

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def reset_run_state(self) -> None:
        self._differ = DeferredFlag()  # True if the last check found a difference that is not named yet
        self._has_named = False  # a difference that is still there
        self._last: dict[Any, NamedValues] = {}  # process group -> hashes of what its ranks share, of the last check

    def on_run_end(self) -> None:
        if self._differ.take(wait=True) and not self._has_named:  # names need collectives, and ranks may end alone
            self.report("ranks_differ", "the ranks differ in the last check", severity="problem", once=False)

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self.ranks.all_present:
            return
        if self.ranks.size > 1:
            self._name_differences()
            self._check(engine, device_of(self.model))
        elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            text = "nothing is compared: no wrapper of the model names the ranks that hold the same; give group"
            self.report("no_replicas", text)
        else:
            self.publish(in_sync=1.0)

    def _check(self, engine: Engine, device: torch.device) -> None:
        """Hash all items and compare them; every rank makes the same collectives, whatever it holds or raises."""
        reshard(self.model)
        tensors = (None, *self.model.parameters(), *self.model.buffers())  # other items have no further groups
        groups = dict.fromkeys(group for item in tensors for group in replica_groups(item, self.ranks.groups))
        self._last, fails = {}, False
        try:
            items = items_of(self.model, self.optimizer, self.ranks.ignored)
            items |= {"the iteration": engine.state.iteration, "the epoch": engine.state.epoch}
            holders = {name: replica_groups(item, self.ranks.groups) for name, item in items.items()}
            names = [name for name in items if name in self._selection and holders[name]]
            hashes = NamedValues(names, hashes_of({name: items[name] for name in names}, device))
            self._last = {
                group: hashes.rows([i for i, k in enumerate(names) if group in holders[k]]) for group in groups
            }
        except Exception as error:  # noqa: BLE001 - the other ranks are about to wait in a collective
            fails = True
            self.report("not_compared", f"nothing is compared, since the state of this rank can't be read: {error}")
        # 0 if all ranks hold the same, 1 if they differ, 2 if that is not known.
        status = torch.full((), 2 * fails, device=device)
        for group in groups:
            total = self._last[group].values.sum() if group in self._last else status
            # Their maximum and minimum over the ranks.
            largest, inverse_smallest = all_reduce(torch.stack([total, ~total]), largest=True, group=group)
            status = torch.maximum(status, (largest != ~inverse_smallest).to(status))
        status = self.ranks.max(status)
        self._differ.set(status == 1)
        self.publish(in_sync=torch.where(status == 2, math.nan, 1.0 - status))

    def _name_differences(self) -> None:
        """Report the items and ranks that differed in the last check, unless those of the check before it did.

        All ranks know of a difference, and take part.
        """
        had_named, self._has_named = self._has_named, self._differ.take(wait=True)
        if had_named or not self._has_named:
            return
        differing: set[str] = set()
        for group, (names, hashes) in self._last.items():
            own = dict(zip(names, hashes.tolist(), strict=True))
            first = [own]
            dist.broadcast_object_list(first, dist.get_global_rank(group, 0), group)
            differing |= {name for name, _ in own.items() ^ first[0].items()}
        parts = self.ranks.gather((dist.get_rank(), sorted(differing)[:_SHOWN]))
        ranks = [f"rank {rank} in {', '.join(names)}" for rank, names in parts if names]
        text = f"in the last check ranks differed from the first one: {'; '.join(ranks[:_SHOWN])}"
        names = sorted({name for _, names in parts for name in names})[:_SHOWN]
        self.report("ranks_differ", text, severity="problem", names=names, once=False)

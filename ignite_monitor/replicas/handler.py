"""ReplicaCheckHandler: exact comparison of weights, buffers and optimizer state between ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_type
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import REPLICAS
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.dtensor import all_reduce, reshard
from ignite_monitor.model.names import Pattern, Selection, listed, tags
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.monitor.transfer import DeferredFlag
from ignite_monitor.replicas.hashes import as_numbers, hashes_of
from ignite_monitor.replicas.items import Items, items_of, replica_groups, rng_items

_SHOWN = 8  # items, and ranks of each, in a report

Groups = tuple[Any, ...]  # process groups, of which all ranks hold the same
Hashes = dict[Groups, tuple[list[str], Tensor]]  # names and hashes of items


class ReplicaCheckHandler(Monitor, schema=REPLICAS):
    r"""Check that all ranks hold the same weights, buffers, optimizer state and iteration.

    After the train step every tensor is hashed to 64 bits. One collective compares a hash of all these hashes over the
    ranks, and one more over the replicas of every dimension of a device mesh. If a check finds a difference, a report
    names the items and the ranks that differ from the first rank: in the same check on the CPU, in the next one on
    other devices.

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
        random_state: bool = False,
        hashes: bool = False,
        group: Group = None,
        prefix: str = "replicas",
    ) -> None:
        super().__init__(model, prefix, group=group)
        if optimizer is not None:
            check_optimizer(optimizer, optional=True)
        check_type("random_state", random_state, bool, "bool")
        check_type("hashes", hashes, bool, "bool")
        self.optimizer = optimizer
        self.random_state, self.hashes = random_state, hashes
        self._selection = Selection(exclude=exclude)
        self.reset_run_state()

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def reset_run_state(self) -> None:
        self._differ = DeferredFlag()  # True if the last check found a difference that is not named yet
        self._has_named = False  # a difference that is still there
        self._last: Hashes = {}  # of the last check

    def on_run_end(self) -> None:
        if self._differ.take(wait=True):  # names need collectives, and the ranks may not end together
            self.report("ranks_differ", "the ranks differ in the last check", severity="problem", once=False)

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        has_others, device = self.ranks.size > 1, device_of(self.model)
        if not self.ranks.all_present:
            return
        if not has_others and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            text = "nothing is compared: no wrapper of the model names the ranks that hold the same; give group"
            self.report("no_replicas", text)
        elif not has_others:
            self.publish(in_sync=1.0)
        elif device.type != "cpu":
            self._name_differences()
        # Every rank makes the same collectives, of the same size, whatever it holds and whatever fails.
        hashes: Hashes | None = None
        try:
            hashes = self._hashes(engine, device) if has_others or self.hashes else {}
        except Exception as error:  # noqa: BLE001 - the other ranks are about to wait in a collective
            self.report("not_compared", f"nothing is compared, since the state of this rank can't be read: {error}")
        if self.hashes and hashes:
            names = tags(name for names, _ in hashes.values() for name in names)
            values = torch.cat([values for _, values in hashes.values()])
            self.publish_table([f"hash/{name}" for name in names], as_numbers(values))
        if has_others:
            self._compare(hashes, device)
            if device.type == "cpu":
                self._name_differences()

    def _hashes(self, engine: Engine, device: torch.device) -> Hashes:
        """Hash all items by their replica groups; those without replicas only if hashes are published."""
        reshard(self.model)
        items = items_of(self.model, self.optimizer, self.ranks.ignored)
        items |= {"the iteration": engine.state.iteration, "the epoch": engine.state.epoch}
        items |= rng_items(device) if self.random_state else {}
        members: dict[Groups, Items] = {}
        for name, item in items.items():
            if name in self._selection and ((groups := replica_groups(item, self.ranks.groups)) or self.hashes):
                members.setdefault(groups, {})[name] = item
        return {groups: (list(group_items), hashes_of(group_items, device)) for groups, group_items in members.items()}

    def _compare(self, hashes: Hashes | None, device: torch.device) -> None:
        """Compare one hash per replica group, the sum of those of its items, by its minimum and maximum over ranks."""
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        # All ranks have the same parameters and buffers, whatever can't be read.
        items = (None, *self.model.parameters(), *self.model.buffers())
        kinds = dict.fromkeys(replica_groups(item, self.ranks.groups) for item in items)
        self._last = {groups: (hashes or {}).get(groups, ([], nothing[:0])) for groups in kinds}
        flags = torch.cat([nothing, torch.full_like(nothing, hashes is None)])  # a difference, an error
        for groups, (_, values) in self._last.items():
            extremes = torch.stack([total := values.sum(), ~total])
            for group in groups:
                extremes = all_reduce(extremes, largest=True, group=group)
            flags[0] |= extremes[0] != ~extremes[1]
        differs, failed = (self.ranks.max(flags) > 0).unbind()
        self._differ.set(differs & ~failed)
        self.publish(in_sync=torch.where(failed, math.nan, (~differs).float()))

    def _name_differences(self) -> None:
        """Report the items and ranks that differed in the last check, unless those of the check before it did.

        All ranks know of a difference, and take part.
        """
        had_named, self._has_named = self._has_named, self._differ.take(wait=True)
        if had_named or not self._has_named:
            return
        differing: set[str] = set()
        for groups, (names, hashes) in self._last.items():
            hashes_by_name = dict(zip(names, hashes.tolist(), strict=True))
            for group in groups:
                first = [hashes_by_name]
                dist.broadcast_object_list(first, dist.get_global_rank(group, 0), group)
                differing |= {
                    name for name in hashes_by_name | first[0] if hashes_by_name.get(name) != first[0].get(name)
                }
        ranks: dict[str, list[str]] = {}
        for rank, names in self.ranks.gather((dist.get_rank(), sorted(differing)[:_SHOWN])):
            for name in names:
                ranks.setdefault(name, []).append(str(rank))
        shown = [f"{name} (rank {listed(odd, _SHOWN)})" for name, odd in sorted(ranks.items())[:_SHOWN]]
        text = f"{len(ranks)} or more items differ from those of the first rank: {', '.join(shown)}"
        self.report("ranks_differ", text, severity="problem", names=sorted(ranks)[:_SHOWN], once=False)

"""ReplicaCheckHandler: whether all ranks still hold the same weights, buffers and optimizer state."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_type
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import REPLICAS
from ignite_monitor.model.devices import device_of, upload
from ignite_monitor.model.optimizers import check_optimizer
from ignite_monitor.model.samples import local, reshard
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.deferred_flag import DeferredFlag
from ignite_monitor.monitor.ranks import all_take_part, from_every_rank, own_rank, sum_over_ranks, world_size
from ignite_monitor.replicas.fingerprints import fingerprints
from ignite_monitor.replicas.items import Items, first_holders, items_of, random_items

_OTHERS = "what has come since the last look"
_NAMED = 8


class ReplicaCheckHandler(Monitor, schema=REPLICAS):
    r"""Asks whether all ranks still hold the same: weights, buffers, optimizer state, random state and iteration.

    Every tensor is hashed to 64 bits where the train step leaves it, exactly, so that one flipped bit is found at the
    next look, and so are two elements that have changed places. The hashes of all ranks are put together in one
    collective. A warning in the log names what differs, and the ranks where it does: those with the rarer value, or
    where there is none, those that differ from the first.

    {keys}

    Of DTensors each part is compared among the ranks that hold it; what is sharded over all ranks has no replica. Not
    compared are the running statistics of batch norms that are not synchronized, which each rank takes of its own
    batches, and tensors that are sparse, nested or packed. Random state is often another one on every rank on purpose,
    for dropout, and other buffers may be a rank's own: of these, what differs at the first look is left out from
    then on, and the log says so once. What the same look finds of weights, optimizer and iteration counts at once.

    Every rank has to look in the same iterations. Under ``join()`` nothing is compared, and on one rank all agrees. A
    look reads all weights and the whole optimizer state once: every hundredth iteration, say.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: the optimizer whose state to compare; None for none.
        random_state: whether to compare the states of the generators of random numbers.
        prefix: what the values' names start with.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have.

    Examples:
        .. code-block:: python

            check = ReplicaCheckHandler(model, optimizer)
            check.attach(trainer, Events.ITERATION_STARTED(every=100))
    """

    _state_dict_all_req_keys = ("left_out",)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        random_state: bool = True,
        prefix: str = "replicas",
    ) -> None:
        super().__init__(model, prefix)
        if optimizer is not None:
            check_optimizer(optimizer, optional=True)
        check_type("random_state", random_state, bool, "bool")
        self.optimizer = optimizer
        self.random_state = random_state
        self._left_out: list[str] | None = None  # None before the first look
        self._names: list[str] = []  # what all ranks compare
        self._holders: Tensor | None = None
        self._news = DeferredFlag()
        self._differ = DeferredFlag()
        self._table: Tensor | None = None  # the last look that found a difference: of every rank its hashes
        self._told: set[tuple[str, int]] = set()

    def state_dict(self) -> OrderedDict[str, Any]:
        """The names of what is left out, since it differed at the first look."""
        return OrderedDict(left_out=None if self._left_out is None else list(self._left_out))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        names = state_dict["left_out"]
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise TypeError(f"Argument state_dict should hold a list of names or None in 'left_out', but given {names}")
        self._left_out = names if names is None else list(names)

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def start_iteration(self, engine: Engine) -> None:
        self._warn(wait=False)

    def reset_run_state(self) -> None:
        self._warn(wait=True)
        self._names, self._holders, self._table = [], None, None
        self._news = DeferredFlag()

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        world, device = world_size(), device_of(self.model)
        if world == 1:
            self.publish(in_sync=torch.ones((), device=device), differing_count=torch.zeros((), device=device))
            return
        if not all_take_part(self.model):
            return
        reshard(self.model)
        items, own = items_of(self.model, self.optimizer)
        items |= {"the iteration": engine.state.iteration, "the epoch": engine.state.epoch}
        if self.random_state:
            items |= (generators := random_items(device))
            own |= generators.keys()
        if not self._names or self._news.take(wait=True):
            self._agree(items, own, world, device)
        if self._holders is not None:
            self._compare(items, self._holders, device)

    def _agree(self, items: Items, own: set[str], world: int, device: torch.device) -> None:
        """Agree with the other ranks on what to compare, and at the first look on what is left out.

        Args:
            own: the names of what may be another one on every rank on purpose.
        """
        union = dict.fromkeys(name for names in from_every_rank(list(items)) for name in names)
        self._names = [*union, _OTHERS]
        if self._left_out is None:
            self._left_out = []
            self._leave_out(items, [name for name in items if name in own], device)
        self._names = [name for name in self._names if name not in set(self._left_out)]
        holders = [first_holders(items.get(name), world) for name in self._names]
        self._holders = upload(torch.tensor(holders, device="cpu").T.contiguous(), device)

    def _leave_out(self, items: Items, own: list[str], device: torch.device) -> None:
        ranks = from_every_rank(dict(zip(own, self._hashes(items, own, device).tolist(), strict=True)))
        names = dict.fromkeys(name for each in ranks for name in each)
        self._left_out = [name for name in names if len({each.get(name) for each in ranks}) > 1]
        if self._left_out:
            self.logger.warning(
                "%s: left out, since the ranks had another one each at the first look: %s",
                self.prefix,
                ", ".join(self._left_out),
            )

    def _hashes(self, items: Items, names: list[str], device: torch.device) -> Tensor:
        """Of each name its number; 0 of what this rank has not, and one of all that has no name yet together."""
        known = set(names)
        more = {name: value for name, value in items.items() if name not in known}
        more = {} if _OTHERS not in known else {n: v for n, v in more.items() if n not in set(self._left_out or ())}
        here = {name: items[name] for name in names if name in items} | more
        tensors = {name: local(value) for name, value in here.items() if isinstance(value, Tensor)}
        numbers = {name: value for name, value in here.items() if not isinstance(value, Tensor)}
        order = {name: place for place, name in enumerate([*tensors, *numbers])}
        integers = torch.tensor([*numbers.values()], dtype=torch.int64, device="cpu")
        both = torch.cat([fingerprints([*tensors.values()], device), upload(integers, device)])
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        later = torch.tensor([order[name] for name in more], dtype=torch.int64, device="cpu")
        rest = both[upload(later, device)].sum().reshape(1) if more else nothing
        at = [len(order) + (name == _OTHERS) if name not in order else order[name] for name in names]
        return torch.cat([both, nothing, rest])[upload(torch.tensor(at, dtype=torch.int64, device="cpu"), device)]

    def _compare(self, items: Items, holders: Tensor, device: torch.device) -> None:
        own = self._hashes(items, self._names, device)
        table = torch.zeros_like(holders)
        table[own_rank()] = own
        table = sum_over_ranks(table)
        differs = (table != table.gather(0, holders)).any(0)
        self._news.set((table[:, self._names.index(_OTHERS)] != 0).any())
        found = differs.any()
        self._differ.set(found)
        self._table = table
        self.publish(in_sync=(~found).float(), differing_count=differs.sum())
        self._warn(wait=False)

    def _warn(self, wait: bool) -> None:
        """Name what differs, once."""
        if not self._differ.take(wait) or self._table is None or self._holders is None:
            return
        table, holders = self._table.T.tolist(), self._holders.T.tolist()
        found: dict[str, list[int]] = {}
        for name, hashes, first in zip(self._names, table, holders, strict=True):
            for part in set(first):
                ranks = [rank for rank in range(len(first)) if first[rank] == part]
                usual = Counter(hashes[rank] for rank in ranks).most_common(1)[0][0]
                odd = [rank for rank in ranks if hashes[rank] != usual]
                found.setdefault(name, []).extend(odd)
        found = {name: ranks for name, ranks in found.items() if ranks}
        new = {name: ranks for name, ranks in found.items() if not all((name, rank) in self._told for rank in ranks)}
        self._told = {(name, rank) for name, ranks in found.items() for rank in ranks}
        if new:
            named = [f"{name} (rank {', '.join(map(str, ranks))})" for name, ranks in list(new.items())[:_NAMED]]
            more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
            self.logger.warning("%s: the ranks differ in %s%s", self.prefix, ", ".join(named), more)

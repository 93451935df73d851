"""RoutingHandler: load and logits of the routers in a mixture of experts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine
from torch import nn

from ignite_monitor.checks import check_count, check_pattern
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import ROUTING
from ignite_monitor.model._torch import eager
from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.forward import after_forward
from ignite_monitor.model.names import Pattern, hookable, named_modules, tags, unwrapped
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import Group, RankReduction
from ignite_monitor.monitor.transfer import NamedValues
from ignite_monitor.routing.decisions import VALUES, RouterDecisions, is_of_transformers, routing_values

NO_LOGITS = "nothing is reported of modules that do not return a plain tensor of logits over top_k or more experts"


class RoutingHandler(Monitor, schema=ROUTING):
    r"""Load and logits of the routers in a mixture of experts, per layer.

    {keys}

    All forward passes, micro-batches and ranks of an iteration count as one batch, padding included. Passes in
    evaluation mode and recomputations by activation checkpointing are not measured. Compiled models run eagerly in
    monitored iterations. With several ranks, attach the handler on all of them: it takes two collectives per iteration.

    Routers of transformers 5, classes named ``*TopKRouter``, return the chosen experts. Of others, the experts with the
    ``top_k`` largest logits count as chosen.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        routers: a regular expression; the modules with a match in their names are the routers, and return the logits
            over experts. None for the routers of transformers.
        top_k: the number of experts per token, of ``routers`` that are not of transformers.
        group: the ranks to average over, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if ``routers`` is not a regular expression or given without ``top_k``, the model has no router, or
            ``top_k`` is less than 1.

    Examples:
        .. code-block:: python

            routing = RoutingHandler(model, routers=r"\.2$", top_k=2)  # the layer that returns logits over experts
            routing.attach(trainer, Events.ITERATION_STARTED(every=10))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        routers: Pattern = None,
        top_k: int | None = None,
        group: Group = None,
        prefix: str = "routing",
    ) -> None:
        super().__init__(model, prefix, group=group)
        self._pattern = check_pattern("routers", routers)
        if (routers is None) != (top_k is None):
            raise ValueError("Arguments routers and top_k should be given together, but one is None")
        self.top_k = None if top_k is None else check_count("top_k", top_k, least=1)
        if not self._routers():
            raise ValueError(f"Argument routers matched no router; pass a regular expression, but given {routers!r}")
        self.reset_run_state()

    def reset_run_state(self) -> None:
        self._decisions: RouterDecisions | None = None
        self._over_ranks = RankReduction(self.ranks)

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        routers = self._routers()
        self._decisions = RouterDecisions(unwrapped(self.model), routers, self.top_k)
        return [eager(), after_forward(routers, self._decisions)]

    def _routers(self) -> dict[nn.Module, str]:
        """Routers, and their names for loggers."""
        routers = {
            name or "_root_": module
            for name, module in hookable(dict(named_modules(self.model))).items()
            if (is_of_transformers(module) if self._pattern is None else self._pattern.search(name or "_root_"))
        }
        return dict(zip(routers.values(), tags(routers), strict=True))

    def _on_train_step_completed(self, engine: Engine) -> None:
        decisions, self._decisions = self._decisions, None
        if decisions is None:
            return
        decisions.raise_error()
        if decisions.without_logits:
            names = sorted(decisions.without_logits)
            self.report("no_logits", f"{NO_LOGITS}: {', '.join(names)}", names=names)
        elif not decisions.sums:
            self.report("no_tokens", "no tokens were routed in training mode")
        device, sums, largest = device_of(self.model), dict[Any, NamedValues](), dict[Any, NamedValues]()
        for name, (sums_of_router, largest_logit) in decisions.sums.items():
            if name not in decisions.without_logits:
                sums[name] = NamedValues([name], move(sums_of_router, device)[None])
                largest[name] = NamedValues([name], move(largest_logit, device)[None])
        if self.ranks.size > 1:
            if not self.ranks.all_present:
                self.report("join", "ranks may have run out of data under join(), so nothing is reported")
                return
            sums, largest = self._over_ranks(sums, largest, device)
        if sums:
            rows = [
                routing_values(sums_of_router.values[0], largest[name].values[0])
                for name, sums_of_router in sums.items()
            ]
            self.publish_table([f"{value}/{name}" for name in sums for value in VALUES], torch.cat(rows))

"""StepStatsHandler: how long train steps take, how much they get done, and with which memory and learning rates."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_function, check_real, check_type
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import STEP_STATS
from ignite_monitor.model._torch import Gone, dispatch_mode, need
from ignite_monitor.model.devices import device_of, upload
from ignite_monitor.model.eager import Eager
from ignite_monitor.model.optimizers import check_optimizer, held_by
from ignite_monitor.model.samples import is_measurable, reshard
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.model.tensors import count_items
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import all_take_part, gradient_norm, own_rank, sum_over_ranks, world_size
from ignite_monitor.step_stats.flops import FlopCount
from ignite_monitor.step_stats.flops import peak_flops as known_peak
from ignite_monitor.step_stats.measures import DataClock, StepClock, peak_memory, resident_memory


class StepStatsHandler(Monitor, schema=STEP_STATS):
    r"""Says how long a train step takes, and what a run should be known by: speed, memory, learning rates, weights.

    {keys}

    On CUDA time is taken by events on the device, and the first three are known once these have passed: they appear
    when values come to the host, that is when a logger writes. On devices other than CPU and CUDA they are absent.

    **FLOPs.** Where the peak is known or given, the operations of one train step are counted, the first that is
    monitored, by the formulas of ``torch.utils.flop_counter``: forward and backward, recomputation by activation
    checkpointing included. Compiled models run eagerly in it, and the first three values are absent, since counting
    slows it down. What else is compiled, an optimizer's step or a function of a library's, can't be counted: a warning
    names it, and ``step/mfu`` is absent. The count stands for all later steps, so batches should be alike. The peak is
    that of dense matrix products in the dtype that most operations are made in.

    **Data.** The wait is from Ignite's GET_BATCH_STARTED to GET_BATCH_COMPLETED, on the host's clock; its share is that
    in wait and ``time_ms`` together. Where a device computes while the host waits, no time is lost in it.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: the optimizer whose learning rates to publish.
        items: from a batch, as the train step gets it, to how many items it holds, say tokens; None for the length of
            its first tensor.
        peak_flops: operations a second of the device at most; None to look it up by the device's name.
        slowest_rank: whether to find out which rank has waited longest for its data, which takes a collective in each
            monitored iteration, so that all ranks have to monitor the same ones.
        prefix: what the values' names start with.

    Attributes:
        flops: operations of one train step on this rank; None as long as they have not been counted.

    Raises:
        TypeError: if an argument is of another type.
        RuntimeError: if ``peak_flops`` is given, and the installed torch has no way to count operations.
        ValueError: if ``peak_flops`` is not greater than 0, or FullyShardedDataParallel has sharded the model.

    Examples:
        .. code-block:: python

            stats = StepStatsHandler(model, optimizer, items=lambda batch: batch["input_ids"].numel())
            stats.attach(trainer, Events.ITERATION_STARTED(every=10))
            stats.log_to(tensorboard_logger, trainer)
    """

    _state_dict_all_req_keys = ("flops", "dtype")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        items: Callable[[Any], float | Tensor] | None = None,
        peak_flops: float | None = None,
        slowest_rank: bool = False,
        prefix: str = "step",
    ) -> None:
        super().__init__(model, prefix)
        check_whole(model)
        check_optimizer(optimizer)
        check_function("items", items, "the batch")
        if peak_flops is not None:
            need("StepStatsHandler(peak_flops=...)", dispatch_mode)
        check_type("slowest_rank", slowest_rank, bool, "bool")
        self.optimizer = optimizer
        self.items = items
        self.slowest_rank = slowest_rank
        self._data = DataClock()
        self.peak_flops = None if peak_flops is None else check_real("peak_flops", peak_flops, above=0, below=math.inf)
        self.flops: int | None = None
        self._dtype = ""  # that the operations were made in
        self._clock: StepClock | None = None
        self._count: FlopCount | None = None
        self._eager: Eager | None = None
        self._items: float | Tensor | None = None
        self._rates: list[float | Tensor] = []
        self._warned = self._cannot_count = False

    def state_dict(self) -> OrderedDict[str, Any]:
        """The operations of one train step, as far as they have been counted, and their dtype's name."""
        return OrderedDict(flops=self.flops, dtype=self._dtype)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, without counting again.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping, or holds something else.
            ValueError: if it was saved by a monitor of another kind.
        """
        super().load_state_dict(state_dict)
        flops, dtype = state_dict["flops"], state_dict["dtype"]
        if not (flops is None or isinstance(flops, int)) or not isinstance(dtype, str):
            raise TypeError(f"Argument state_dict should hold a count and a name of a dtype, but it holds {state_dict}")
        self.flops, self._dtype = flops, dtype

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        # A batch is there before it is known whether its iteration is monitored.
        return [(Events.GET_BATCH_STARTED, self._data.start), (Events.GET_BATCH_COMPLETED, self._data.stop)]

    # What it listens to

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def start_iteration(self, engine: Engine) -> None:
        self.reset_run_state()

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if not self._is_running:
            return []
        device = self._device
        if self.flops is None and not self._cannot_count and (self.peak_flops is not None or _is_listed(device)):
            self._count = FlopCount()
            self._eager = Eager(self.model)
            return [self._eager, self._count]
        engine = self._attached_to()
        if device.type not in ("cpu", "cuda") or engine is None:
            return []
        self._items = self._count_items(engine.state.batch)  # which the train step may take apart
        self._clock = StepClock(device)
        return [self._clock]

    def reset_run_state(self) -> None:
        self._clock = self._count = self._eager = self._items = None
        self._rates = []

    @property
    def _device(self) -> torch.device:
        return device_of(self.model)

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        # Right after the step: before it, handlers may still change the rates, and then schedulers do.
        is_own = step.optimizer is self.optimizer or not held_by(step.optimizer).isdisjoint(held_by(self.optimizer))
        if not self._rates and is_own:
            self._rates = self._current_rates()

    def _current_rates(self) -> list[float | Tensor]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [rate.detach().clone().reshape(()) if isinstance(rate, Tensor) else rate for rate in rates]

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        if self._count is not None and self._eager is not None:
            self._take_count(self._count.counts, self._eager.others)
        reshard(self.model)
        parameters = [each for each in self.model.parameters() if is_measurable(each)]
        values: dict[str, float | Tensor] = {
            f"lr/group_{i}": rate for i, rate in enumerate(self._rates or self._current_rates())
        }
        if parameters:
            values["parameter_norm"] = gradient_norm(parameters, 2.0, None)
        values |= {name: value for name, value in self._memory().items() if value is not None}
        if self._device.type == "cpu":
            values |= self._times(self._items)
        values |= self._data_wait()
        self.publish(**values)

    def _data_wait(self) -> dict[str, float | Tensor]:
        seconds = self._data.seconds
        if seconds is None:
            return {}
        found: dict[str, float | Tensor] = {"data_wait_ms": 1e3 * seconds}
        if self.slowest_rank and world_size() > 1 and all_take_part(self.model):
            place = torch.tensor([float(rank == own_rank()) for rank in range(world_size())], device="cpu")
            waits = sum_over_ranks(upload(1e3 * seconds * place, self._device))
            found |= {"data_wait_max_ms": waits.max(), "data_wait_rank": waits.argmax()}
        return found

    def _take_count(self, counts: Mapping[torch.dtype, int], compiled: Set[str]) -> None:
        if compiled:
            self._cannot_count = True
            self.logger.warning(
                "%s: operations can't be counted, so mfu is absent: what torch.compile has made of %s stays compiled",
                self.prefix,
                ", ".join(sorted(compiled)),
            )
        else:
            self.flops = sum(counts.values())
            self._dtype = str(max(counts, key=lambda dtype: counts[dtype], default="")).removeprefix("torch.")

    def _times(self, items: Any) -> dict[str, float]:
        """What is to be published of the time that the step took, once it is known."""
        seconds = None if self._clock is None else self._clock.seconds()
        if not seconds:
            return {}
        values = {"time_ms": 1e3 * seconds}
        wait = self._data.seconds
        if wait is not None:
            values["data_wait_share"] = wait / (wait + seconds)
        if items is not None:
            values["items_per_s"] = items / seconds
        peak = self._peak()
        if self.flops and peak is not None:
            values["mfu"] = self.flops / seconds / peak
        return values

    def _peak(self) -> float | None:
        if self.peak_flops is not None or not self._dtype:
            return self.peak_flops
        device = self._device
        if device.type != "cuda":
            return None
        dtype = getattr(torch, self._dtype, torch.float64)
        return known_peak(torch.cuda.get_device_name(device), dtype, torch.backends.cuda.matmul.allow_tf32)

    def _count_items(self, batch: Any) -> float | Tensor | None:
        if self.items is None:
            items: float | Tensor | None = count_items(batch)
        else:
            items = self.items(batch)
            items = items.detach().clone().reshape(()) if isinstance(items, Tensor) else float(items)
        if items is None and not self._warned:
            self._warned = True
            self.logger.warning(
                "%s: no tensor was found in a batch, so items_per_s is absent: give items, from a batch to a count",
                self.prefix,
            )
        return items

    def _memory(self) -> dict[str, float | None]:
        device = self._device
        if device.type == "cuda":
            return {
                "peak_memory_mb": torch.cuda.max_memory_allocated(device) / 2**20,
                "reserved_memory_mb": torch.cuda.memory_reserved(device) / 2**20,
            }
        resident, peak = resident_memory(), peak_memory()
        # The system brings the peak up to date now and then.
        peak = peak if resident is None or peak is None else max(peak, resident)
        return {"peak_memory_mb": peak, "resident_memory_mb": resident}

    # Values on the host

    def deferred_tensors(self) -> list[Tensor]:
        return [self._items] if isinstance(self._items, Tensor) else []

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        return self._times(extra[0][0] if extra else self._items)


def _is_listed(device: torch.device) -> bool:
    """Whether the peak of a device is known for some dtype."""
    if isinstance(dispatch_mode, Gone):
        return False  # where nobody has asked for it
    return device.type == "cuda" and known_peak(torch.cuda.get_device_name(device), torch.float16, False) is not None

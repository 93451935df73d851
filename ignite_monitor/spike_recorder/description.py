"""A spike file in words: a title, and named fields."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ignite_monitor.spike_recorder.record import SpikeRecord


def title(record: SpikeRecord) -> str:
    """Describe where a spike was, and its value beside its threshold."""
    rank = f", rank {record.rank}" if record.rank else ""
    text = f"iteration {record.iteration}, epoch {record.epoch}{rank}: {record.name} {record.norm:.4g}"
    if not math.isfinite(record.threshold):
        return text
    factor = record.norm / record.threshold if record.threshold > 0 else math.nan
    times = f"{factor:.3g} x its " if math.isfinite(factor) else ""
    return f"{text}, {times}threshold {record.threshold:.4g}"


def fields(record: SpikeRecord) -> Iterator[tuple[str, str]]:
    """Name and describe the other contents; an empty text for what was not recorded."""
    losses = record.row_losses
    yield "culprits", "; ".join(f"{name} {share:.0%}" for name, share in record.culprits.items())
    yield "source", "" if record.source is None else record.source["text"]
    yield "lr", ", ".join(f"{rate:.4g}" for rate in record.lr or ())
    rows = "; ".join(f"row {row} {float(losses[row]):.4g}" for row in record.rows)
    yield "losses", rows and f"{rows}; median {float(losses.nanmedian()):.4g} of {len(losses)}"
    yield "batch", _shape(record.batch)
    yield "file", Path(record.path).name


def _shape(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape)) or 'number'}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_shape(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return f"{len(value)} of {_shape(value[0])}" if len(value) > 8 else ", ".join(map(_shape, value))
    return "" if value is None else type(value).__name__

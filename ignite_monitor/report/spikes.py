"""Tables of spike files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ignite_monitor.report.series import plural, printable
from ignite_monitor.report.text import RenderableType, Table, Text
from ignite_monitor.spike_recorder.record import ENDING, SpikeRecord, load_spike


def spikes_text(path: Path) -> list[RenderableType]:
    """Tables of a directory's spike files, the earliest first, or of one file; ValueError if none can be read."""
    files = sorted(path.glob(f"*{ENDING}")) if path.is_dir() else [path]
    records: list[SpikeRecord] = []
    damaged: list[ValueError] = []
    for file in files:
        try:
            records.append(load_spike(file))
        except ValueError as error:
            damaged.append(error)
    if not records:
        raise damaged[0] if damaged else ValueError(f"{path} holds no spike files (*{ENDING})")
    records.sort(key=lambda record: (record.iteration, record.name, record.rank, record.path))
    tables = [part for record in records for part in (_head(record), _table(record), Text())]
    return [*tables, Text(plural(len(records), "record")), *(Text(printable(str(error))) for error in damaged)]


def _head(record: SpikeRecord) -> Text:
    rank = f", rank {record.rank}" if record.rank else ""
    value = f"{printable(record.name)} {record.norm:.4g}"
    if math.isfinite(record.threshold):
        factor = record.norm / record.threshold if record.threshold > 0 else math.nan
        times = f"{factor:.3g} x its " if math.isfinite(factor) else ""
        value = f"{value}, {times}threshold {record.threshold:.4g}"
    return Text(f"iteration {record.iteration}, epoch {record.epoch}{rank}: {value}", style="bold")


def _table(record: SpikeRecord) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _fields(record):
        if text:
            table.add_row(f"  {name}", Text(printable(text)))
    return table


def _fields(record: SpikeRecord) -> Iterator[tuple[str, str]]:
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

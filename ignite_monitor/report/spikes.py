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
    """Describe a directory's spike files, the earliest first, or one file; ValueError if none can be read."""
    records: list[SpikeRecord] = []
    damaged: list[ValueError] = []
    for file in sorted(path.glob(f"*{ENDING}")) if path.is_dir() else [path]:
        try:
            records.append(load_spike(file))
        except ValueError as error:
            damaged.append(error)
    if not records:
        raise damaged[0] if damaged else ValueError(f"{path} holds no spike files (*{ENDING})")
    parts: list[RenderableType] = []
    for record in sorted(records, key=lambda record: (record.iteration, record.name, record.rank, record.path)):
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in _fields(record):
            if text:
                table.add_row(f"  {name}", Text(printable(text)))
        parts += [Text(_title(record), style="bold"), table, Text()]
    return [*parts, Text(plural(len(records), "record")), *(Text(printable(str(error))) for error in damaged)]


def _title(record: SpikeRecord) -> str:
    rank = f", rank {record.rank}" if record.rank else ""
    title = f"iteration {record.iteration}, epoch {record.epoch}{rank}: {printable(record.name)} {record.norm:.4g}"
    if not math.isfinite(record.threshold):
        return title
    factor = record.norm / record.threshold if record.threshold > 0 else math.nan
    times = f"{factor:.3g} x its " if math.isfinite(factor) else ""
    return f"{title}, {times}threshold {record.threshold:.4g}"


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

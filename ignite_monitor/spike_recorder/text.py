"""Records of spikes in words."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ignite_monitor.spike_recorder.record import ENDING, SpikeRecord, load_spike

_WIDTH = 80


def described(path: Path) -> Iterator[str]:
    """Lines on a directory's records, the earliest first, or on one; OSError or ValueError if none can be read."""
    files = sorted(path.glob(f"*{ENDING}")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no records of spikes (*{ENDING})")
    damaged: list[ValueError] = []
    records: list[SpikeRecord] = []
    for file in files:
        try:
            records.append(load_spike(file))
        except ValueError as error:
            damaged.append(error)
    if not records:
        raise damaged[0]
    for record in sorted(records, key=lambda each: (each.iteration, each.name, each.rank)):
        yield from _of_one(record)
        yield ""
    yield f"{len(records)} record{'s' * (len(records) != 1)}"
    for each in damaged:
        yield from _wrapped("", str(each))


def _of_one(record: SpikeRecord) -> Iterator[str]:
    where = f"iteration {record.iteration}, epoch {record.epoch}" + (f", rank {record.rank}" if record.rank else "")
    yield from _wrapped("", f"{where}: {record.name} {record.norm:.4g}{_compared(record)}")
    for name, text in _parts(record):
        if text:
            yield from _wrapped(f"  {name:<10}", text)


def _compared(record: SpikeRecord) -> str:
    if not math.isfinite(record.threshold):
        return ""
    factor = record.norm / record.threshold if record.threshold > 0 else math.nan
    times = f", {factor:.3g} x its" if math.isfinite(factor) else ","
    return f"{times} threshold {record.threshold:.4g}"


def _parts(record: SpikeRecord) -> Iterator[tuple[str, str]]:
    yield "culprits", "; ".join(f"{name} {share:.0%}" for name, share in record.culprits.items())
    yield "source", "" if record.source is None else record.source["text"]
    yield "lr", "" if record.lr is None else ", ".join(f"{rate:.4g}" for rate in record.lr)
    yield "losses", "; ".join(_rows(record))
    yield "ids", _shortened(record.ids)
    yield "batch", _shape(record.batch)
    yield "file", Path(record.path).name


def _rows(record: SpikeRecord) -> Iterator[str]:
    losses, ids = record.row_losses, record.ids
    known = isinstance(ids, (Sequence, Tensor)) and not isinstance(ids, str) and len(ids) == len(losses)
    for row in record.rows:
        name = f" ({_plain(ids[row])})" if known else ""
        yield f"row {row}{name} {float(losses[row]):.4g}"
    if record.rows:
        yield f"median {float(losses.nanmedian()):.4g} of {len(losses)}"


def _plain(value: Any) -> str:
    return str(value.tolist() if isinstance(value, Tensor) else value)


def _shortened(ids: Any) -> str:
    return "" if ids is None else textwrap.shorten(_plain(ids), 2 * (_WIDTH - 12), placeholder=" ...")


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape)) or 'number'}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_shape(each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        if len(value) > 8:
            return f"{len(value)} of {_shape(value[0])}"
        return ", ".join(map(_shape, value))
    return "" if value is None else type(value).__name__


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=start, subsequent_indent=" " * max(len(start), 4), break_on_hyphens=False
    )

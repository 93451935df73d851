"""Spike files: write, read and check them, with batches in types that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import contextlib
import io
import os
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model._torch import version
from ignite_monitor.model.isolation import restore_rng_state
from ignite_monitor.model.modes import has_local_data

_FORMAT = "ignite_monitor spike"
_VERSION = 2
_LARGEST = 2**28  # bytes of a batch
_ABANDONED = 3600.0  # seconds after which an unfinished file is of a killed process
ENDING = ".spike.pt"  # of the names of spike files


@dataclass(frozen=True)
class SpikeRecord:
    """Contents of a spike file, as :func:`load_spike` returns them.

    Attributes:
        iteration: iteration of the spike.
        epoch: its epoch.
        rank: rank that wrote the file.
        name: name of the value, for example ``grad/norm``.
        norm: the value.
        threshold: its threshold; inf if there was none.
        culprits: parameter -> share of the excess; empty without thresholds of single tensors.
        source: source of a non-finite value, a dictionary of ``name``, ``kind`` and ``text``; None if not located.
        lr: learning rate of each parameter group of the monitor's optimizer; None if a group has none.
        batch: the batch: tensors on the CPU, mappings as dictionaries, named tuples as tuples; None if
            it was not saved.
        losses: loss of every sample that the train step has recorded before the spike, on the CPU; else None.
        random_state: RNG state of torch, Python and NumPy before the train step.
        path: path of the file.
    """

    iteration: int
    epoch: int
    rank: int
    name: str
    norm: float
    threshold: float
    culprits: dict[str, float]
    source: dict[str, str] | None
    lr: list[float] | None
    batch: Any
    losses: Tensor | None
    random_state: dict[str, Any] = field(repr=False)
    path: str

    @property
    def rows(self) -> list[int]:
        """Rows of the batch with the largest losses, at most three, largest first; NaN counts as largest."""
        return [int(row) for row in torch.topk(self.row_losses, min(3, len(self.row_losses))).indices]

    @property
    def row_losses(self) -> Tensor:
        """Loss of every row, the mean if a row has several; empty if none were recorded."""
        losses = torch.empty(0) if self.losses is None else self.losses
        return losses.double().flatten(1).mean(1) if losses.dim() > 1 else losses.double()

    def restore_random_state(self) -> None:
        """Restore the RNG state before the step: torch, Python, NumPy, and the CUDA devices that exist."""
        restore_rng_state(self.random_state)


def load_spike(path: str | os.PathLike[str]) -> SpikeRecord:
    """Read a file of :class:`SpikeRecorder`, as safely as ``torch.load(weights_only=True)``.

    Args:
        path: a file of its directory.

    Raises:
        OSError: if the file can't be read.
        ValueError: if it is no spike file, or is damaged.
    """
    path = os.fspath(path)
    content = Path(path).read_bytes()
    try:
        if zipfile.ZipFile(io.BytesIO(content)).testzip() is not None:  # torch.load() ignores the checksums
            raise ValueError("a checksum is wrong")
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises errors of many types for damaged files
        raise ValueError(f"{path} is no spike file, or is damaged") from error
    if not isinstance(values, Mapping) or (values.get("format"), values.get("version")) != (_FORMAT, _VERSION):
        raise ValueError(f"{path} is no spike file of version {_VERSION}")
    spike = values.get("spike")
    if not isinstance(spike, Mapping) or {*spike, "path"} != {item.name for item in fields(SpikeRecord)}:
        raise ValueError(f"{path} is damaged: its fields are not those of a spike")
    return SpikeRecord(**spike, path=path)


def write(directory: Path, name: str, values: Mapping[str, Any]) -> Path:
    """Write all fields of a record but ``path``, and return the path; after an OSError no part of it remains."""
    content = io.BytesIO()
    torch.save({"format": _FORMAT, "version": _VERSION, "spike": dict(values)}, content)
    directory.mkdir(parents=True, exist_ok=True)
    for abandoned in directory.glob(f".*{ENDING}.unfinished"):
        with contextlib.suppress(OSError):  # another recorder may have removed it
            if time.time() - abandoned.stat().st_mtime > _ABANDONED:
                abandoned.unlink()
    for number in count(1):
        path = directory / f"{name}{f'-{number}' if number > 1 else ''}{ENDING}"
        unfinished = path.with_name(f".{path.name}.unfinished")
        with contextlib.suppress(FileExistsError), unfinished.open("xb") as file:  # who has it may give the name
            try:
                if not path.exists():
                    file.write(content.getbuffer())
                    file.close()
                    os.replace(unfinished, path)
                    return path
            finally:
                unfinished.unlink(missing_ok=True)
    raise AssertionError


class KeptBatch:
    """References to the tensors of a batch, in containers of their own; copied only when saved."""

    def __init__(self, batch: Any) -> None:
        self._versions: list[tuple[Tensor, int]] = []
        self._batch = self._keep(batch)

    def save(self) -> Any:
        """Copy the batch to the CPU; ValueError if it is too large, was changed in place, or holds other types."""
        if any(version(tensor) != kept for tensor, kept in self._versions):
            raise ValueError("the train step changes it in place")
        size = sum(tensor.nbytes for tensor, _ in self._versions if has_local_data(tensor))
        if size > _LARGEST:
            raise ValueError(f"{size / 2**20:,.0f} MiB exceed the limit of {_LARGEST / 2**20:,.0f} MiB")
        return _copy(self._batch)

    def _keep(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._versions.append((value, version(value)))
        elif isinstance(value, (tuple, list)):
            return (list if isinstance(value, list) else tuple)(map(self._keep, value))
        return {key: self._keep(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not has_local_data(value):
            raise ValueError(f"it holds a {type(value).__name__} that is not a single dense array")
        # Cloned, since torch.save writes the whole storage of a view.
        return value.detach().as_subclass(Tensor).cpu().clone()
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, dict):
        return {_copy(key): _copy(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_copy, value))
    raise ValueError(f"it holds a {type(value).__name__}; only tensors, numbers and strings can be saved")

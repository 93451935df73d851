"""Spike files: write, read and check them."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.isolation import restore_rng_state

_FORMAT = "ignite_monitor spike"
_VERSION = 2
ENDING = ".spike.pt"
"""End of the names of spike files."""

_ROWS = 3


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
        lr: learning rate of each parameter group of the monitor's optimizer; None without an optimizer.
        batch: the batch: tensors on the CPU, mappings and dataclasses as dictionaries, named tuples as tuples; None if
            it was not saved.
        losses: loss of every sample, on the CPU, if the train step records it; else None.
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
        losses = self.row_losses
        rows: list[int] = torch.topk(losses, min(_ROWS, len(losses))).indices.tolist()
        return rows

    @property
    def row_losses(self) -> Tensor:
        """Loss of every row, the mean if a row has several; empty if none were recorded."""
        losses = torch.empty(0) if self.losses is None else self.losses
        return losses.double().flatten(1).mean(1) if losses.dim() > 1 else losses.double()

    def restore_random_state(self) -> None:
        """Restore the RNG state of torch, Python and NumPy before the recorded step.

        With the weights from before the step, ``batch`` then gives the same loss to the last bit. CUDA devices that do
        not exist are skipped.
        """
        restore_rng_state(self.random_state)


def load_spike(path: str | os.PathLike[str]) -> SpikeRecord:
    """Read a file of :class:`SpikeRecorder`, as safely as ``torch.load(weights_only=True)``.

    Args:
        path: a file of its directory.

    Returns:
        The record.

    Raises:
        OSError: if the file can't be read.
        ValueError: if it is no spike file, or is damaged.

    Examples:
        .. code-block:: python

            from pathlib import Path

            for path in sorted(Path("spikes").glob("*.spike.pt")):
                spike = load_spike(path)
                print(spike.iteration, spike.norm, spike.rows)
                spike.restore_random_state()  # and with weights from before the step
                loss = criterion(model(spike.batch[0]), spike.batch[1])
    """
    path = os.fspath(path)
    content = Path(path).read_bytes()
    try:
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is no spike file, or is damaged") from error
    if not isinstance(values, Mapping) or values.get("format") != _FORMAT:
        raise ValueError(f"{path} is no spike file")
    if values.get("version") != _VERSION:
        raise ValueError(f"{path} has version {values.get('version')!r}, but only {_VERSION} can be read")
    spike = values.get("spike")
    if not isinstance(spike, Mapping) or spike.keys() != {*_TYPES, "batch"}:
        raise ValueError(f"{path} is damaged: its fields are not those of a spike")
    if wrong := _wrong_types(spike):
        raise ValueError(f"{path} is damaged: wrong types of {', '.join(wrong)}")
    return SpikeRecord(**spike, path=path)


def _wrong_types(spike: Mapping[str, Any]) -> list[str]:
    """Names of fields whose types are not those of a :class:`SpikeRecord`."""
    wrong = [name for name, kind in _TYPES.items() if not isinstance(spike[name], kind)]
    if wrong:
        return wrong
    culprits, source, losses = spike["culprits"], spike["source"], spike["losses"]
    valid = {
        "culprits": _all_are(str, culprits) and _all_are(_NUMBER, culprits.values()),
        "source": source is None or (source.keys() == {"name", "kind", "text"} and _all_are(str, source.values())),
        "lr": _all_are(_NUMBER, spike["lr"] or ()),
        "losses": losses is None or (losses.dim() > 0 and not losses.is_complex() and losses.layout == torch.strided),
        "random_state": spike["random_state"].keys() >= {"torch", "python", "devices"},
    }
    return [name for name, is_valid in valid.items() if not is_valid]


def _all_are(kind: type | tuple[type, ...], values: Iterable[Any]) -> bool:
    return all(isinstance(value, kind) for value in values)


_NUMBER, _NONE = (int, float), type(None)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "iteration": int,
    "epoch": int,
    "rank": int,
    "name": str,
    "norm": _NUMBER,
    "threshold": _NUMBER,
    "culprits": dict,
    "source": (dict, _NONE),
    "lr": (list, _NONE),
    "losses": (Tensor, _NONE),
    "random_state": dict,
}


def write(directory: Path, name: str, values: Mapping[str, Any]) -> Path:
    """Write all fields of a record but ``path``, and return the path, which is numbered if the name is taken.

    Raises:
        OSError: if it can't be written; no part of it remains.
    """
    content = io.BytesIO()
    torch.save({"format": _FORMAT, "version": _VERSION, "spike": dict(values)}, content)
    directory.mkdir(parents=True, exist_ok=True)
    path = _reserved(directory, name)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_bytes(content.getbuffer())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        path.unlink()
        raise
    return path


def _reserved(directory: Path, name: str) -> Path:
    """Create an empty file of a name that no other run uses."""
    for number in count(1):
        path = directory / f"{name}{f'-{number}' if number > 1 else ''}{ENDING}"
        try:
            path.open("xb").close()
        except FileExistsError:
            continue
        return path
    raise AssertionError

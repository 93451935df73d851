"""The file of one spike."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.spike_recorder.random_state import restore

_FORMAT = "ignite_monitor spike"
_VERSION = 1
ENDING = ".spike.pt"
"""How the names of records end."""

_NAMED = 3


@dataclass(frozen=True)
class SpikeRecord:
    """A spike, and what there was when it came, as :func:`load_spike` gives it.

    Attributes:
        iteration: the iteration.
        epoch: the epoch.
        rank: the rank that has written it.
        name: what has been judged: ``grad/norm`` for one.
        norm: its value.
        threshold: what that was compared with; inf where it was not judged by size.
        culprits: parameter -> its share of the excess; empty where single tensors are not judged.
        source: where a value comes from that is not finite: a dictionary of ``name``, ``kind`` and ``text``, see
            ``GradMonitor``; None where it is finite, or that has not been found.
        lr: the learning rate of each parameter group of the monitor's optimizer; None where it has none.
        ids: what ``ids`` returned for the batch; None without.
        batch: the batch as the train step was given it: tensors on the CPU, mappings and dataclasses as dictionaries,
            named tuples as tuples; None where it was not to be saved, or could not be.
        losses: the loss of every sample, on the CPU, where the train step records them; else None.
        random_state: of torch, Python and NumPy before the train step.
        path: the file.
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
    ids: Any
    batch: Any
    losses: Tensor | None
    random_state: dict[str, Any] = field(repr=False)
    path: str

    @property
    def rows(self) -> list[int]:
        """The rows of the batch with the largest losses, at most three, the largest first; what is NaN is largest."""
        if self.losses is None or not self.losses.numel():
            return []
        by_row = self.row_losses
        found: list[int] = torch.topk(by_row, min(_NAMED, len(by_row))).indices.tolist()
        return found

    @property
    def row_losses(self) -> Tensor:
        """The loss of every row: the mean, where a sample has several. Empty where none are recorded."""
        losses = torch.empty(0) if self.losses is None else self.losses
        return losses.double().flatten(1).mean(1) if losses.dim() > 1 else losses.double()

    def restore_random_state(self) -> None:
        """Have torch, Python and NumPy draw the random numbers of the recorded step next.

        With the weights from before the step, ``batch`` then gives the same loss to the last bit. States of CUDA
        devices that are not there are left out.
        """
        restore(self.random_state)


def load_spike(path: str | os.PathLike[str]) -> SpikeRecord:
    """Read what :class:`SpikeRecorder` has written, with no more trust than ``torch.load(weights_only=True)``.

    Args:
        path: a file of its directory.

    Returns:
        The record.

    Raises:
        OSError: if it can't be read.
        ValueError: if it is no such file, or is damaged.

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
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is no record of a spike, or is damaged") from error
    if not isinstance(found, Mapping) or found.get("format") != _FORMAT:
        raise ValueError(f"{path} is no record of a spike")
    if found.get("version") != _VERSION:
        raise ValueError(f"{path} is of version {found.get('version')!r}, and this package knows {_VERSION}")
    try:
        return SpikeRecord(**found["spike"], path=path)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of a spike, or is damaged") from error


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Write a record's attributes but its path: it is there with all it holds, or not at all, with an OSError."""
    content = io.BytesIO()
    torch.save({"format": _FORMAT, "version": _VERSION, "spike": dict(values)}, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_bytes(content.getbuffer())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise

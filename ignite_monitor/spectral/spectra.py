"""Measures the spectral norms of a model's weights again and again, each time from what the last one has found."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model._torch import foreach_copy
from ignite_monitor.model.devices import move_like, upload
from ignite_monitor.model.sampling import fnv1a_64
from ignite_monitor.monitor.deferred_flag import DeferredFlag
from ignite_monitor.spectral.block_lanczos import WARM
from ignite_monitor.spectral.effective_weights import Weight
from ignite_monitor.spectral.matrices import Matrices, work_dtype
from ignite_monitor.spectral.norm import TOLERANCE, SpectralNorms, newton_schulz, power, svd

# Where looking at the bound would mean to wait for a device, or ranks might see it differently, these many steps are
# made: without vectors, with them, and where the last bound was too wide.
_COLD, _WARM, _AGAIN = 40, 14, 40


# So many elements are measured as one batch, which is a float32 copy of them. On the CPU batches make no big matrix
# faster, and one alone need not be copied.
_BATCH = {"cpu": 1 << 18}
_LARGE_BATCH = 1 << 24


class Batch(NamedTuple):
    """Weights that are measured at once."""

    names: list[str]
    matrices: Matrices  # some turned and filled up with zeros
    dtype: torch.dtype  # what they are stored in
    is_shared: bool  # whether their rows are shared out over ranks


def batches(weights: Iterable[Weight]) -> Iterable[Batch]:
    """Weights of one size, dtype and device together; each batch, which may be a copy, when it is asked for."""
    alike: dict[Any, list[tuple[Weight, Tensor]]] = {}
    for weight in weights:
        local = weight.local
        # Fewer batches are quicker on an accelerator, so there shapes go together that have the shorter side in common:
        # rows of zeros change no norm. Of what is shared out a rank can't know how many rows others would need.
        together = local.device.type != "cpu" and not weight.groups
        if together and len(local) < local.shape[1]:
            local = local.T
        shape = local.shape[1:] if together else (weight.rows, *local.shape)
        alike.setdefault((local.device, local.dtype, shape, weight.groups), []).append((weight, local))
    for (device, dtype, _, groups), members in alike.items():
        members.sort(key=lambda each: -len(each[1]))
        while members:
            # Every rank makes the same batches, whatever its part of the rows.
            weight, local = members[0]
            rows = weight.rows if groups else len(local)
            size = max(1, _BATCH.get(device.type, _LARGE_BATCH) // (rows * local.shape[1]))
            batch, members = members[:size], members[size:]
            parts = [each.to(work_dtype(dtype)) for _, each in batch]
            if len({len(part) for part in parts}) > 1:
                stack = parts[0].new_zeros(len(parts), *parts[0].shape)
                foreach_copy([row[: len(part)] for row, part in zip(stack, parts, strict=True)], parts)
            else:
                stack = torch.stack(parts) if len(parts) > 1 else parts[0].unsqueeze(0)
            matrices = Matrices(stack, groups)
            yield Batch([each.name for each, _ in batch], matrices, dtype, bool(groups))


class Spectra(NamedTuple):
    """What was measured, for each weight in order."""

    norms: Tensor  # spectral norms; NaN for a weight that is not finite
    errors: Tensor  # bounds of their relative errors; NaN where nothing is known
    frobenius: Tensor  # Frobenius norms


class SpectralMeter:
    """Spectral norms by one of ``METHODS``, and the vectors that its next measurement starts with."""

    def __init__(self, method: str, logger: logging.Logger, prefix: str, what: str) -> None:
        self.method = method
        self.steps = 0  # how many of "power" the last measurement made, for the weight that needed most
        self.count = 0  # how many measurements there have been
        self.vectors: dict[str, Tensor] = {}  # by the weight's name
        self._logger = logger
        self._about = prefix, what
        self._failed, self._wide, self._damaged = DeferredFlag(), DeferredFlag(), DeferredFlag()
        self._warned = False

    @property
    def is_whole(self) -> bool:
        """Whether it needs all of a weight on every rank."""
        return self.method != "power"

    def measure(self, weights: Iterable[Weight]) -> Spectra:
        """The norms of all weights, of which there is at least one."""
        self._again = self._wide.take()
        self.count += 1
        vectors: dict[str, Tensor] = {}
        names: list[str] = []
        found: list[SpectralNorms] = []
        weights = list(weights)
        for batch in batches(weights):
            norms = self._measure(batch)
            names += batch.names
            found.append(norms)
            if norms.vectors is not None:
                vectors |= zip(batch.names, (each.clone() for each in norms.vectors), strict=True)
        self.vectors, self.steps = vectors, max(each.steps for each in found)
        device = found[0].norms.device
        places = {name: place for place, name in enumerate(names)}
        order = upload(torch.tensor([places[weight.name] for weight in weights], device="cpu"), device)
        columns = ([getattr(each, name).to(device, non_blocking=True) for each in found] for name in Spectra._fields)
        spectra = Spectra(*(torch.cat(column)[order] for column in columns))
        self._damaged.set(spectra.norms.isnan().any())
        self.warn()
        return spectra

    def warn(self, wait: bool = False) -> None:
        """Say, once, that weights that are not finite are left out; that is known when the device has got there."""
        if self._damaged.take(wait) and not self._warned:
            self._warned = True
            self._logger.warning("%s: %s that are not finite are left out", *self._about)

    def state_dict(self) -> dict[str, Any]:
        """How many measurements there have been, the method, and the vectors by name."""
        return {"count": self.count, "method": self.method, "vectors": OrderedDict(self.vectors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, or raise a TypeError or ValueError; vectors that fit no weight are not used."""
        count, vectors = state_dict.get("count"), state_dict.get("vectors")
        if not isinstance(count, int) or not isinstance(vectors, Mapping):
            raise TypeError("Argument state_dict should hold a count and vectors by name")
        for name, each in vectors.items():
            if not isinstance(name, str) or not isinstance(each, Tensor):
                raise TypeError(
                    f"Argument state_dict should hold a tensor for each name, but {name!r} has {type(each)}"
                )
            if each.ndim != 2 or not each.dtype.is_floating_point or not bool(each.isfinite().all()):
                raise ValueError(f"Argument state_dict should hold vectors, finite, for {name!r}")
        self.count = count
        self.vectors = {name: each.detach().clone() for name, each in vectors.items()}
        if state_dict.get("method") == "power":  # another one may have been given up
            self.method = "power"

    def _measure(self, batch: Batch) -> SpectralNorms:
        matrices = batch.matrices
        seed = fnv1a_64("\n".join([*batch.names, str(self.count)]))
        generator = torch.Generator(matrices.device).manual_seed(seed % 2**63)
        if self.method == "svd":
            return svd(matrices)
        if self.method != "power":
            dtype = batch.dtype if batch.dtype == torch.bfloat16 else matrices.dtype
            found = newton_schulz(matrices, self.method, generator, dtype)
            failed = found.errors.isinf()
            self._failed.set(failed.any())
            if not self._failed.take():
                norms = found.norms.masked_fill(failed, torch.nan)
                return found._replace(norms=norms, errors=found.errors.masked_fill(failed, torch.nan))
            self._logger.warning(
                '%s: method "%s" gives no norm that is possible for some %s: "power" takes its place from here on',
                self._about[0], self.method, self._about[1],
            )  # fmt: skip
            self.method = "power"
        vectors = self._known(batch)
        steps = None
        if matrices.device.type != "cpu" or batch.is_shared:
            steps = _COLD if vectors is None else _WARM
            if self._again and not batch.is_shared:
                steps = _AGAIN
        found = power(matrices, vectors, generator, steps)
        if steps is not None:
            self._wide.set((found.errors > TOLERANCE).any())
        return found

    def _known(self, batch: Batch) -> Tensor | None:
        shape = (WARM, batch.matrices.n)
        known = [self.vectors.get(name) for name in batch.names]
        if any(each is None or each.shape != shape for each in known):
            return None
        like = torch.empty((), dtype=batch.matrices.dtype, device=batch.matrices.device)
        return torch.stack([move_like(each, like) for each in known if each is not None])

"""What a model's modules return, less what those of its reference do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ignite_monitor.activation.measurement import Measurement
from ignite_monitor.model.aside import is_plain
from ignite_monitor.model.tensors import floating_tensors, tagged_tensors
from ignite_monitor.monitor.named_values import NamedValues


class OutputComparison:
    """Measures each output of the model against that of the reference.

    Attributes:
        measured: what takes the differences in.
        incomplete: tags of modules that could not be compared in all of their calls.
        seen: whether a forward pass has been compared.
    """

    def __init__(self, tags: Mapping[str, str]) -> None:
        self._tags = tags
        self._begun: set[str] = set()
        self.measured: Measurement | None = None
        self.incomplete: set[str] = set()
        self.seen = False

    def start(self, measured: Measurement) -> None:
        """An iteration begins."""
        self.measured = measured
        self.incomplete.clear()
        self._begun.clear()

    def keep(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Sequence[Tensor | None]:
        """What to keep of a call of the reference: the tensors that it has returned."""
        return [tensor for _, tensor in floating_tensors(output)]

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kept: list[Tensor | None]
    ) -> None:
        """A call of the model begins.

        Args:
            kept: what was kept of the same call of the reference.
        """
        self._begun.add(name)

    def leave(self, name: str, output: Any, entered: None, kept: list[Tensor | None]) -> bool | None:
        """A call of the model has returned; whether its output is like the reference's.

        Args:
            entered: None.
            kept: what was kept of the same call of the reference.
        """
        tensors = tagged_tensors(output)
        initial = [tensor for tensor in kept if tensor is not None]
        alike = [tensor.shape for _, tensor in tensors] == [tensor.shape for tensor in initial]
        if self.measured is None or not alike or not all(map(is_plain, [*(each for _, each in tensors), *initial])):
            self.incomplete.add(self._tags[name])
            return None
        for (index, tensor), other in zip(tensors, initial, strict=True):
            key = f"{self._tags[name]}/{index}" if index else self._tags[name]
            self.measured.add_difference(key, name or "_root_", tensor.detach(), other.detach())
        return True

    def passed(self, results: dict[str, list[Any]]) -> None:
        """A forward pass of the whole model has returned.

        Args:
            results: name -> what :meth:`leave` returned, one for each call.
        """
        self.incomplete |= {self._tags[name] for name in self._begun - results.keys()}
        self._begun.clear()
        self.seen |= bool(results)
        if self.measured is not None:
            self.measured.pass_ended()


def without(found: NamedValues, incomplete: Collection[str]) -> NamedValues:
    """Names and numbers, but for the differences of some modules."""
    starts = tuple(f"activation_difference/{tag}/" for tag in incomplete)
    kept = [index for index, name in enumerate(found.names) if not name.startswith(starts)] if starts else []
    return found if not starts or len(kept) == len(found.names) else found.rows(kept)

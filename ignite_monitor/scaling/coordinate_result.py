"""The result of a coordinate check."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ignite_monitor.scaling.plot import draw
from ignite_monitor.scaling.slopes import FLAT, Record, Slope, log_log_slope, shown


class CoordinateCheck:
    """Records of the same training at several widths.

    Args:
        records: the records.
        expected: (layer, quantity) -> the expected slope.

    Attributes:
        records: the records, in the order in which they were made.
        slopes: for each layer, step and quantity, the least-squares slope of log value over log width. Values of 0,
            such as all changes before the first update, are not used.
    """

    def __init__(self, records: Iterable[Record], expected: Mapping[tuple[str, str], float] | None = None) -> None:
        self.records = list(records)
        points: dict[tuple[str, int, str], list[tuple[float, float]]] = defaultdict(list)
        for record in self.records:
            if record.value > 0 and math.isfinite(record.value):
                key = record.layer, record.step, record.quantity
                points[key].append((math.log(record.width), math.log(record.value)))
        self.slopes = [
            Slope(*key, *fitted, (expected or {}).get((key[0], key[2])))
            for key, values in points.items()
            if (fitted := log_log_slope(values)) is not None
        ]

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        return list(dict.fromkeys(record.layer for record in self.records))

    @property
    def quantities(self) -> list[str]:
        """Names of the measured quantities."""
        return list(dict.fromkeys(record.quantity for record in self.records))

    @property
    def last_step(self) -> int:
        """The last step."""
        return max((record.step for record in self.records), default=0)

    def slopes_at(self, step: int | None = None) -> dict[tuple[str, str], Slope]:
        """Return (layer, quantity) -> slope at one step.

        Args:
            step: number of updates before; None for the last step.
        """
        step = self.last_step if step is None else step
        return {(slope.layer, slope.quantity): slope for slope in self.slopes if slope.step == step}

    def table(self, step: int | None = None) -> str:
        """Return all slopes at one step as text: slope ± standard error, and the expected slope in parentheses.

        Steep slopes are marked by a star.

        Args:
            step: number of updates before; None for the last step.
        """
        slopes = self.slopes_at(step)
        rows = [
            [shown(layer), *(_cell(slopes.get((layer, each))) for each in self.quantities)] for layer in self.layers
        ]
        rows = [["layer", *self.quantities], *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)

    def summary(self) -> str:
        """Describe which layers depend on the width after the last step, and which have diverged."""
        slopes = list(self.slopes_at().values())
        steep: dict[str, list[str]] = defaultdict(list)
        for slope in slopes:
            if slope.is_steep:
                verb = "grows" if slope.slope > 0 else "shrinks"
                expected = "" if slope.expected is None else f", expected {slope.expected:+.2f}"
                steep[shown(slope.layer)].append(
                    f"{slope.quantity} {verb} as width^{slope.slope:.2f} (± {slope.standard_error:.2f}{expected})"
                )
        lines = [f"{layer}: {'; '.join(texts)}" for layer, texts in steep.items()]
        lost = {(each.layer, each.width): None for each in self.records if not math.isfinite(each.value)}
        lines += [f"{shown(layer)}: not finite at width {width}" for layer, width in lost]
        if lines:
            return "\n".join([f"These layers depend on the width after step {self.last_step}:", *lines])
        if slopes and all(math.isinf(slope.standard_error) for slope in slopes):
            return "Slopes through two points have no standard error: use more widths, or more seeds."
        return f"No layer depends on the width: no slope after step {self.last_step} is clearly beyond ±{FLAT}."

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw each quantity over the width, and its slopes, after the last step.

        Args:
            path: the figure's file: .png, .pdf or .svg.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if there are no records, or the file is of another kind.
        """
        draw(self, path)


def _cell(slope: Slope | None) -> str:
    if slope is None:
        return "-"
    expected = "" if slope.expected is None else f" ({slope.expected:+.2f})"
    return f"{slope.slope:+.2f} ± {slope.standard_error:.2f}{expected}{' *' * slope.is_steep}"

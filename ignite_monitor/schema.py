"""What a monitor publishes, key by key: what docstrings, charts and reports are made from."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

_WIDTH = 118


@dataclass(frozen=True)
class Key:
    """A key, or all keys of a pattern."""

    pattern: str  # the key without the monitor's prefix; ``{name}`` stands for any text, ``{i}`` for a number
    meaning: str  # what it says, in reStructuredText
    unit: str = ""  # what it is measured in, empty for a plain number or what the meaning says
    when: str = ""  # the circumstances it is there in; empty if each run has it
    # Which values that are not finite are values: none, ``inf``, or ``any``, NaN too. The others stand for what could
    # not be measured, and are absent.
    nonfinite: str = ""
    chart: str = ""  # the title of the chart of TensorBoard's that it is in, empty for none

    @cached_property
    def regex(self) -> str:
        """A regular expression for the keys."""
        return re.sub(r"\\{(\w+)\\}", lambda found: r"\d+" if found[1] == "i" else ".+", re.escape(self.pattern))

    def has(self, number: float) -> bool:
        """Whether a number is a value of the key."""
        return number - number == 0 or self.nonfinite == "any" or (self.nonfinite == "inf" and number == number)


@dataclass(frozen=True)
class Schema:
    """The keys of one monitor."""

    kind: str  # what reports call the monitor
    prefix: str  # what its keys start with unless the user says otherwise; empty where the patterns hold it
    keys: tuple[Key, ...]
    # Those that together say that the monitor is there, whatever its prefix; without, the prefix says it.
    signs: frozenset[str] = frozenset()

    @property
    def families(self) -> list[str]:
        """What the patterns start with, where the prefix may be empty."""
        return [] if self.prefix else list(dict.fromkeys(key.pattern.partition("/")[0] for key in self.keys))

    def find(self, name: str) -> Key | None:
        """The key that a name, without the prefix, is of."""
        return next((key for key in self.keys if re.fullmatch(key.regex, name)), None)

    def absent(self, numbers: Mapping[str, float]) -> set[str]:
        """The names whose number, not finite, is no value of their key, but stands for what is absent."""
        return {
            name
            for name, number in numbers.items()
            if number - number  # NaN, and 0 of what is finite
            and not any(key.has(number) for key in self._with_nonfinite if re.fullmatch(key.regex, name))
        }

    @cached_property
    def _with_nonfinite(self) -> list[Key]:
        return [key for key in self.keys if key.nonfinite]

    def charts(self) -> dict[str, str]:
        """Chart -> a regular expression for the names, without the prefix, that are in it."""
        titles = dict.fromkeys(key.chart for key in self.keys if key.chart)
        return {title: "|".join(key.regex for key in self.keys if key.chart == title) for title in titles}

    def table(self) -> str:
        """The keys and what they mean, as a table in reStructuredText."""
        rows = [(f"``{'/'.join(filter(None, [self.prefix, key.pattern]))}``", _described(key)) for key in self.keys]
        header = "in ``engine.state.metrics``"
        left = max(len(header), *(len(name) for name, _ in rows))
        right = _WIDTH - 4 - left - 2  # of a docstring that is indented
        rule = f"{'=' * left}  {'=' * right}"
        lines = [rule, f"{header:{left}}  meaning", rule]
        for name, meaning in rows:
            wrapped = textwrap.wrap(meaning, right, break_long_words=False, break_on_hyphens=False)
            lines += [f"{first:{left}}  {line}" for first, line in zip_longest([name], wrapped, fillvalue="")]
        return "\n".join([*lines, rule])


def _described(key: Key) -> str:
    unit, when = f" ({key.unit})" if key.unit else "", f"; {key.when}" if key.when else ""
    return f"{key.meaning}{unit}{when}"

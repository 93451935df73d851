"""Schemas: the keys that a monitor publishes, for docstrings, docs, charts and reports."""

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
    """A published key, or a pattern of keys.

    Attributes:
        pattern: the key without the prefix; ``{i}`` matches a number, any other ``{name}`` any text.
        meaning: one noun phrase or statement, in reStructuredText.
        unit: the unit of the values; empty for none.
        when: the condition under which the key is reported; empty if every run reports it.
        nonfinite: ``"inf"`` or ``"any"`` (NaN too) if such numbers are values; else they are not reported.
        chart: title of the TensorBoard chart that shows it; empty for none.
    """

    pattern: str
    meaning: str
    unit: str = ""
    when: str = ""
    nonfinite: str = ""
    chart: str = ""

    @cached_property
    def regex(self) -> str:
        """A regular expression that matches the keys."""
        return re.sub(r"\\{(\w+)\\}", lambda match: r"\d+" if match[1] == "i" else ".+", re.escape(self.pattern))

    def allows(self, number: float) -> bool:
        """Check that a number is a value of the key.

        Args:
            number: any number.
        """
        return number - number == 0 or self.nonfinite == "any" or (self.nonfinite == "inf" and number == number)


@dataclass(frozen=True)
class Schema:
    """The keys of one monitor.

    Attributes:
        kind: name of the monitor in reports.
        prefix: default prefix of its keys; empty if the patterns contain it.
        keys: the keys.
        signs: keys that together identify the monitor under any prefix; empty if only its prefix does.
    """

    kind: str
    prefix: str
    keys: tuple[Key, ...]
    signs: frozenset[str] = frozenset()

    @property
    def families(self) -> list[str]:
        """The first parts of the patterns, if the prefix may be empty."""
        return [] if self.prefix else list(dict.fromkeys(key.pattern.partition("/")[0] for key in self.keys))

    def find(self, name: str) -> Key | None:
        """Return the first key that matches a name.

        Args:
            name: a name without the prefix.
        """
        return next((key for key in self.keys if re.fullmatch(key.regex, name)), None)

    def not_reported(self, numbers: Mapping[str, float]) -> set[str]:
        """Return the names whose number is non-finite and no value of their key.

        Args:
            numbers: name without the prefix -> number.
        """
        return {
            name
            for name, number in numbers.items()
            if number - number  # NaN for non-finite numbers, else 0
            and not any(key.allows(number) for key in self._with_nonfinite if re.fullmatch(key.regex, name))
        }

    @cached_property
    def _with_nonfinite(self) -> list[Key]:
        return [key for key in self.keys if key.nonfinite]

    def charts(self) -> dict[str, str]:
        """Return chart -> a regular expression that matches the names in it, without the prefix."""
        titles = dict.fromkeys(key.chart for key in self.keys if key.chart)
        return {title: "|".join(key.regex for key in self.keys if key.chart == title) for title in titles}

    def table(self) -> str:
        """Return the keys and their meanings as a table in reStructuredText."""
        rows = [(f"``{'/'.join(filter(None, [self.prefix, key.pattern]))}``", _described(key)) for key in self.keys]
        header = "in ``engine.state.metrics``"
        left = max(len(header), *(len(name) for name, _ in rows))
        right = _WIDTH - 4 - left - 2  # the docstring is indented by 4
        rule = f"{'=' * left}  {'=' * right}"
        lines = [rule, f"{header:{left}}  meaning", rule]
        for name, meaning in rows:
            wrapped = textwrap.wrap(meaning, right, break_long_words=False, break_on_hyphens=False)
            lines += [f"{first:{left}}  {line}" for first, line in zip_longest([name], wrapped, fillvalue="")]
        return "\n".join([*lines, rule])


def _described(key: Key) -> str:
    unit, when = f" ({key.unit})" if key.unit else "", f"; {key.when}" if key.when else ""
    return f"{key.meaning}{unit}{when}"

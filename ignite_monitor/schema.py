"""Schemas: the keys that a monitor publishes, for docstrings, docs, figures and reports."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

_WIDTH, _LEAST_WIDTH = 114, 40  # of a table, which a docstring indents by 4; of its meanings


@dataclass(frozen=True)
class Key:
    """A published key, or a pattern of keys.

    Attributes:
        pattern: the key without the prefix; ``{i}`` matches a number, any other ``{name}`` any text.
        meaning: one noun phrase or statement, in reStructuredText.
        unit: the unit of the values; empty for none.
        when: the condition under which the key is reported; empty if every run reports it.
        nonfinite: ``"inf"`` or ``"any"`` (NaN too) if such numbers are values; else they are not reported.
    """

    pattern: str
    meaning: str
    unit: str = ""
    when: str = ""
    nonfinite: str = ""

    @cached_property
    def regex(self) -> str:
        """A regular expression that matches the keys."""
        return re.sub(r"\\{(\w+)\\}", lambda match: r"\d+" if match[1] == "i" else ".+", re.escape(self.pattern))


@dataclass(frozen=True)
class Schema:
    """The keys of one monitor.

    Attributes:
        kind: name of the monitor in reports.
        prefix: default prefix of its keys; empty if the patterns contain it.
        keys: the keys.
    """

    kind: str
    prefix: str
    keys: tuple[Key, ...]

    def find(self, name: str) -> Key | None:
        """Return the first key that matches a name.

        Args:
            name: a name without the prefix.
        """
        return next((key for key in self.keys if re.fullmatch(key.regex, name)), None)

    def not_reported(self, values: Mapping[str, object]) -> set[str]:
        """Return the names of non-finite floats that are no values of their key.

        Args:
            values: name without the prefix -> value.
        """
        names = set()
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                key = self.find(name)
                allowing = ("any",) if math.isnan(value) else ("any", "inf")
                if key is None or key.nonfinite not in allowing:
                    names.add(name)
        return names

    def table(self) -> str:
        """Return the keys and their meanings as a table in reStructuredText."""
        rows = {}
        for key in self.keys:
            unit, when = f" ({key.unit})" if key.unit else "", f"; {key.when}" if key.when else ""
            rows[f"``{self.prefix}/{key.pattern}``".replace("``/", "``")] = f"{key.meaning}{unit}{when}"
        header = "in ``engine.state.metrics``"
        left = max(map(len, [header, *rows]))
        right = max(_WIDTH - left - 2, _LEAST_WIDTH)
        rule = f"{'=' * left}  {'=' * right}"
        lines = [rule, f"{header:{left}}  meaning", rule]
        for name, meaning in rows.items():
            wrapped = textwrap.wrap(meaning, right, break_long_words=False, break_on_hyphens=False)
            lines += [f"{first:{left}}  {line}" for first, line in zip_longest([name], wrapped, fillvalue="")]
        return "\n".join([*lines, rule])

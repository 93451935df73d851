"""Schemas: the keys that a monitor publishes, for docstrings, docs, figures and reports."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_WIDTH = 114  # of lines that a docstring indents by 4


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

    def listing(self) -> str:
        """Return the keys and their meanings as a list in reStructuredText."""
        start = f"{self.prefix}/" if self.prefix else ""
        items = []
        for key in self.keys:
            unit, when = f" ({key.unit})" if key.unit else "", f"; {key.when}" if key.when else ""
            text = f"- ``{start}{key.pattern}``: {key.meaning}{unit}{when}"
            items += textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(["Keys in ``engine.state.metrics``:", "", *items])

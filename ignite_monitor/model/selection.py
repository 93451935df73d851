"""Which modules and parameters a user means, by regular expressions."""

from __future__ import annotations

import re

Pattern = str | re.Pattern[str] | None


class Selection:
    """Picks names: those in which ``include`` is found and ``exclude`` is not.

    Args:
        include: a regular expression, as for ``re.search``; None for every name.
        exclude: a regular expression; None for no name.

    Raises:
        TypeError: if one is neither a string, nor compiled, nor None.
        ValueError: if one is no regular expression.
    """

    def __init__(self, include: Pattern = None, exclude: Pattern = None) -> None:
        self._include = _compiled("include", include)
        self._exclude = _compiled("exclude", exclude)

    def __contains__(self, name: str) -> bool:
        included = self._include is None or self._include.search(name) is not None
        return included and (self._exclude is None or self._exclude.search(name) is None)


def _compiled(name: str, pattern: object) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    if not isinstance(pattern, (str, re.Pattern)):
        raise TypeError(f"Argument {name} should be a regular expression or None, but given {type(pattern)}")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"Argument {name} should be a regular expression, but given {pattern!r}: {error}") from None

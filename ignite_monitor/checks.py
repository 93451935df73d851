"""Checks of arguments: TypeError for a wrong type, ValueError for a wrong value."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, cast


def check_real(
    name: str, value: object, *, above: float = -math.inf, below: float = math.inf, least: float = -math.inf
) -> float:
    """Return the argument as a float; ValueError if it is NaN or out of its bounds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"Argument {name} should be a number, but given {type(value)}")
    number = float(value)
    if not above < number < below or number < least:
        bounds_by_name = {"greater than": above, "at least": least, "less than": below}
        bounds = [f"{word} {bound:g}" for word, bound in bounds_by_name.items() if math.isfinite(bound)]
        raise ValueError(f"Argument {name} should be {' and '.join(bounds) or 'finite'}, but given {value}")
    return number


def check_count(name: str, value: object, *, least: int = 0) -> int:
    """Return the argument as an int; ValueError if it is smaller than ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"Argument {name} should be an integer, but given {type(value)}")
    if value < least:
        raise ValueError(f"Argument {name} should be at least {least}, but given {value}")
    return int(value)


def check_type(name: str, value: object, kind: type | tuple[type, ...], described: str) -> None:
    """Refuse an argument of the wrong type."""
    if not isinstance(value, kind):
        raise TypeError(f"Argument {name} should be of type {described}, but given {type(value)}")


def check_choice(name: str, value: object, *allowed: str) -> None:
    """Refuse an argument that is none of the allowed strings."""
    check_type(name, value, str, "str")
    if value not in allowed:
        raise ValueError(f"Argument {name} should be {' or '.join(map(repr, allowed))}, but given {value!r}")


def check_pattern(name: str, value: Any) -> re.Pattern[str] | None:
    """Compile the argument, a regular expression or None."""
    try:
        return None if value is None else re.compile(value)
    except (TypeError, re.error) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"Argument {name} should be a regular expression, but given {value!r}: {error}") from None


def check_function(name: str, function: object, *of: str, described: str = "", optional: bool = True) -> None:
    """Refuse an argument that can't be called with the positional arguments named by ``of``, if that is known."""
    if optional and function is None:
        return
    described = described or f"a function of {' and '.join(of)}{' or None' * optional}"
    try:
        inspect.signature(cast(Callable[..., Any], function)).bind(*of)
    except ValueError:  # the signature is not known
        return
    except TypeError as error:
        raise TypeError(f"Argument {name} should be {described}, but given {function!r}: {error}") from None

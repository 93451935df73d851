"""What a user says of layers by name, last part of the name, or type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ignite_monitor.checks import check_real, check_type
from ignite_monitor.scaling.graph import LAYER_TYPES

T = TypeVar("T")


def check_ab(name: str, value: object) -> tuple[float, float]:
    """The argument as two floats.

    Raises:
        TypeError: if it is not two numbers.
    """
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"Argument {name} should be two numbers (a, b), but given {value!r}")
    return check_real(name, value[0]), check_real(name, value[1])


def overridden(
    name: str, overrides: Mapping[str, Any] | None, types: Mapping[str, str], check: Callable[[str, Any], T]
) -> dict[str, T]:
    """What the overrides say of the layers, by the layers' names.

    Args:
        check: makes of (name, value) a value, or raises.

    Raises:
        TypeError: if they are no mapping, or a value is of another type.
        ValueError: if a key fits no layer, or a value can't be.
    """
    if overrides is None:
        return {}
    check_type(name, overrides, Mapping, "Mapping or None")
    checked = {key: check(f"{name}[{key!r}]", value) for key, value in overrides.items()}
    found: dict[str, T] = {}
    used = set(LAYER_TYPES)  # a preset has them all, whatever the model
    for layer, kind in types.items():
        keys = [key for key in (layer, layer.rpartition(".")[2], kind) if key in checked]
        used.update(keys)
        if keys:
            found[layer] = checked[keys[0]]
    if unknown := sorted(map(str, set(checked) - used)):
        raise ValueError(f"Argument {name} should name layers of the model or layer types, but given {unknown}")
    return found

"""A coordinate check from the command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ignite_monitor.scaling.coordinate_check import coordinate_check
from ignite_monitor.scaling.coordinate_result import CoordinateCheck

NAMES = ("make_model", "make_batch", "train_step")


def run(target: str, widths: Sequence[int], steps: int, seeds: int) -> CoordinateCheck:
    """A coordinate check of what a user's function makes.

    Args:
        target: ``MODULE:FACTORY``, where MODULE is the name of a module or the path of a Python file, and FACTORY,
            called without arguments, returns ``(make_model, make_batch)`` or these and ``train_step``.

    Raises:
        ValueError: if the target is no such thing, or raises an error.
    """
    try:
        made = _factory(target)()
    except ValueError:
        raise
    except Exception as error:  # the user's own code
        raise ValueError(f"{target}: {type(error).__name__}: {error}") from error
    if isinstance(made, Mapping) or not isinstance(made, Sequence) or not 2 <= len(made) <= 3:
        raise ValueError(f"{target} should return {' and '.join(NAMES[:2])}, or these and {NAMES[2]}, but gives {made}")
    options: dict[str, Any] = dict(zip(NAMES, made, strict=False))
    try:
        return coordinate_check(**options, widths=widths, steps=steps, seeds=seeds)
    except Exception as error:  # likewise
        raise ValueError(f"{target}: {type(error).__name__}: {error}") from error


def _factory(target: str) -> Any:
    module_name, _, name = target.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{target!r} should be MODULE:FACTORY")
    try:
        module = _load(module_name)
    except Exception as error:
        raise ValueError(f"{module_name} can't be imported: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ValueError(f"{module_name} has no function {name}")
    return factory


def _load(name: str) -> Any:
    path = Path(name)
    if path.suffix != ".py":
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""Training-health handlers for PyTorch-Ignite."""

import ast
from importlib import import_module
from pathlib import Path

# Names are imported on first use: reading a file needs neither torch nor Ignite. The stub beside this file lists them.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULE_OF = {node.names[0].name: str(node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom)}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

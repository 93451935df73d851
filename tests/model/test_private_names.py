"""Private names of torch and Ignite: one file has all of them, and a missing one is refused by its name."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import torch
from ignite.engine import Engine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.model import _torch

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "ignite_monitor"
FILE = PACKAGE / "model" / "_torch.py"

OWNERS = (
    *(torch, torch._C, torch._C._functorch, torch.overrides, torch.utils, torch.autograd.Variable, torch.Tensor),
    *(nn.Module(), nn.Conv2d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1), nn.modules.conv, nn.modules.batchnorm),
    *(torch.ones(1).untyped_storage(), torch.optim.Optimizer, torch.ops.aten.add, DistributedDataParallel),
    Engine(lambda engine, batch: None),
)


def is_private(name: str) -> bool:
    return name[:1] == "_" and name[:2] != "__"


PRIVATE = {name for owner in OWNERS for name in dir(owner) if is_private(name)}
PRIVATE |= {"_local_tensor", "_join_config", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def uses(path: Path) -> set[str]:
    """The private names that a file asks others for: attributes of anything but self, imports, and strings."""
    result = set()
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            base = node.value
            if not (isinstance(base, ast.Name) and base.id in ("self", "cls")):
                result.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            result.add(node.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("torch", "ignite"):
            result |= {part for alias in node.names for part in (*node.module.split("."), alias.name)}
    return {name for name in result if is_private(name)}


def defined(path: Path) -> set[str]:
    """Return the names of a file's classes and functions, and the attributes set on self."""
    result = set()
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            result.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            result.add(node.attr)
    return result


def test_all_are_in_one_file():
    others = [path for path in PACKAGE.rglob("*.py") if path != FILE]
    result = {str(path.relative_to(PACKAGE)): uses(path) & PRIVATE - defined(path) for path in others}
    assert {path: names for path, names in result.items() if names} == {}
    assert uses(FILE) & PRIVATE


def test_the_installed_ignite_has_all():
    engine = Engine(lambda engine, batch: None)
    assert all(hasattr(engine, name) for name in (_torch.TRAIN_STEP, _torch.HANDLE_EXCEPTION, _torch.EVENT_HANDLERS))


def test_an_unsupported_torch_fails_at_import_by_name_and_version():
    code = "import torch; del torch._foreach_norm; from ignite_monitor import GradMonitor"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"ImportError: ignite_monitor does not support torch {torch.__version__}" in result.stderr
    assert "_foreach_norm" in result.stderr.splitlines()[-1]

"""Private names of torch and Ignite: one file has all of them, and a missing one is refused by its name."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import torch
from ignite.engine import Engine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import GradMonitor
from ignite_monitor.model import _torch
from ignite_monitor.model._torch import check_engine
from tests._helpers import make_batches, make_trainer

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


def test_the_installed_torch_and_ignite_have_all():
    check_engine(Engine(lambda engine, batch: None))
    missing = [name for name, value in vars(_torch).items() if isinstance(value, _torch.Gone)]
    assert missing == []


SHARED = [
    "backward_number",
    "queue_callback",
    "foreach_norm",
    "dispatch_modes",
    "unseen_by_dispatch",
    "running_transform",
]


@pytest.mark.parametrize("name", SHARED)
def test_attach_refuses_without_a_name_that_all_monitors_share(name, monkeypatch):
    monkeypatch.setattr(_torch, name, _torch.Gone(f"torch.{name}"))
    model, optimizer, trainer = make_trainer()
    with pytest.raises(RuntimeError, match=re.escape(f"attach() needs torch.{name}, which torch {torch.__version__}")):
        GradMonitor(model, optimizer).attach(trainer)
    trainer.run(make_batches(1))


def test_attach_refuses_an_engine_without_a_train_step():
    model, optimizer, trainer = make_trainer()
    del trainer._process_function
    with pytest.raises(RuntimeError, match=r"needs ignite\.engine\.Engine\._process_function, which ignite \d"):
        GradMonitor(model, optimizer).attach(trainer)


def test_a_missing_name_raises_an_error_where_it_is_called():
    with pytest.raises(RuntimeError, match=re.escape(f"needs torch._missing, which torch {torch.__version__}")):
        _torch._find("torch._missing")()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_the_package_can_be_imported_without_any():
    def without(name):
        raise ImportError(name)

    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            for name in [name for name in sys.modules if name.startswith("ignite_monitor")]:
                del sys.modules[name]
            pkgutil.resolve_name = without
            package = importlib.import_module("ignite_monitor")
            for name in package.__all__:
                getattr(package, name)
            package.GradMonitor(nn.Linear(1, 1)).attach(Engine(lambda engine, batch: None))
        except BaseException as error:  # noqa: BLE001 - goes to the parent process
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as message:
        assert message.read().startswith("RuntimeError('attach() needs torch._C._current_graph_task_id")

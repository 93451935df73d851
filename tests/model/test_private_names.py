"""Private names of torch and Ignite: they stand in one file, and each may go."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ignite.engine import Engine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def uses(path: Path) -> set[str]:
    """The private names that a file asks others for: attributes of anything but self, imports, and strings."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            base = node.value
            if not (isinstance(base, ast.Name) and base.id in ("self", "cls")):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("torch", "ignite"):
            found |= {part for alias in node.names for part in (*node.module.split("."), alias.name)}
    return {name for name in found if is_private(name)}


def defined(path: Path) -> set[str]:
    """What a file's own classes and functions are called, and what it sets on self."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def test_they_stand_in_one_file():
    others = [path for path in PACKAGE.rglob("*.py") if path != FILE]
    found = {str(path.relative_to(PACKAGE)): uses(path) & PRIVATE - defined(path) for path in others}
    assert {path: names for path, names in found.items() if names} == {}
    assert uses(FILE) & PRIVATE


def asked_for() -> set[str]:
    """The names that the file looks up: by getattr, and by their path."""
    found = set()
    for node in ast.walk(ast.parse(FILE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            argument = {"getattr": 1, "_find": 0, "_or": 0, "_foreach": 0}.get(node.func.id)
            given = None if argument is None else node.args[argument]
            if isinstance(given, ast.Constant):
                found.add(given.value.rpartition(".")[2])
    return found


# Put together, or kept under a name of our own.
FURTHER = {
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    *("_process_function", "_handle_exception", "_event_handlers", "_scaled_dot_product_flash_attention_for_cpu"),
}
BACKWARD = {"GradMonitor", "WeightUpdateHandler", "gradients", "HistogramHandler"}
REFERENCES = {"reference", "RCCHandler"}
# What can't do without a name; all the rest works, with the same numbers.
NEEDED_BY = {
    "_current_graph_task_id": BACKWARD,
    "queue_callback": BACKWARD,
    "_push_mode": {"attention"},
    "_pop_mode": {"attention"},
    "_len_torch_function_stack": {"attention"},
    "DeviceContext": {"attention"},
    "_version": REFERENCES,
    "_forward_hooks": REFERENCES,
    "_forward_pre_hooks": REFERENCES,
}
ALL = "_process_function"

NAMES = sorted(asked_for() | FURTHER)


def found_without(*names):
    """What becomes of every feature, by name; several at a time, since each needs a torch that has been imported."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "_without.py"), *names],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_numbers_with_all_names():
    everything = found_without("")[""]
    assert all("refused" not in each for each in everything.values())
    norms = everything["nothing"]["norms"]
    assert [each["grad/norm"] for each in everything["GradMonitor"]["metrics"]] == pytest.approx(norms, rel=1e-6)
    assert all(each["metrics"][-1] for feature, each in everything.items() if feature != "nothing")


@pytest.mark.parametrize("names", [NAMES[i : i + 10] for i in range(0, len(NAMES), 10)], ids=" ".join)
def test_one_name_gone(names):
    found = found_without("", *names)
    everything = found.pop("")
    assert list(found) == names
    for name, without in found.items():
        assert "error" not in without, without["error"]
        refused = {feature for feature, each in without.items() if "refused" in each}
        assert refused == (set(everything) - {"nothing"} if name == ALL else NEEDED_BY.get(name, set())), name
        assert [each for feature in refused if name not in (each := without[feature]["refused"])] == []
        for feature in everything.keys() - refused:
            assert without[feature]["weights"] == everything[feature]["weights"], (name, feature)
            for number, metrics in enumerate(without[feature]["metrics"]):
                expected = pytest.approx(everything[feature]["metrics"][number], rel=1e-6, nan_ok=True)
                assert metrics == expected, (name, feature)
            assert len(without[feature]["metrics"]) == len(everything[feature]["metrics"])

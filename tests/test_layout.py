"""Who imports whom, and what the package makes public."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from enum import Enum
from graphlib import TopologicalSorter
from pathlib import Path

import ignite_monitor
from ignite_monitor import scaling

ROOT = Path(__file__).resolve().parent.parent


def imported(source: str, package: str) -> set[str]:
    """Dotted names that a source imports; ``package`` is what its relative imports start from."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            ancestors = package.split(".")
            base = ancestors[: len(ancestors) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def within(name: str, *packages: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


@functools.cache
def imports_of(*places: str) -> list[tuple[str, str]]:
    """(file, imported name) for every Python file at the places, each of which is a folder or a file, or not there."""
    result = []
    for place in places:
        for path in [*(ROOT / place).rglob("*.py"), (ROOT / place).with_suffix(".py")]:
            if path.is_file():
                file = path.relative_to(ROOT)
                package = ".".join(file.parent.parts)
                result += [(str(file), name) for name in sorted(imported(path.read_text(encoding="utf-8"), package))]
    return result


def goes_through_root(name: str) -> bool:
    """Check whether the import is the package itself or a name that it exports, and no module or folder in it."""
    root, _, rest = name.partition(".")
    path = ROOT / root / rest.split(".")[0]
    return root == "ignite_monitor" and not (rest and (path.is_dir() or path.with_suffix(".py").is_file()))


ABOVE_MONITORS = {"scaling", "spike_recorder", "healthy_checkpoint", "setup_check"}
# A layer imports those before it; the members of a layer do not import each other.
LAYERS = (
    {"checks", "schema"},
    {"keys"},
    {"model"},
    {"events"},
    {"monitor"},
    {"detection"},
    {"reference"},
    {"nonfinite"},
    {path.parent.name for path in (ROOT / "ignite_monitor").glob("*/handler.py")} - ABOVE_MONITORS,
    ABOVE_MONITORS,
)
HEIGHTS = {part: height for height, layer in enumerate(LAYERS) for part in layer}


def part_of(name: str) -> str:
    """The first part of a path in the package, or of a name in it."""
    return name.removeprefix("ignite_monitor").strip("/.").replace("/", ".").removesuffix(".py").split(".")[0]


def test_every_folder_has_its_place():
    folders = {path.parent.name for path in (ROOT / "ignite_monitor").glob("*/__init__.py")}
    assert folders == {part for part in HEIGHTS if part not in ("checks", "schema", "keys")} | {"hdf5", "report"}


def test_direction_of_imports():
    wrong = [
        (file, name)
        for file, name in imports_of("ignite_monitor")
        if within(name, "ignite_monitor")
        and (current := HEIGHTS.get(part_of(file))) is not None
        and (part_of(file) != part_of(name))
        and HEIGHTS.get(part_of(name), len(LAYERS)) >= current
    ]
    assert wrong == []


def test_no_circle_of_imports():
    """Not even one that is broken by an import inside a function."""
    root = ROOT / "ignite_monitor"
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in root.rglob("*.py")}
    graph = {
        module: {
            target
            for name in imported(path.read_text(encoding="utf-8"), module.rpartition(".")[0])
            if (target := name if name in files else name.rpartition(".")[0]) in files and target != module
        }
        for module, path in files.items()
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_who_imports_ignite():
    """Modules that compute do not know the engine."""
    allowed = ("ignite_monitor/events/", "ignite_monitor/monitor/", "ignite_monitor/hdf5/")
    users = {file for file, name in imports_of("ignite_monitor") if within(name, "ignite")}
    rest = {file for file in users if not file.startswith(allowed) and not file.endswith("/handler.py")}
    assert rest == {
        "ignite_monitor/attaching.py",
        "ignite_monitor/scaling/coordinate_check.py",
        "ignite_monitor/scaling/maxp.py",
    }


def test_only_scaling_imports_scaling():
    """It needs SciPy, so a user who never scales a model never imports it."""
    result = [(file, name) for file, name in imports_of("ignite_monitor") if within(name, "ignite_monitor.scaling")]
    assert result
    outside = [(file, name) for file, name in result if not file.startswith("ignite_monitor/scaling/")]
    assert not outside


def test_modules_import_each_other_and_not_through_the_root():
    """A name from the root would hide which layer it is of, and make the import circular."""
    assert [(file, name) for file, name in imports_of("ignite_monitor") if goes_through_root(name)] == []


def test_nothing_imports_the_tests():
    result = imports_of("ignite_monitor", "examples", "benchmarks")
    assert [(file, name) for file, name in result if within(name, "tests")] == []


def test_no_test_module_imports_another():
    """Shared code is in modules whose name starts with an underscore."""
    result = imports_of("tests")
    assert result
    assert [(file, name) for file, name in result if re.match(r"tests\.(\w+\.)*test_\w+", name)] == []


def test_helpers_of_a_folder_are_for_this_folder():
    result = [(file, name, re.match(r"tests\.(\w+)\._[a-z]", name)) for file, name in imports_of("tests")]
    assert [item for *item, helper in result if helper and not item[0].startswith(f"tests/{helper[1]}/")] == []


def in_order(names):
    return sorted(set(names), key=lambda name: (not name.isupper(), name[0].islower(), name))


def test_all_of_scaling_is_sorted_and_complete():
    public = {name for name, value in vars(scaling).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert scaling.__all__ == in_order(public)


def test_names_of_the_root_are_exported_again_in_the_words_that_type_checkers_know():
    stub = ast.parse((ROOT / "ignite_monitor" / "__init__.pyi").read_text(encoding="utf-8"))
    assert all(alias.asname == alias.name for node in stub.body for alias in node.names)
    assert ignite_monitor.__all__ == in_order(ignite_monitor.__all__)
    # Importing a module sets the package's attribute of its name.
    assert [name for name in ignite_monitor.__all__ if goes_through_root(f"ignite_monitor.{name}") is False] == []


def test_public_methods_have_a_docstring_of_their_own_or_inherited():
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(ignite_monitor.__path__, "ignite_monitor.")
        if not module.name.endswith("__main__")
    ]
    classes = {
        value
        for module in modules
        for name, value in vars(module).items()
        if name[0] != "_" and inspect.isclass(value) and value.__module__ == module.__name__
    }
    methods = {
        f"{kind.__module__}.{kind.__qualname__}.{name}": getattr(kind, name)
        for kind in classes
        for name, value in vars(kind).items()
        if (name[0] != "_" or name == "__call__")
        and (inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod, property)))
    }
    assert methods
    assert [name for name, method in methods.items() if not inspect.getdoc(method)] == []


def public_callables():
    """(name, signature, docstring) of every public class, function, and public method of a public class."""
    for package in (ignite_monitor, scaling):
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isclass(value) and not issubclass(value, (tuple, Enum, Exception)):
                yield name, inspect.signature(value.__init__), inspect.getdoc(value)
                for attribute, method in inspect.getmembers(value, inspect.isfunction):
                    if attribute[0] != "_" and method.__module__.startswith("ignite_monitor"):
                        yield f"{name}.{attribute}", inspect.signature(method), inspect.getdoc(method)
            elif inspect.isfunction(value):
                yield name, inspect.signature(value), inspect.getdoc(value)


# What a monitor overrides is for those who write one: its docstring says what its signature does not.
FOR_MONITORS = {"publish", "publish_table", "clear", "resolve_deferred", "before_train_step"}


def test_public_docstrings_document_every_argument():
    lacking = {
        f"{name}({argument})"
        for name, signature, docstring in public_callables()
        if name.rpartition(".")[2] not in FOR_MONITORS
        for argument, parameter in signature.parameters.items()
        if argument != "self" and not re.search(rf"^ +\**{argument}: ", docstring or "", re.MULTILINE)
    }
    assert lacking == set()


def test_two_files_decide_which_copies_the_host_does_not_wait_for():
    files = [*(ROOT / "ignite_monitor").rglob("*.py")]
    asking = {path.name for path in files if "non_blocking" in path.read_text(encoding="utf-8")}
    assert asking == {"devices.py", "transfer.py"}

"""The exported program of a model."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import Tensor, fx, nn

from ignite_monitor.model._torch import pytree
from ignite_monitor.model.isolation import cuda_devices, generators_of, preserved_rng_state
from ignite_monitor.model.names import named_modules, unwrapped
from ignite_monitor.scaling.operations import name_of

OLDEST = (2, 7)
"""The oldest version of torch whose export keeps linear operations as they are."""
PREFIX = "model."
"""Prefix of the names in an exported program."""


class TracingError(RuntimeError):
    """The graph of a model is not known."""


class ExportError(TracingError):
    """``torch.export`` refuses a model."""


def exported_program(model: nn.Module, inputs: Any) -> Any:
    """Export a model in evaluation mode; the model and RNG state stay unchanged.

    Copies and assertions, which depend on the sizes of tensors, are removed from the graph.

    Raises:
        ExportError: if torch refuses, or is older than :data:`OLDEST`.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        raise ExportError(refusal(f"torch {torch.__version__} is not supported, but {OLDEST[0]}.{OLDEST[1]} or newer"))
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    attributes = {module: dict(vars(module)) for module in model.modules()}
    generators = [generator for module in attributes for generator in generators_of(module).values()]
    printed = io.StringIO()  # the graph of a model that torch refuses
    with warnings.catch_warnings(), redirect_stderr(printed), preserved_rng_state(cuda_devices(), generators):
        try:
            warnings.simplefilter("ignore")  # torch.export uses deprecated parts of torch
            exported = torch.export.export(_TensorOutputs(unwrapped(model).eval()), args, kwargs, strict=False)
            exported = exported.run_decompositions({})
        except Exception as error:
            raise ExportError(refusal(_described(error))) from error
        finally:
            for module, saved in attributes.items():
                vars(module).clear()
                vars(module).update(saved)
    for node in list(exported.graph.nodes):
        if node.op == "call_function":
            if name_of(node) in ("clone", "contiguous", "alias", "detach", "lift_fresh_copy"):
                node.replace_all_uses_with(node.args[0])
            if not node.users:
                exported.graph.erase_node(node)
    return exported


class NamedModules:
    """The modules of a model by the paths that an exported program has of them.

    Attributes:
        root: the model without wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.root = unwrapped(model)
        names = {id(module): name for name, module in named_modules(model)}
        modules = self.root.named_modules(remove_duplicate=False)
        self._modules = {path: (module, names[id(module)]) for path, module in modules}
        self._running: set[str] = set()  # modules that ran with a weight of their own

    def left_after(self, node: fx.Node) -> list[str]:
        """Return the names of the modules that the node runs in, and any of its users does not."""
        users = [set(_stack(user)) for user in node.users]
        paths = [path for path in dict.fromkeys(_stack(node)) if any(path not in user for user in users)]
        return [self._modules[path][1] for path in paths if path in self._modules]

    def layer_name(self, node: fx.Node, weight: str, parameter: Tensor) -> str:
        """Return the name of the running module that owns a weight, else the weight's own name."""
        for path in reversed(_stack(node)):
            module, owner = self._modules.get(path, (nn.Module(), ""))
            for key, held in module.named_parameters(recurse=False):
                if held is parameter:
                    self._running.add(owner)
                    return owner if key == "weight" else f"{owner}.{key}".lstrip(".")
        owner, _, key = weight.rpartition(".")
        if key != "weight":
            return weight
        return f"{weight}.{name_of(node)}" if owner in self._running else owner


def _stack(node: fx.Node) -> list[str]:
    """Paths of the modules that a node runs in, outermost first."""
    paths = [str(path).partition("@")[0] + "." for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return [path.removeprefix(PREFIX).removesuffix(".") for path in paths if path.startswith(PREFIX)]


def refusal(reason: str) -> str:
    """The message for a model that can't be exported."""
    return (
        f"torch.export can't read the graph of the model: {reason}. Give the roles of the weights, "
        "parametrize(..., kinds={name: 'hidden', ...}), or change the model's code at this place"
    )


class _TensorOutputs(nn.Module):
    """A model that returns the tensors of its output alone, as other types, such as caches, can't be exported."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        leaves = pytree.tree_leaves(self.model(*args, **kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def _described(error: BaseException) -> str:
    """The place in the model's code and the first line of an error's text."""
    place = ""
    chain: BaseException | None = error
    while chain is not None:
        trace = chain.__traceback__
        while trace is not None:
            package = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
            code = trace.tb_frame.f_code
            if package not in ("torch", "ignite_monitor", "contextlib", "functools") and code.co_filename[0] != "<":
                place = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} in {code.co_name}: "
            trace = trace.tb_next
        chain = chain.__cause__ or chain.__context__
    lines = str(error).strip().splitlines() or [""]
    return f"{place}{type(error).__name__}: {lines[0]}"

"""The operations of a model at two widths, from ``torch.export``."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import traceback
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ignite_monitor.model._torch import pytree
from ignite_monitor.model.isolation import generators_of, preserved_rng_state
from ignite_monitor.model.names import unwrapped

OLDEST = (2, 7)
"""The oldest version of torch whose export keeps linear operations as they are."""
PREFIX = "model."
"""Prefix of the names in an exported graph."""
_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
_LIBRARIES += (contextlib.__file__, functools.__file__, "<")
_EINSUM: Any = torch.ops.aten.einsum.default
_decompositions = functools.cache(lambda: torch.export.default_decompositions())  # as slow as a small model's export


class TracingError(RuntimeError):
    """The graph of a model is not known."""


class ExportError(TracingError):
    """A place of a model can't be read."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"torch.export can't read the graph of the model: {reason}. Change the model's code there")


def exported_graph(model: nn.Module, inputs: Any) -> Any:
    """Export a model in evaluation mode; the model and RNG state stay unchanged. ExportError if torch refuses."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        raise ExportError(f"torch {torch.__version__} is not supported, but {OLDEST[0]}.{OLDEST[1]} or newer")
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    attributes = {module: dict(vars(module)) for module in model.modules()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # the graph of a model that torch refuses
        stack.enter_context(preserved_rng_state(generators=generators_of(model)))
        warnings.simplefilter("ignore")  # torch.export uses deprecated parts of torch
        try:
            exported = torch.export.export(_TensorOutputs(unwrapped(model).eval()), args, kwargs, strict=False)
            exported = exported.run_decompositions({_EINSUM: _decompositions()[_EINSUM]})
        except Exception as error:
            place = _own_line("".join(traceback.format_exception(error)))
            text = next(iter(str(error).strip().splitlines()), "")
            raise ExportError(f"{place}{': ' * bool(place)}{type(error).__name__}: {text}") from error
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


class _TensorOutputs(nn.Module):
    """A model that returns the tensors of its output alone, as other types, such as caches, can't be exported."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        leaves = pytree.tree_leaves(self.model(*args, **kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def _own_line(trace: str) -> str:
    """File, line and function of the last line of the model's own code in a traceback; "" if there is none."""
    frames = [line.split('"', 2)[1:] for line in trace.splitlines() if line.strip().startswith('File "')]
    own_frames = [(path, rest) for path, rest in frames if not path.startswith(_LIBRARIES)]
    if not own_frames:
        return ""
    path, rest = own_frames[-1]
    return f"{os.path.basename(path)}:{rest.removeprefix(', line ').replace(',', '')}"


# ATen operations by name, as far as width scaling distinguishes them.
_names = str.split

# Views, copies, sums and homogeneous functions: a factor of all inputs is a factor of the output.
PASSING = _names(
    """
    view view_as reshape_as transpose permute t numpy_T movedim moveaxis swapaxes swapdims expand expand_as
    broadcast_to to _to_copy type_as unsqueeze squeeze flatten unflatten ravel select slice narrow split
    split_with_sizes chunk tensor_split unbind getitem diagonal repeat repeat_interleave tile index gather take
    take_along_dim index_select pad constant_pad_nd flip roll unfold im2col pixel_shuffle pixel_unshuffle
    upsample_nearest2d upsample_bilinear2d upsample_bicubic2d interpolate tril triu real imag conj view_as_real
    view_as_complex copy slice_scatter select_scatter topk sort

    relu leaky_relu neg abs dropout feature_dropout native_dropout mean max min amax amin maximum minimum cumsum
    cummax cummin clamp clamp_min clamp_max adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d
    max_pool2d max_pool3d max_pool2d_with_indices median std

    add sub rsub cat concat stack hstack vstack where lerp masked_fill masked_scatter index_put index_add index_copy
    index_fill scatter scatter_add scatter_reduce
    """
)
# Functions whose output changes as fast as their inputs, besides element-wise ones and losses.
NONLINEAR = _names(
    """
    softmax _softmax _safe_softmax log_softmax logsumexp logcumsumexp glu prod cumprod histc bincount bucketize
    searchsorted one_hot multinomial
    """
)
# The shape of the input counts, not its values.
LIKE = _names("zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty")
SUMMED = {"sum": 1.0, "nansum": 1.0, "norm": 0.5, "linalg_vector_norm": 0.5, "linalg_norm": 0.5}
POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0, "var": 2.0}
ADDED = _names("addmm addmv baddbmm addbmm")  # the first argument is added, not multiplied
MATRICES = [*ADDED, *_names("matmul mm bmm mv dot linear inner grouped_mm")]
RECURRENT = _names("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")

Fans = tuple[tuple[int, int], tuple[int, int]]  # numbers of inputs and outputs, in both models


class Operation(NamedTuple):
    """The same node of the graphs of both models."""

    small: fx.Node
    large: fx.Node

    @property
    def name(self) -> str:
        """The operation's name, as :func:`name_of`."""
        return name_of(self.large)

    @property
    def inputs(self) -> list[Operation]:
        """The nodes that it takes, without repetition."""
        return list(map(Operation, self.small.all_input_nodes, self.large.all_input_nodes))

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of elements in both models, at least 1."""
        small, large = (max(math.prod(_shape(node)), 1) for node in self)
        return small, large

    def argument(self, index: int) -> Any:
        """A positional argument: an operation, or both values, or None."""
        small, large = (node.args[index] if len(node.args) > index else None for node in self)
        if isinstance(small, fx.Node) and isinstance(large, fx.Node):
            return Operation(small, large)
        return (small, large) if isinstance(small, (int, float)) and isinstance(large, (int, float)) else None

    @property
    def is_floating(self) -> bool:
        """True if the value is, or has, a tensor of floating-point or complex numbers."""
        values = pytree.tree_leaves(self.large.meta.get("val"))
        return any(isinstance(item, Tensor) and (item.is_floating_point() or item.is_complex()) for item in values)

    @property
    def is_known(self) -> bool:
        """True for element-wise operations and other functions whose output changes as fast as their inputs."""
        is_pointwise = torch.Tag.pointwise in getattr(self.large.target, "tags", ())
        return is_pointwise or self.name in NONLINEAR or "loss" in self.name

    @property
    def power(self) -> float | None:
        """The exponent of a power of the input; None for other operations."""
        args = self.large.args
        if self.name == "pow" and isinstance(args[1], (int, float)):
            return float(args[1])
        return 2.0 if self.name == "mul" and args[0] is args[1] else POWERS.get(self.name)

    @property
    def place(self) -> str:
        """The operation and the line of the model's code that calls it."""
        line = _own_line(self.large.meta.get("stack_trace") or "")
        return f"{self.name} ({line.partition(' ')[0]})" if line else self.name

    def fans(self, factor: Operation) -> Fans | None:
        """Numbers of a factor's elements that each output sums over, and of outputs, in both models."""
        small, large = (_fans(*nodes) for nodes in zip(self, factor, strict=True))
        return None if small is None or large is None else (small, large)


def constant(exported: Any, node: fx.Node) -> Any:
    """The value of a placeholder for a buffer or constant of a graph; None for others."""
    signature = exported.graph_signature
    key = {**signature.inputs_to_lifted_tensor_constants, **signature.inputs_to_buffers}.get(node.name)
    return exported.constants.get(key, exported.state_dict.get(key))


def evaluated(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of an operation on constants; None if it is large, random or not known."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or math.prod(_shape(node)) > 10**6:
        return None
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        return target(*args, **kwargs)
    except Exception:  # noqa: BLE001  some operations need more than their arguments
        return None


def name_of(node: fx.Node) -> str:
    """The name of a call's operation, without namespace and overload."""
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    if "grouped_mm" in name:  # torch's, and the one that transformers registers
        return "grouped_mm"
    # Sizes and strides decide which of these views it is.
    return "view" if name in ("_unsafe_view", "reshape") else name.rstrip("_") or name


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(map(int, value.shape)) if isinstance(value, Tensor) else ()


def _fans(node: fx.Node, factor: fx.Node) -> tuple[int, int] | None:
    shape, name, args = _shape(factor), name_of(node), node.args
    if len(shape) < 2:
        return None
    if name == "linear" or name in RECURRENT:
        return shape[-1], shape[0]
    if name == "embedding":
        return 1, shape[-1]
    if name.startswith("conv_transpose"):
        groups: Any = args[6] if len(args) > 6 else 1
        return shape[0] // groups * math.prod(shape[2:]), shape[1] * groups
    if name.startswith("conv"):
        return math.prod(shape[1:]), shape[0]
    pair = args[name in ADDED :][:2] if name in MATRICES else ()
    if factor not in pair:
        return None
    return (shape[-2], shape[-1]) if factor is pair[1] else (shape[-1], shape[-2])


def role_by_fans(fans: Fans) -> tuple[str, tuple[int, int]]:
    """Role of a weight, and n in both models, from its numbers of inputs and outputs in both."""
    small, large = fans
    grows = large[0] > small[0], large[1] > small[1]
    role = {(True, True): "hidden", (True, False): "readout", (False, True): "embedding"}.get(grows, "fixed")
    side = 1 if role == "embedding" else 0
    return role, (small[side], large[side])


def log_ratio(small: Any, large: Any) -> float | None:
    """Logarithm of the ratio of two constants; None if it is not known.

    It is known of constants that are uniform or proportional to each other. Others count as equally large if their root
    mean squares are, to 2^(1/4), half of the smallest factor, a root, that a width of at least twice the other makes.
    """
    one, other = (torch.as_tensor(value, device="cpu").double().abs() for value in (small, large))
    means = [float(value.mean()) if value.numel() else 0.0 for value in (one, other)]
    if means[0] == means[1]:  # also 0 or infinite
        return 0.0
    if not all(0.0 < mean < math.inf for mean in means):
        return None
    scaled = [value / mean for value, mean in zip((one, other), means, strict=True)]
    is_uniform = all(float((value - 1).abs().max()) < 1e-5 for value in scaled)
    is_alike = one.shape == other.shape and float((scaled[0] - scaled[1]).abs().max()) < 1e-5
    if is_uniform or is_alike:
        return math.log(means[1] / means[0])
    squares = [float(value.square().mean()) for value in (one, other)]
    return 0.0 if abs(math.log(squares[1] / squares[0])) < math.log(2.0) / 2 else None

"""ATen operations by name, as far as width scaling distinguishes them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names(
    """
    view reshape _unsafe_view view_as reshape_as transpose permute t numpy_T movedim moveaxis swapaxes swapdims
    expand expand_as broadcast_to clone alias contiguous to _to_copy type_as float half bfloat16 double
    lift_fresh_copy detach detach_ unsqueeze squeeze flatten unflatten ravel select slice narrow split
    split_with_sizes chunk tensor_split unbind getitem diagonal repeat repeat_interleave tile index gather take
    take_along_dim index_select pad constant_pad_nd flip roll unfold im2col pixel_shuffle pixel_unshuffle
    upsample_nearest2d upsample_bilinear2d upsample_bicubic2d interpolate tril triu real imag conj view_as_real
    view_as_complex copy slice_scatter select_scatter topk sort
    """
)
# A factor of the input is a factor of the output.
HOMOGENEOUS = _names(
    """
    relu leaky_relu neg abs dropout feature_dropout native_dropout mean max min amax amin maximum minimum cumsum
    cummax cummin clamp clamp_min clamp_max adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d
    max_pool2d max_pool3d max_pool2d_with_indices median std
    """
)
SUMS = _names(
    """
    add sub rsub cat concat stack hstack vstack where lerp masked_fill masked_scatter index_put index_add index_copy
    index_fill scatter scatter_add scatter_reduce maximum minimum
    """
)
INDEXING = _names(
    """
    index gather take take_along_dim index_select
    """
)
POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0, "var": 2.0}
SUMMED = {"sum": 1.0, "nansum": 1.0, "norm": 0.5, "linalg_vector_norm": 0.5, "linalg_norm": 0.5}
# The shape of the input counts, not its values.
LIKE = _names("zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty")
MATRICES = _names(
    """
    matmul mm bmm mv dot addmm addmv baddbmm addbmm linear einsum inner _grouped_mm grouped_mm
    """
)
NONLINEAR = _names(
    """
    softmax _softmax _safe_softmax log_softmax logsumexp logcumsumexp glu prod cumprod histc bincount bucketize
    searchsorted one_hot multinomial
    """
)
RECURRENT = _names(
    """
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """
)
_SAME = {"_unsafe_view": "view", "reshape": "view"}  # which one it is depends on sizes and strides
_ADDED = {"addmm": 1, "addmv": 1, "baddbmm": 1, "addbmm": 1}  # the first argument is added, not multiplied


def name_of(node: fx.Node) -> str:
    """The name of a call's operation, without namespace and overload."""
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    if "grouped_mm" in name:  # torch's, and the one that transformers registers
        return "grouped_mm"
    return _SAME.get(name, name.rstrip("_") or name)


def is_norm(name: str) -> bool:
    """True for normalizations, of whose input's scale the output does not depend."""
    return "norm" in name and name not in SUMMED and name.strip("_") != "weight_norm"


def is_known(node: fx.Node, name: str) -> bool:
    """True for element-wise operations and other functions whose output changes as fast as their inputs."""
    return name in NONLINEAR or torch.Tag.pointwise in getattr(node.target, "tags", ())


def place_of(node: fx.Node) -> str:
    """The operation and the line of the model's code that calls it."""
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if 'File "' in line]
    own = [line for line in frames if "/torch/" not in line and "/ignite_monitor/" not in line]
    if not own:
        return name_of(node)
    _, path, rest = own[-1].split('"', 2)
    line = rest.partition("line ")[2].partition(",")[0]
    return f"{name_of(node)} ({path.rpartition('/')[2]}:{line})"


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor; () for anything else."""
    value = node.meta.get("val")
    return tuple(map(int, value.shape)) if isinstance(value, torch.Tensor) else ()


def factors_of(node: fx.Node, name: str) -> tuple[Any, Any]:
    """The two factors of a matrix product."""
    if name == "einsum":
        operands = node.args[1]
        return (
            (operands[0], operands[1]) if isinstance(operands, (tuple, list)) and len(operands) == 2 else (None, None)
        )
    first = _ADDED.get(name, 0)
    args = [*node.args[first : first + 2], None, None]
    return args[0], args[1]


def added_to(node: fx.Node, name: str) -> Any:
    """What is added to a matrix product in the same operation, if anything is."""
    return node.args[0] if name in _ADDED else None


def fans_of(node: fx.Node, name: str, weight: fx.Node) -> tuple[int, int] | None:
    """Number of elements that each output sums over, and of outputs, for a weight's use; None if that is unknown."""
    shape = shape_of(weight)
    if len(shape) < 2:
        return None
    if name == "linear":
        return shape[-1], shape[0]
    if name in ("embedding", "embedding_bag"):
        return 1, shape[-1]
    if name.startswith("conv"):
        if "transpose" in name or (name == "convolution" and node.args[6]):
            groups: Any = node.args[8] if name == "convolution" else (*node.args[6:7], 1)[0]
            return shape[0] // int(groups) * math.prod(shape[2:]), shape[1] * int(groups)
        return math.prod(shape[1:]), shape[0]
    if name == "einsum":
        sizes = _einsum(node, weight)
        return None if sizes is None else sizes[:2]
    if name in MATRICES:
        first, second = factors_of(node, name)
        if weight is second:
            return shape[-2], shape[-1]
        return (shape[-1], shape[-2]) if weight is first else None
    return None


def contracted(node: fx.Node, name: str) -> int:
    """Number of elements that a product of two activations sums over; 1 if that is unknown."""
    first, _ = factors_of(node, name)
    if not isinstance(first, fx.Node):
        return 1
    if name == "einsum":
        sizes = _einsum(node, first)
        return 1 if sizes is None else sizes[0]
    return shape_of(first)[-1] if shape_of(first) else 1


def _einsum(node: fx.Node, operand: fx.Node) -> tuple[int, int] | None:
    """Sizes of an operand's subscripts that are summed over, and of those of the output that only it has."""
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, (tuple, list)) or len(operands) != 2:
        return None
    inputs, arrow, output = equation.replace(" ", "").replace("...", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        output = "".join(letter for letter in set(inputs) - {","} if inputs.count(letter) == 1)
    index = 0 if operands[0] is operand else 1
    sizes = dict(zip(reversed(terms[index]), reversed(shape_of(operand)), strict=False))
    summed = math.prod(size for letter, size in sizes.items() if letter not in output)
    kept = math.prod(size for letter, size in sizes.items() if letter in output and letter not in terms[1 - index])
    return summed, kept


def signature(node: fx.Node) -> tuple[str, str]:
    """What two nodes have in common that are the same operation at different sizes."""
    return node.op, name_of(node) if node.op == "call_function" else ""

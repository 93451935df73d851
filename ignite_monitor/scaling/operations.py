"""ATen operations by name, as far as width scaling distinguishes them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

Shape = tuple[int, ...]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Views, copies, sums and homogeneous functions: a factor of all inputs is a factor of the output.
PASSING = _names(
    """
    view view_as reshape_as transpose permute t numpy_T movedim moveaxis swapaxes swapdims expand expand_as
    broadcast_to clone alias contiguous to _to_copy type_as lift_fresh_copy detach
    unsqueeze squeeze flatten unflatten ravel select slice narrow split split_with_sizes chunk tensor_split unbind
    getitem diagonal repeat repeat_interleave tile index gather take take_along_dim index_select pad constant_pad_nd
    flip roll unfold im2col pixel_shuffle pixel_unshuffle upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
    interpolate tril triu real imag conj view_as_real view_as_complex copy slice_scatter select_scatter topk sort

    relu leaky_relu neg abs dropout feature_dropout native_dropout mean max min amax amin maximum minimum cumsum
    cummax cummin clamp clamp_min clamp_max adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d
    max_pool2d max_pool3d max_pool2d_with_indices median std

    add sub rsub cat concat stack hstack vstack where lerp masked_fill masked_scatter index_put index_add index_copy
    index_fill scatter scatter_add scatter_reduce
    """
)
SUMMED = {"sum": 1.0, "nansum": 1.0, "norm": 0.5, "linalg_vector_norm": 0.5, "linalg_norm": 0.5}
# The shape of the input counts, not its values.
LIKE = _names("zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty")
MATRICES = _names("matmul mm bmm mv dot addmm addmv baddbmm addbmm linear einsum inner grouped_mm")
RECURRENT = _names("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
_NONLINEAR = _names(
    """
    softmax _softmax _safe_softmax log_softmax logsumexp logcumsumexp glu prod cumprod histc bincount bucketize
    searchsorted one_hot multinomial cross_entropy_loss nll_loss nll_loss_nd mse_loss
    """
)
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0, "var": 2.0}
_SAME = {"_unsafe_view": "view", "reshape": "view"}  # which one it is depends on sizes and strides
ADDED = _names("addmm addmv baddbmm addbmm")  # the first argument is added, not multiplied


class Operation(NamedTuple):
    """The same node of the graphs of both models."""

    small: fx.Node
    large: fx.Node

    @property
    def name(self) -> str:
        """The name of the operation, without namespace and overload."""
        return name_of(self.large)

    @property
    def inputs(self) -> list[Operation]:
        """The nodes that it takes, without repetition."""
        return list(map(Operation, self.small.all_input_nodes, self.large.all_input_nodes))

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """The shapes in both models; () for anything but a tensor."""
        return _shape(self.small), _shape(self.large)

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of elements in both models, at least 1."""
        small, large = (max(math.prod(shape), 1) for shape in self.shapes)
        return small, large

    def argument(self, index: int) -> Any:
        """Return a positional argument: an operation, or both values, or None."""
        small, large = (node.args[index] if len(node.args) > index else None for node in self)
        if isinstance(small, fx.Node) and isinstance(large, fx.Node):
            return Operation(small, large)
        return (small, large) if isinstance(small, (int, float)) and isinstance(large, (int, float)) else None

    @property
    def is_floating(self) -> bool:
        """True if the value is, or has, a tensor of floating-point or complex numbers."""
        value = self.large.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        return any(
            isinstance(item, torch.Tensor) and (item.is_floating_point() or item.is_complex()) for item in values
        )

    @property
    def is_known(self) -> bool:
        """True for element-wise operations and other functions whose output changes as fast as their inputs."""
        return self.name in _NONLINEAR or torch.Tag.pointwise in getattr(self.large.target, "tags", ())

    @property
    def power(self) -> float | None:
        """The exponent of a power of the input; None for other operations."""
        args = self.large.args
        if self.name == "pow" and isinstance(args[1], (int, float)):
            return float(args[1])
        return 2.0 if self.name == "mul" and args[0] is args[1] else _POWERS.get(self.name)

    @property
    def place(self) -> str:
        """The operation and the line of the model's code that calls it."""
        frames = [line.strip() for line in (self.large.meta.get("stack_trace") or "").splitlines() if 'File "' in line]
        own = [line for line in frames if "/torch/" not in line and "/ignite_monitor/" not in line]
        if not own:
            return self.name
        _, path, rest = own[-1].split('"', 2)
        line = rest.partition("line ")[2].partition(",")[0]
        return f"{self.name} ({path.rpartition('/')[2]}:{line})"

    def fans(self, weight: Operation) -> list[tuple[int, int]] | None:
        """Return, for both models, the number of elements that each output sums over, and of outputs, if known."""
        fans = [_fans(*nodes) for nodes in zip(self, weight, strict=True)]
        return None if None in fans else fans  # type: ignore[return-value]

    def contracted(self) -> list[int]:
        """Return, for both models, the number of elements that a product of two activations sums over."""
        return [(_fans(*nodes) or (1, 1))[0] for nodes in zip(self, self.inputs[self.name in ADDED], strict=True)]


def name_of(node: fx.Node) -> str:
    """The name of a call's operation, without namespace and overload."""
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    if "grouped_mm" in name:  # torch's, and the one that transformers registers
        return "grouped_mm"
    return _SAME.get(name, name.rstrip("_") or name)


def _shape(node: fx.Node) -> Shape:
    value = node.meta.get("val")
    return tuple(map(int, value.shape)) if isinstance(value, torch.Tensor) else ()


def _fans(node: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    shape, name = _shape(weight), name_of(node)
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
        return _einsum(node, weight)
    if name in MATRICES:
        first, second = node.args[name in ADDED :][:2]
        if weight is second:
            return shape[-2], shape[-1]
        return (shape[-1], shape[-2]) if weight is first else None
    return None


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
    sizes = dict(zip(reversed(terms[index]), reversed(_shape(operand)), strict=False))
    summed = math.prod(size for letter, size in sizes.items() if letter not in output)
    kept = math.prod(size for letter, size in sizes.items() if letter in output and letter not in terms[1 - index])
    return summed, kept


def log_ratio(small: Any, large: Any) -> float:
    """Logarithm of the ratio of two constants that are uniform, or proportional to each other."""
    one, other = (torch.as_tensor(value, device="cpu").double().abs() for value in (small, large))
    means = [float(value.mean()) if value.numel() else math.nan for value in (one, other)]
    if not all(math.isfinite(mean) and mean > 0 for mean in means):
        return 0.0
    scaled = [value / mean for value, mean in zip((one, other), means, strict=True)]
    is_uniform = all(float((value - 1).abs().max()) < 1e-5 for value in scaled)
    is_alike = one.shape == other.shape and float((scaled[0] - scaled[1]).abs().max()) < 1e-5
    return math.log(means[1] / means[0]) if is_uniform or is_alike else 0.0

"""What torch's operations do to activations, by name, as far as exponents of the width are concerned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ignite_monitor.scaling.labels import Label


def _names(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


_SHAPES = """
    T mT H mH data real imag conj view_as_real view_as_complex alias as_strided broadcast_tensors broadcast_to chunk
    clone contiguous cpu cuda detach diagonal double dsplit expand expand_as flatten flip float half bfloat16 bool byte
    char int long short hsplit masked_select movedim moveaxis narrow permute grid_sample
    pin_memory pixel_shuffle pixel_unshuffle ravel repeat repeat_interleave requires_grad_ reshape reshape_as roll
    rot90 select slice split split_with_sizes squeeze swapaxes swapdims t tensor_split tile to to_dense transpose tril
    triu type type_as unbind unflatten unfold unsqueeze view view_as vsplit __getitem__ __iter__ __deepcopy__
    gather index_select take take_along_dim embedding_renorm pad interpolate upsample scatter index_copy index_put
    masked_scatter masked_fill index_fill copy __setitem__ positive resolve_conj resolve_neg lift_fresh
    topk sort argsort argmax argmin nonzero one_hot histc bincount bucketize multinomial searchsorted unique
    unique_consecutive
    _weight_norm bitwise_or bitwise_and bitwise_not remainder floor floor_divide __floordiv__ ceil round
"""
_PLUS = "add __add__ __radd__ __iadd__ sub subtract __sub__ __isub__"
_TOGETHER = "cat concat concatenate stack hstack vstack dstack column_stack row_stack where lerp index_add scatter_add"
_SUMS = "rsub __rsub__ maximum minimum fmax fmin scatter_reduce addcmul addcdiv logaddexp meshgrid"
_TIMES = "mul multiply __mul__ __rmul__ __imul__"
_OVER = "div divide true_divide __truediv__ __itruediv__ __div__ __idiv__"
_PRODUCTS = "__rtruediv__ __rdiv__ glu pow float_power __pow__ __rpow__ __ipow__"
_RECTIFIERS = "abs dropout dropout1d dropout2d dropout3d neg negative relu leaky_relu __neg__ __abs__"
_ELEMENTWISE = """
    absolute alpha_dropout atan celu clamp clamp_max clamp_min clip cos elu erf exp exp2 expm1 feature_alpha_dropout
    feature_dropout gelu hardshrink hardsigmoid hardswish hardtanh log log1p log2 log_softmax logit logsigmoid logsumexp
    mish nan_to_num prelu reciprocal relu6 rrelu rsqrt selu sigmoid sign silu sin sinc softmax softmin softplus
    softshrink softsign sqrt square tanh tanhshrink threshold fill zero __pos__ gumbel_softmax native_dropout
"""
_POOLS = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d amax amin avg_pool1d avg_pool2d avg_pool3d cummax cummin cumsum linalg_norm linalg_vector_norm
    max max_pool1d max_pool2d max_pool3d mean median min nansum norm std sum
"""
_NORMS = "batch_norm group_norm instance_norm layer_norm native_layer_norm normalize rms_norm"
_STATISTICS = "aminmax fold local_response_norm lp_pool1d lp_pool2d nanmean std_mean var var_mean"
_TESTS = """
    all any eq ge greater greater_equal gt isfinite isinf isnan le less less_equal logical_and logical_not logical_or
    lt ne not_equal __and__ __eq__ __ge__ __gt__ __invert__ __le__ __lt__ __ne__ __or__ isclose allclose equal isin
"""
_MATRICES = """
    matmul mm bmm mv dot __matmul__ __rmatmul__ addmm addmv addbmm baddbmm grouped_mm _grouped_mm grouped_mm_fallback
"""
_CONTRACTIONS = """
    addr bilinear cosine_similarity einsum inner multi_dot outer scaled_dot_product_attention tensordot vdot vecdot
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution embedding embedding_bag
    pairwise_distance cdist
"""
JUNCTIONS = {
    # The output's change is as large, in powers of the width, as the largest change among the inputs.
    **dict.fromkeys(_names(_SHAPES, _PLUS, _TOGETHER, _SUMS, _RECTIFIERS, _ELEMENTWISE), "sum"),
    **dict.fromkeys(_names(_POOLS, _NORMS, _STATISTICS, _TESTS), "sum"),
    **dict.fromkeys(_names(_TIMES, _OVER, _PRODUCTS), "product"),
    # Sums over what may be the width, of products.
    **dict.fromkeys(_names(_MATRICES, _CONTRACTIONS), "contraction"),
}
# They make a tensor of a tensor's shape, and look at nothing else in it.
LIKE = _names(
    "empty_like full_like ones_like rand_like randn_like randint_like zeros_like",
    "new_empty new_full new_ones new_tensor new_zeros",
)
# They make a number of a tensor.
NUMBERS = _names("item __bool__ __complex__ __float__ __index__ __int__")
INDEXING = _names("__getitem__ index_select gather take_along_dim")
# A factor of the input is one of the output.
HOMOGENEOUS = _names(_SHAPES, _RECTIFIERS, _POOLS)
# A factor of the input makes no difference, or nearly none.
INVARIANT = _names(_NORMS, _TESTS, "sign cosine_similarity argsort argmax argmin nonzero one_hot")
# Of one activation and constants, they are linear but for what is added.
LINEAR = _names(_TIMES, _OVER, _PLUS, _TOGETHER)
_DEGREES = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "var": 2.0, "__rtruediv__": -1.0}
_MATRIX_PRODUCTS, _TIMES_NAMES, _QUOTIENTS = _names(_MATRICES), _names(_TIMES), _names(_OVER)


class Operation(NamedTuple):
    """One call of an operation, and what a trace knows of it."""

    full: str  # its name, as torch has it
    name: str  # without its overload, and without the underscore of one in place
    where: str  # with the module in which it runs
    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any
    given: list[Tensor]
    labels: list[Label]  # of the given tensors
    growth: float = 0.0  # the logarithm of how much more the larger model multiplies by than the smaller one
    line: str | None = None  # of the model's code that does, "" where it multiplies by as much; None for no number

    @property
    def junction(self) -> str | None:
        """What kind of junction it is; None if it is not known."""
        return JUNCTIONS.get(self.full.partition(".")[0]) or JUNCTIONS.get(self.name)

    @property
    def power(self) -> float | None:
        """Where it takes a power of its input, the power."""
        if self.name not in {"pow", "__pow__", "__ipow__", "float_power"}:
            return _DEGREES.get(self.name)
        exponent = self.argument(1, "exponent")
        return float(exponent) if isinstance(exponent, (int, float)) else None

    @property
    def sign(self) -> float:
        """With which sign the factor of its second input is one of the product or quotient."""
        return -1.0 if self.name in _QUOTIENTS else 1.0

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument, by its index or name."""
        return self.kwargs.get(name, self.args[index] if len(self.args) > index else default)


def plain_name(name: str) -> str:
    """An operation's name without its overload, and without the underscore of one in place."""
    name = name.partition(".")[0]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


class Fans(NamedTuple):
    """Over how many of its elements a matrix sums, and how many outputs it has."""

    inputs: int
    outputs: int


def fans(op: Operation, weight: Tensor) -> Fans | None:
    """What an operation takes a weight for; None if that is not known."""
    shape = tuple(weight.shape)
    if len(shape) < 2:
        return None
    if op.name == "linear":
        return Fans(shape[-1], shape[0])
    if op.name in {"embedding", "embedding_bag"}:
        return Fans(*shape)
    if op.name in {"conv1d", "conv2d", "conv3d"}:
        return Fans(math.prod(shape[1:]), shape[0])
    if op.name in {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}:
        groups = op.argument(6, "groups", 1)
        return Fans(shape[0] // groups * math.prod(shape[2:]), shape[1] * groups)
    if op.name in _MATRIX_PRODUCTS:
        return Fans(shape[-1], shape[-2]) if _first_factor(op) is weight else Fans(shape[-2], shape[-1])
    einsum = _einsum(op)
    if einsum is None:
        return None
    tensors, terms, output, size = einsum
    index = next(index for index, each in enumerate(tensors) if each is weight)
    others = "".join(term for other, term in enumerate(terms) if other != index)
    summed = math.prod(size[each] for each in terms[index] if each not in output)
    return Fans(summed, math.prod(size[each] for each in terms[index] if each in output and each not in others))


def summed_over(op: Operation) -> int:
    """Over how many elements a product of two activations sums; 1 if that is not known."""
    if op.name in _MATRIX_PRODUCTS or op.name in {"linear", "inner"}:
        first = _first_factor(op)
        return int(first.shape[-1]) if isinstance(first, Tensor) and first.ndim else 1
    einsum = _einsum(op)
    if einsum is None:
        return 1
    _, terms, output, size = einsum
    return math.prod(size[each] for each in set("".join(terms)) if each not in output)


def _first_factor(op: Operation) -> Any:
    second = {"__rmatmul__": "other", "addmm": "mat1", "addmv": "mat", "addbmm": "batch1", "baddbmm": "batch1"}
    return op.argument(1, second[op.name]) if op.name in second else op.argument(0, "input")


def _einsum(op: Operation) -> tuple[Sequence[Tensor], list[str], str, dict[str, int]] | None:
    """The operands of an einsum, their subscripts, those of its output, and the sizes of these."""
    if op.name != "einsum" or not isinstance(op.args[0], str):
        return None
    tensors = op.args[1] if isinstance(op.args[1], (tuple, list)) else op.args[1:]
    inputs, arrow, output = op.args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = inputs.replace(",", "")
        output = "".join(sorted(each for each in set(letters) if letters.count(each) == 1))
    size: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        before, _, after = term.partition("...")
        size |= dict(zip(before, tensor.shape, strict=False))
        size |= dict(zip(reversed(after), reversed(tensor.shape), strict=False))
    return tensors, [term.replace("...", "") for term in terms], output.replace("...", ""), size


def log_factor(op: Operation, is_constant: Callable[[Tensor], bool]) -> tuple[float, bool] | None:
    """The logarithm of what an operation multiplies by; and whether that is a number that the model has.

    Args:
        is_constant: whether a tensor is made of no activation.
    """
    if op.name in _TIMES_NAMES | _QUOTIENTS:
        factors = [op.argument(0, "input")] if op.name in _TIMES_NAMES else []
        numbers = [_number(each, is_constant) for each in (*factors, op.argument(1, "other"))]
        return next(((op.sign * math.log(each), True) for each in numbers if each is not None), None)
    if op.name == "__rtruediv__":
        value = _number(op.argument(1, "other"), is_constant)
        return None if value is None else (math.log(value), True)
    if op.name in {"sum", "nansum", "norm", "linalg_norm", "linalg_vector_norm"} and isinstance(op.result, Tensor):
        count = op.argument(0, "input").numel() / max(op.result.numel(), 1)
        return (math.log(count) * (1.0 if "sum" in op.name else 0.5), False) if count > 0 else None
    return None


def _number(value: Any, is_constant: Callable[[Tensor], bool]) -> float | None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta or isinstance(value, nn.Parameter) or not is_constant(value):
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return abs(value) if math.isfinite(value) and value != 0 else None

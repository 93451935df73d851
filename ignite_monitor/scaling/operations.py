"""What torch's operations do to activations, by name, as far as exponents of the width are concerned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

# The output's change is as large, in powers of the width, as the largest change among the inputs.
_SHAPES = """
    T mT H mH data real alias as_strided broadcast_tensors broadcast_to chunk clone contiguous cpu cuda detach diagonal
    double dsplit expand expand_as flatten flip float half bfloat16 hsplit masked_select movedim moveaxis narrow permute
    pin_memory pixel_shuffle pixel_unshuffle ravel repeat repeat_interleave requires_grad_ reshape reshape_as roll
    rot90 select slice split split_with_sizes squeeze swapaxes swapdims t tensor_split tile to to_dense transpose tril
    triu type type_as unbind unflatten unfold unsqueeze view view_as vsplit __getitem__ __iter__ __deepcopy__
    gather index_select take take_along_dim embedding_renorm pad interpolate upsample scatter index_copy index_put
    masked_scatter masked_fill index_fill copy __setitem__ positive resolve_conj resolve_neg lift_fresh
    topk sort argsort argmax argmin nonzero one_hot histc bincount searchsorted unique
    _weight_norm bitwise_or bitwise_and bitwise_not remainder floor floor_divide __floordiv__ ceil round
"""
_SUMS = """
    add sub rsub subtract cat concat concatenate stack hstack vstack dstack column_stack row_stack where lerp maximum
    minimum fmax fmin index_add scatter_add scatter_reduce addcmul addcdiv logaddexp meshgrid
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__
"""
_PRODUCTS = """
    mul multiply div divide true_divide __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __div__
    __rdiv__ __idiv__ glu pow float_power __pow__ __rpow__ __ipow__
"""
_ELEMENTWISE = """
    abs absolute alpha_dropout atan celu clamp clamp_max clamp_min clip cos dropout dropout1d dropout2d dropout3d elu
    erf exp exp2 expm1 feature_alpha_dropout feature_dropout gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu
    log log1p log2 log_softmax logit logsigmoid logsumexp mish nan_to_num neg negative prelu reciprocal relu relu6
    rrelu rsqrt selu sigmoid sign silu sin sinc softmax softmin softplus softshrink softsign sqrt square tanh
    tanhshrink threshold fill zero __neg__ __abs__ __pos__ gumbel_softmax native_dropout
"""
_STATISTICS = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d amax amin aminmax avg_pool1d avg_pool2d avg_pool3d batch_norm cumsum fold group_norm
    instance_norm layer_norm local_response_norm lp_pool1d lp_pool2d max max_pool1d max_pool2d max_pool3d mean median
    min native_layer_norm norm normalize nansum nanmean rms_norm std std_mean sum var var_mean vector_norm
"""
_TESTS = """
    all any eq ge greater greater_equal gt isfinite isinf isnan le less less_equal logical_and logical_not logical_or
    lt ne not_equal __and__ __eq__ __ge__ __gt__ __invert__ __le__ __lt__ __ne__ __or__ isclose allclose equal
"""
# Sums over what may be the width, of products.
_CONTRACTIONS = """
    __matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bilinear bmm cosine_similarity dot einsum inner matmul mm
    multi_dot mv outer scaled_dot_product_attention tensordot vdot vecdot linear conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d convolution embedding embedding_bag pairwise_distance cdist grouped_mm
    _grouped_mm grouped_mm_fallback
"""
# They make a tensor of a tensor's shape, and look at nothing else in it.
_LIKE = """
    empty_like full_like ones_like rand_like randn_like randint_like zeros_like new_empty new_full new_ones new_tensor
    new_zeros
"""
# They make a number of a tensor.
_NUMBERS = "item __bool__ __complex__ __float__ __index__ __int__"
NUMBERS = frozenset(_NUMBERS.split())
LIKE = frozenset(_LIKE.split())
JUNCTIONS = {
    **dict.fromkeys((_SHAPES + _SUMS + _ELEMENTWISE + _STATISTICS + _TESTS).split(), "sum"),
    **dict.fromkeys(_PRODUCTS.split(), "product"),
    **dict.fromkeys(_CONTRACTIONS.split(), "contraction"),
}


INDEXING = frozenset(("__getitem__", "index_select", "gather", "take_along_dim"))
# A factor of the input is one of the output.
_HOMOGENEOUS = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d amax amin avg_pool1d avg_pool2d avg_pool3d max max_pool1d max_pool2d max_pool3d mean median min
    abs dropout dropout1d dropout2d dropout3d neg negative relu leaky_relu __neg__ __abs__ sum nansum norm vector_norm
    std cumsum
"""
HOMOGENEOUS = frozenset((_SHAPES + _HOMOGENEOUS).split())
# A factor of the input makes no difference, or nearly none.
_NORMS = """
    layer_norm native_layer_norm rms_norm group_norm batch_norm instance_norm normalize sign cosine_similarity argsort
    argmax argmin nonzero one_hot
"""
INVARIANT = frozenset((_NORMS + _TESTS).split())
_DEGREES = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "var": 2.0, "__rtruediv__": -1.0}
_TIMES = "mul multiply __mul__ __rmul__ __imul__"
_OVER = "div divide true_divide __truediv__ __itruediv__ __div__ __idiv__"
_PLUS = "add __add__ __radd__ __iadd__ sub subtract __sub__ __isub__"
_TOGETHER = "cat concat concatenate stack hstack vstack dstack column_stack row_stack where lerp index_add scatter_add"
_PRODUCT_NAMES, _QUOTIENT_NAMES = frozenset(_TIMES.split()), frozenset(_OVER.split())
# Of one activation and constants, they are linear but for what is added.
LINEAR = frozenset(" ".join((_TIMES, _OVER, _PLUS, _TOGETHER)).split())
_MATRICES = """
    matmul mm bmm mv dot __matmul__ __rmatmul__ addmm addmv addbmm baddbmm grouped_mm _grouped_mm grouped_mm_fallback
"""
_MATRIX_PRODUCTS = frozenset(_MATRICES.split())


def plain_name(name: str) -> str:
    """An operation's name without its overload, and without the underscore of one in place."""
    name = name.partition(".")[0]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def junction_of(name: str) -> str | None:
    """What kind of junction an operation is; None if it is not known."""
    name = name.partition(".")[0]
    return JUNCTIONS.get(name) or JUNCTIONS.get(plain_name(name))


class Fans(NamedTuple):
    """Over how many of its elements a matrix sums, and how many outputs it has."""

    inputs: int
    outputs: int


def fans(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weight: Tensor) -> Fans | None:
    """What an operation takes a weight for; None if that is not known."""
    shape = tuple(weight.shape)
    if len(shape) < 2:
        return None
    if name == "linear":
        return Fans(shape[-1], shape[0])
    if name in {"embedding", "embedding_bag"}:
        return Fans(*shape)
    if name in {"conv1d", "conv2d", "conv3d"}:
        return Fans(math.prod(shape[1:]), shape[0])
    if name in {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}:
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        return Fans(shape[0] // groups * math.prod(shape[2:]), shape[1] * groups)
    if name == "einsum":
        return _einsum_fans(args, weight)
    if name in _MATRIX_PRODUCTS:
        first = operands(name, args)[0]
        return Fans(shape[-1], shape[-2]) if first is weight else Fans(shape[-2], shape[-1])
    return None


def operands(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """The two factors of a matrix product, in their order."""
    if name == "__rmatmul__":
        return args[1], args[0]
    return args[1:3] if name in {"addmm", "addmv", "addbmm", "baddbmm"} else args[:2]


def _einsum_fans(args: Sequence[Any], weight: Tensor) -> Fans | None:
    sizes = _einsum_sizes(args)
    if sizes is None:
        return None
    terms, output, size = sizes
    given = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    place = next(place for place, each in enumerate(given) if each is weight)
    others = "".join(term for other, term in enumerate(terms) if other != place)
    summed = math.prod(size[each] for each in terms[place] if each not in output)
    return Fans(summed, math.prod(size[each] for each in terms[place] if each in output and each not in others))


def _einsum_sizes(args: Sequence[Any]) -> tuple[list[str], str, dict[str, int]] | None:
    """The subscripts of an einsum's operands, those of its output, and their sizes."""
    if not isinstance(args[0], str):
        return None
    given = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = inputs.replace(",", "")
        output = "".join(sorted(each for each in set(letters) if letters.count(each) == 1))
    size: dict[str, int] = {}
    for term, tensor in zip(terms, given, strict=True):
        before, _, after = term.partition("...")
        size |= dict(zip(before, tensor.shape, strict=False))
        size |= dict(zip(reversed(after), reversed(tensor.shape), strict=False))
    return [term.replace("...", "") for term in terms], output.replace("...", ""), size


def summed_over(name: str, args: Sequence[Any]) -> int | None:
    """Over how many elements a product of two activations sums; None if that is not known."""
    if name == "einsum":
        sizes = _einsum_sizes(args)
        if sizes is None:
            return None
        terms, output, size = sizes
        return math.prod(size[each] for each in set("".join(terms)) if each not in output)
    if name in _MATRIX_PRODUCTS or name in {"linear", "inner"}:
        first = operands(name, args)[0]
        return int(first.shape[-1]) if isinstance(first, Tensor) and first.ndim else None
    return None


def degree(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """Of an operation that takes a power of its input, the power."""
    if name in {"pow", "__pow__", "__ipow__", "float_power"}:
        exponent = kwargs.get("exponent", args[1] if len(args) > 1 else None)
        return float(exponent) if isinstance(exponent, (int, float)) else None
    return _DEGREES.get(name)


def log_factor(
    name: str, args: Sequence[Any], result: Any, is_constant: Callable[[Tensor], bool]
) -> tuple[float, bool] | None:
    """The logarithm of what an operation multiplies by; and whether that is a number that the model has.

    Args:
        is_constant: whether a tensor is made of no activation.
    """
    if name in _PRODUCT_NAMES or name in _QUOTIENT_NAMES:
        for place, each in enumerate(args[:2]):
            value = _number(each, is_constant)
            if value is not None and (place == 1 or name in _PRODUCT_NAMES):
                return (math.log(value) if name in _PRODUCT_NAMES else -math.log(value)), True
        return None
    if name == "__rtruediv__":
        value = _number(args[1], is_constant)
        return None if value is None else (math.log(value), True)
    if name in {"sum", "nansum", "norm", "vector_norm"} and isinstance(result, Tensor):
        count = args[0].numel() / max(result.numel(), 1)
        return (math.log(count) * (1.0 if "sum" in name else 0.5), False) if count > 0 else None
    return None


def _number(value: Any, is_constant: Callable[[Tensor], bool]) -> float | None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta or isinstance(value, nn.Parameter) or not is_constant(value):
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return abs(value) if math.isfinite(value) and value != 0 else None


def are_divided(name: str, labels: Sequence[Any]) -> Sequence[float]:
    """With which sign each input's factor is one of a product or quotient."""
    return [1.0, *([-1.0 if name in _QUOTIENT_NAMES else 1.0] * (len(labels) - 1))]

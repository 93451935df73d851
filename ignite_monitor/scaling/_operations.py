"""What torch's operations do to activations, by name, as far as exponents of the width are concerned."""

from __future__ import annotations

# The output's change is as large, in powers of the width, as the largest change among the inputs.
_SHAPES = """
    T mT H mH data real alias as_strided broadcast_tensors broadcast_to chunk clone contiguous cpu cuda detach diagonal
    double dsplit expand expand_as flatten flip float half bfloat16 hsplit masked_select movedim moveaxis narrow permute
    pin_memory pixel_shuffle pixel_unshuffle ravel repeat repeat_interleave requires_grad_ reshape reshape_as roll
    rot90 select slice split split_with_sizes squeeze swapaxes swapdims t tensor_split tile to to_dense transpose tril
    triu type type_as unbind unflatten unfold unsqueeze view view_as vsplit __getitem__ __iter__ __deepcopy__
    gather index_select take take_along_dim embedding_renorm pad interpolate upsample scatter index_copy index_put
    masked_scatter masked_fill index_fill copy __setitem__ positive resolve_conj resolve_neg lift_fresh
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
    tanhshrink threshold fill zero __neg__ __abs__ __pos__
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
    conv_transpose2d conv_transpose3d convolution embedding embedding_bag pairwise_distance cdist
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


def junction_of(name: str) -> str | None:
    """What kind of junction an operation is; None if it is not known.

    Args:
        name: the operation's name; that of one in place is the same with an underscore.
    """
    name = name.partition(".")[0]
    return JUNCTIONS.get(name) or (JUNCTIONS.get(name[:-1]) if name.endswith("_") else None)

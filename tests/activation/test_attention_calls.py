"""Attention calls of models that know nothing of it, against probabilities in float64."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from ignite_monitor.activation import attention_calls
from ignite_monitor.activation.attention_calls import NOT_PLAIN, AttentionCalls
from tests._helpers import assert_same, unset_default_device
from tests._models import Attention, Checkpointed, Lambda


class Seen:
    """Stand-in for a handler: keep the names of the modules that run, and sum entropies by name."""

    def __init__(self, model):
        self.names, self.total, self.rows, self.calls = [], {}, {}, []
        self.watching = contextlib.ExitStack()
        self.watching.enter_context(AttentionCalls(lambda: self.names[-1], self.on_call).during(model))
        self.name_of = {module: name for name, module in model.named_modules()}
        self.handles = [
            register_module_forward_pre_hook(self.before),
            register_module_forward_hook(self.after, always_call=True),
        ]

    def before(self, module, args):
        self.names.append(self.name_of.get(module))

    def after(self, module, args, output):
        self.names.pop()

    def on_call(self, name, result):
        assert not torch.is_grad_enabled()
        assert not any(item.requires_grad for item in result)
        self.calls.append(name)
        self.total[name] = self.total.get(name, 0) + result.total
        self.rows[name] = self.rows.get(name, 0) + result.rows

    def mean(self, name):
        return self.total[name] / self.rows[name]

    def remove(self):
        self.watching.close()
        for handle in self.handles:
            handle.remove()


@pytest.fixture
def watch():
    """Seen, removed at the end of the test."""
    watched = []
    yield lambda model: watched.append(Seen(model)) or watched[-1]
    for seen in watched:
        seen.remove()


@contextlib.contextmanager
def running(calls):
    calls.enter()
    try:
        yield calls
    finally:
        calls.leave()


def clean():
    return _get_current_function_mode_stack() == []


def of(probabilities):
    """Mean entropy per head, of probabilities of shape (batch, heads, L, S)."""
    return torch.special.entr(probabilities.detach().double()).sum(-1).mean((0, 2))


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "bos_token_id": 0}
SMALL |= {"eos_token_id": 1, "max_position_embeddings": 64}
TRANSFORMERS = {
    "h.{}.attn": (GPT2Model, GPT2Config(**SMALL, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)),
    "layers.{}.self_attn": (LlamaModel, LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2)),
    "encoder.layer.{}.attention.self": (
        BertModel,
        BertConfig(**SMALL, intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("place", TRANSFORMERS)
def test_transformers(place, padded, watch):
    """Against the probabilities that the models themselves return, computed eagerly in float64."""
    kind, config = TRANSFORMERS[place]
    models = []
    for implementation in ("sdpa", "eager"):
        config = copy.deepcopy(config)
        config._attn_implementation = implementation
        models.append(kind(config).train())
    model, eager = models[0], models[1].double()
    with torch.no_grad():
        for parameter in model.parameters():  # so that attention is far from even
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    eager.load_state_dict(model.state_dict())
    tokens = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 12, dtype=torch.long)
    if padded:
        mask[1, 8:], mask[2, 3:] = 0, 0
    seen = watch(model)
    model(tokens, attention_mask=mask)
    expected = eager(tokens, attention_mask=mask, output_attentions=True).attentions
    assert seen.calls == [place.format(0), place.format(1)]
    for layer, probabilities in enumerate(expected):
        torch.testing.assert_close(seen.mean(place.format(layer)), of(probabilities), rtol=1e-4, atol=1e-5)
    assert clean()


def inputs(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ARGUMENTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.8},
    "additive": {"attn_mask": inputs(2, 1, 6, 6)},
    "scale": {"scale": 2.0},
    "dropout": {"dropout_p": 0.5},
    "all": {"attn_mask": inputs(4, 6, 6), "scale": 0.7, "dropout_p": 0.1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_module_of_ones_own(arguments, dtype, watch):
    given = dict(ARGUMENTS[arguments])
    if given.get("attn_mask") is not None and given["attn_mask"].dtype != torch.bool:
        given["attn_mask"] = given["attn_mask"].to(dtype)
    model = nn.Sequential(Attention(16, 4, **given), nn.Linear(16, 16)).to(dtype)
    x = (inputs(2, 6, 16) * 3).to(dtype)
    seen = watch(model)
    model(x)
    query, key, _ = model[0].qkv(x).double().unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    given.pop("dropout_p", None)
    if given.get("attn_mask") is not None and given["attn_mask"].dtype != torch.bool:
        given["attn_mask"] = given["attn_mask"].double()
    probabilities = F.scaled_dot_product_attention(query, key, torch.eye(6).double().expand(2, 4, 6, 6), **given)
    assert seen.calls == ["0"]
    torch.testing.assert_close(seen.mean("0"), of(probabilities), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention])
def test_functions_imported_by_name_are_seen(function, watch):
    seen = watch(model := nn.Sequential(Attention(16, 4, function)))
    model(inputs(2, 6, 16))
    assert seen.calls == ["0"]


class Multi(nn.Module):
    """nn.MultiheadAttention and what it is called with."""

    def __init__(self, attention, **arguments):
        super().__init__()
        self.attention = attention
        self.arguments = arguments

    def forward(self, *args):
        return self.attention(*args, **self.arguments)[0]


CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
PADDING = torch.arange(6) >= torch.tensor([[6], [4], [2]])
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "separate": {"kdim": 10, "vdim": 6},
    "dropout": {"dropout": 0.3},
}
MASKED = {
    "nothing": {},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(3, 6).masked_fill(PADDING, -torch.inf)},
    "mask": {"attn_mask": CAUSAL},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "causal padding": {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDING},
    "mask per head": {"attn_mask": (inputs(12, 6, 6) > 0.8).index_fill(2, torch.tensor(0), 0)},
    "float mask": {"attn_mask": inputs(6, 6)},
    "float masks": {"attn_mask": inputs(12, 6, 6), "key_padding_mask": inputs(3, 6)},
}


def probabilities_of(attention, args, arguments):
    """Those of a copy in float64 that returns them."""
    double = {
        name: item.double() if torch.is_tensor(item) and item.is_floating_point() else item
        for name, item in arguments.items()
    }
    double |= {"need_weights": True, "average_attn_weights": False}
    exact = copy.deepcopy(attention).double()
    exact.dropout = 0.0
    return exact(*(item.double() for item in args), **double)[1]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("options", OPTIONS)
def test_multihead_attention(options, masked, need_weights, watch):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, **OPTIONS[options])
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn_like(parameter))
    args = [inputs(6, 3, 16), inputs(6, 3, attention.kdim, seed=2), inputs(6, 3, attention.vdim, seed=3)]
    if attention.batch_first:
        args = [item.transpose(0, 1) for item in args]
    arguments = dict(MASKED[masked])
    model = Multi(attention, **arguments, need_weights=need_weights)
    seen = watch(model)
    model(*args)
    assert seen.calls == ["attention"]
    expected = probabilities_of(attention, args, arguments)
    torch.testing.assert_close(seen.mean("attention"), of(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("added", ["bias_k", "static_k", "add_zero_attn", "unbatched"])
def test_what_is_not_supported_is_reported(added):
    attention = nn.MultiheadAttention(16, 4, add_bias_kv=added == "bias_k", add_zero_attn=added == "add_zero_attn")
    result = []
    with running(AttentionCalls(lambda: "here", lambda name, call: result.append((name, call)))):
        if added == "static_k":
            F.multi_head_attention_forward(
                *[inputs(6, 3, 16)] * 3, 16, 4, attention.in_proj_weight, attention.in_proj_bias, None, None, False,
                0.0, attention.out_proj.weight, attention.out_proj.bias, static_k=inputs(12, 9, 4),
                static_v=inputs(12, 9, 4),
            )  # fmt: skip
        else:
            attention(*[inputs(6, 16) if added == "unbatched" else inputs(6, 3, 16)] * 3)
    ((name, reason),) = result
    assert name == "here"
    assert "is not measured" in reason.text


class Labelled(torch.Tensor):
    """A tensor whose class decides what functions compute."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = [item.as_subclass(torch.Tensor) if isinstance(item, cls) else item for item in args]
        return super().__torch_function__(func, types, plain, kwargs)


def test_an_error_in_the_measurement_is_reported(monkeypatch):
    def fail(call):
        raise torch.OutOfMemoryError(f"no memory for {call.query.shape[-2]} rows")

    monkeypatch.setattr(attention_calls, "attention_entropy", fail)
    query, result = inputs(2, 3, 4, 8), []
    with running(AttentionCalls(lambda: "here", lambda name, reason: result.append((name, reason)))):
        output = F.scaled_dot_product_attention(query, query, query)
    assert torch.equal(output, F.scaled_dot_product_attention(query, query, query))
    ((name, (kind, text)),) = result
    assert (name, kind) == ("here", "failed_attention")
    assert text.endswith("OutOfMemoryError: no memory for 4 rows")


@pytest.mark.parametrize("mask", [torch.ones(4, 4).as_subclass(Labelled), causal_lower_right(4, 4)])
def test_tensors_whose_class_decides_are_not_measured(mask):
    """The elements of a causal bias are not initialized."""
    result = []
    with running(AttentionCalls(lambda: "here", lambda name, reason: result.append(reason))):
        F.scaled_dot_product_attention(*inputs(3, 1, 2, 4, 8), attn_mask=mask)
    assert result == [NOT_PLAIN]


def test_a_fast_path_is_left_to_torch_beside_the_model(watch, monkeypatch):
    fast, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(1) or fast(*args))
    model, teacher = mixed(), nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    seen = watch(model)
    with torch.no_grad():
        teacher(inputs(3, 6, 16))
    model(inputs(3, 6, 16))
    assert len(calls) == 1
    assert seen.calls == ["0", "1.self_attn"]


def mixed():
    """Attention of both kinds with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        Attention(16, 4, dropout_p=0.2, is_causal=True),
        nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True),
        nn.Linear(16, 2),
    )


def train(watch, model, watched, context=None):
    seen = watch(model) if watched else None
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for step in range(3):
        optimizer.zero_grad()
        with context or torch.enable_grad():
            output = model(inputs(3, 6, 16, seed=step))
        output.float().square().mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    left = [*outputs, *model.state_dict().values(), torch.get_rng_state()]
    return left + [item.grad for item in model.parameters() if item.grad is not None], seen


@pytest.mark.parametrize("autocast", [False, True])
def test_training_is_bitwise_the_same(autocast, watch):
    def context():
        return torch.autocast("cpu", torch.bfloat16) if autocast else None

    plain, _ = train(watch, mixed(), False, context())
    watched, seen = train(watch, mixed(), True, context())
    assert len(plain) == len(watched)
    assert_same([*plain], [*watched])
    assert seen.calls == ["0", "1.self_attn"] * 3
    assert clean()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_in_backward_is_no_second_call(use_reentrant, watch):
    torch.manual_seed(0)
    plain, _ = train(watch, Checkpointed(mixed(), use_reentrant=use_reentrant), False)
    torch.manual_seed(0)
    watched, seen = train(watch, Checkpointed(mixed(), use_reentrant=use_reentrant), True)
    assert_same([*plain], [*watched])
    assert seen.calls == ["inner.0", "inner.1.self_attn"] * 3
    assert clean()


def test_a_gradient_taken_inside_a_forward(watch):
    def forward(self, x):
        x = x.requires_grad_()
        self.inner(x).sum().backward()
        return self.inner(x)

    seen = watch(model := Lambda(forward, inner=Checkpointed(mixed(), use_reentrant=True)))
    model(inputs(3, 6, 16))
    assert seen.calls == ["inner.inner.0", "inner.inner.1.self_attn"] * 2
    assert clean()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_forward(error, watch):
    def fail(self, x):
        raise error("mine")

    seen = watch(model := nn.Sequential(Attention(16, 4), nn.Sequential(Lambda(fail))))
    with pytest.raises(error, match="mine"):
        model(inputs(2, 6, 16))
    assert clean() == (error is RuntimeError)  # torch runs no hook after other exceptions
    seen.remove()
    assert clean()


class Mine(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def ignore(*args):
    pass


def test_modes_of_others_stay_as_they_are():
    calls = AttentionCalls(lambda: "here", ignore)
    first, second = Mine(), Mine()
    with first:
        calls.enter()
        with second:
            calls.enter()
            assert _get_current_function_mode_stack() == [first, calls, second]
            calls.leave()
        calls.leave()
        assert _get_current_function_mode_stack() == [first]
    assert clean()


@pytest.mark.parametrize("inside", [False, True])
def test_a_default_device_set_and_unset_in_a_forward(inside):
    calls = AttentionCalls(lambda: "here", ignore)
    mode = Mine()
    try:
        if not inside:
            torch.set_default_device("cpu")
        calls.enter()
        with mode:
            torch.set_default_device("meta")
            assert torch.ones(1).is_meta
            with torch.device("cpu"):
                assert not torch.ones(1).is_meta
            assert torch.ones(1).is_meta
            torch.set_default_device(None)
        assert _get_current_function_mode_stack() == [calls]
        calls.leave()
    finally:
        unset_default_device()
    assert clean()


def test_a_default_device_does_not_reach_the_function():
    result = []
    calls = AttentionCalls(lambda: "here", lambda name, entropy: result.append((entropy.total, torch.ones(1))))
    x = inputs(3, 1, 2, 4, 8)
    with torch.device("meta"), running(calls):
        F.scaled_dot_product_attention(*x)
    assert not any(item.is_meta for item in result[0])


def test_other_threads_are_not_watched():
    result = []

    def attend():
        assert clean()
        F.scaled_dot_product_attention(*inputs(3, 1, 2, 4, 8))

    with running(AttentionCalls(lambda: "here", lambda *_: result.append(1))) as calls:
        other = threading.Thread(target=attend)
        other.start()
        other.join()
        assert result == []
        calls.leave()
        assert clean()
        calls.enter()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_values_are_reported_as_such():
    result = []
    x = inputs(5, 1, 2, 4, 8)
    nested = torch.nested.nested_tensor([inputs(3, 2, 8), inputs(4, 2, 8)], layout=torch.jagged).transpose(1, 2)
    with running(AttentionCalls(lambda: "here", lambda name, call: result.append(call))):
        torch.vmap(lambda item: F.scaled_dot_product_attention(item, item, item))(x)
        F.scaled_dot_product_attention(nested, nested, nested)
        F.scaled_dot_product_attention(*x[:3].to("meta"))
    assert result == [NOT_PLAIN] * 3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_and_compiled_parts_run_as_ever():
    x = inputs(1, 2, 16, 8)
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x) + 1, backend="eager")
    plain = flex_attention(x, x, x), compiled(x)
    with running(AttentionCalls(lambda: "here", ignore)):
        watched = flex_attention(x, x, x), compiled(x)
    assert_same([*plain], [*watched])
    assert clean()

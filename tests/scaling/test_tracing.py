from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ignite_monitor.scaling import Node, ParametrizedModule, TracingError
from ignite_monitor.scaling.module import multiplier_of
from ignite_monitor.scaling.tracing import trace_graph
from tests.scaling import _models


def traced(model, sample_input):
    layers = [
        (module, Node(name, kind, b={"hidden": 0.5, "readout": 0.5}.get(kind, 0.0)))
        for name, module in model.named_modules()
        if (hook := multiplier_of(module)) is not None
        for kind in [hook.layer_type]
    ]
    return trace_graph(model, layers, sample_input)


def edges(graph):
    return {node.name: (node.kind, *node.inputs) for node in graph.nodes}


def origins(graph, name):
    """The layers that a node's value comes from, junctions left out."""
    found = set()
    for each in graph[name].inputs:
        found |= {each} if graph[each].has_weights else origins(graph, each)
    return found


class Model(nn.Module):
    """An embedding, two hidden layers and a readout, with a function between them."""

    def __init__(self, between, n=8):
        super().__init__()
        self.first = _models.wrapped(nn.Linear(6, n), n, "embedding")
        self.left = _models.wrapped(nn.Linear(n, n), n, "hidden")
        self.right = _models.wrapped(nn.Linear(n, n), n, "hidden")
        self.last = _models.wrapped(nn.Linear(n, 3), n, "readout")
        self.weight = nn.Parameter(torch.randn(n, n))
        self.latent = nn.Parameter(torch.randn(1, n))
        self.between = between

    def forward(self, x):
        x = self.first(x)
        return self.last(self.between(self, self.left(x), self.right(x)))


X = torch.randn(2, 5, 6)
ELSEWHERE = torch.ones(8)


def test_mlp():
    assert edges(traced(_models.mlp(8, _models.wrapped), X)) == {
        "0": ("embedding",),
        "3": ("hidden", "0"),
        "6": ("readout", "3"),
    }


@pytest.mark.parametrize("fused", [True, False])
def test_transformer(fused):
    graph = traced(_models.Transformer(16, _models.wrapped, fused), _models.TOKENS)
    found = edges(graph)
    assert found["blocks.0.attention.qkv"] == ("hidden", "tokens")
    (mixed,) = graph["blocks.0.attention.out"].inputs
    assert mixed == "blocks.0.attention.qkv"  # queries, keys and values follow one layer
    assert found["blocks.0.add"] == ("sum", "tokens", "blocks.0.attention.out")
    assert found["blocks.0.mlp.gate"] == ("hidden", "blocks.0.add")
    assert found["blocks.0.mlp.mul"] == ("product", "blocks.0.mlp.gate", "blocks.0.mlp.up")
    assert found["blocks.0.mlp.down"] == ("hidden", "blocks.0.mlp.mul")
    assert found["blocks.0.add#2"] == ("sum", "blocks.0.add", "blocks.0.mlp.down")
    assert found["blocks.1.attention.qkv"] == ("hidden", "blocks.0.add#2")
    assert found["head"] == ("readout", "blocks.1.add#2")
    assert len(found) == 2 + 2 * 8


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama(attention):
    model = _models.llama(16, attention=attention)
    layers = [
        (module, Node(name, "embedding" if "embed" in name else "readout" if name == "lm_head" else "hidden", b=b))
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
        for b in [0.0 if "embed" in name else 0.5]
    ]
    graph = trace_graph(model, layers, {"input_ids": _models.TOKENS, "labels": _models.TOKENS})
    block = "model.layers.1"
    qkv = {f"{block}.self_attn.{each}_proj" for each in "qkv"}
    assert origins(graph, f"{block}.self_attn.o_proj") == qkv
    assert graph[graph[f"{block}.self_attn.o_proj"].inputs[0]].kind == "contraction"
    before = {"model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"}
    for each in qkv:
        assert origins(graph, each) == before
    assert edges(graph)[f"{block}.mlp.mul"] == ("product", f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj")
    assert origins(graph, "lm_head") == before | {f"{block}.self_attn.o_proj", f"{block}.mlp.down_proj"}


def in_place(model, left, right):
    out = torch.zeros_like(left)
    out[..., :4] = left[..., :4]
    second = out[..., 4:]
    second.add_(right[..., 4:])
    return out


def through_out(model, left, right):
    out = torch.empty_like(left)
    torch.add(left, right, out=out)
    return out


def buffered(model, left, right):
    out = torch.zeros(2, *left.shape)
    out[0].copy_(left)
    out.select(0, 1).copy_(right)
    return out.sum(0)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@torch.jit.script
def scripted(x, y):
    return torch.sigmoid(x) * y + 1


BOTH = {
    "script": lambda model, left, right: scripted(left, right),
    "add": lambda model, left, right: left + right,
    "sub": lambda model, left, right: 1 - left.sub(right),
    "in place": in_place,
    "out=": through_out,
    "views": buffered,
    "cat": lambda model, left, right: torch.cat([left, right], dim=1),
    "stack": lambda model, left, right: torch.stack((left, right)).mean(0),
    "where": lambda model, left, right: torch.where(left > 0, left, right),
    "gate": lambda model, left, right: torch.sigmoid(left) * right,
    "glu": lambda model, left, right: F.glu(torch.cat([left, right], -1)),
    "matmul": lambda model, left, right: left @ right.mT @ left,
    "einsum": lambda model, left, right: torch.einsum("btn,bsn,bsm->btm", left, right, right),
    "sdpa": lambda model, left, right: F.scaled_dot_product_attention(left, right, right),
    "baddbmm": lambda model, left, right: torch.baddbmm(left, right, left.transpose(1, 2) @ left),
    "aten": lambda model, left, right: torch.ops.aten.add.Tensor(left, right),
    "function": lambda model, left, right: Twice.apply(left) + right,
    "checkpoint": lambda model, left, right: torch.utils.checkpoint.checkpoint(
        lambda x, y: x.sin() + y, left, right, use_reentrant=False
    ),
    "data": lambda model, left, right: left.data + right.detach().clone(),
    "lists": lambda model, left, right: sum([left, right]) / 2,
    "reshapes": lambda model, left, right: (left[None].squeeze(0).flatten(1) + right.reshape(2, -1)).view(2, 5, 8),
    "casts": lambda model, left, right: (left.double() + right.to(torch.float64)).float(),
    "norms": lambda model, left, right: F.layer_norm(left, (8,)) + F.normalize(F.rms_norm(right, (8,)), dim=-1),
    "batch norm": lambda model, left, right: F.batch_norm(left.mT, torch.zeros(8), torch.ones(8)).mT + right,
    "pooling": lambda model, left, right: F.avg_pool1d(left, 2, 1, 1)[..., :8] + F.max_pool1d(right, 1),
    "adaptive": lambda model, left, right: F.adaptive_max_pool1d(left, 8) + F.adaptive_avg_pool1d(right, 8),
    "maximum": lambda model, left, right: torch.maximum(left, right).clamp(min=0).nan_to_num(),
    "activations": lambda model, left, right: F.gelu(F.silu(left)) + F.leaky_relu(F.softplus(right)).square(),
    "latent": lambda model, left, right: left + right + model.latent,
    "autocast": lambda model, left, right: left.bfloat16().float() + right.half().float(),
    "item": lambda model, left, right: left * right.norm().item(),
    "float": lambda model, left, right: left / float(right.abs().max()),
    "a choice": lambda model, left, right: left if right.mean() > 0 else left + 1,
    "a mask": lambda model, left, right: left * 2 if (right > 0).any() else left,
    "interpolate": lambda model, left, right: F.interpolate(left, 8) + F.pad(right, (0, 0))[:, :, :8],
}


@pytest.mark.parametrize("between", BOTH.values(), ids=BOTH)
def test_operations_that_join(between):
    graph = traced(Model(between), X)
    assert origins(graph, "last") == {"left", "right"}
    assert origins(graph, "left") == origins(graph, "right") == {"first"}


ONE = {
    "other is unused": lambda model, left, right: left,
    "zeros like": lambda model, left, right: left + torch.zeros_like(right),
    "shape": lambda model, left, right: left.view(right.shape) * right.shape[-1] ** -0.5,
    "new": lambda model, left, right: left + right.new_ones(8),
    "own norm": lambda model, left, right: left / left.std(-1, keepdim=True),
    "constants": lambda model, left, right: left * torch.arange(8.0) + model.latent,
    "a constant from elsewhere": lambda model, left, right: left * ELSEWHERE + torch.from_numpy(np.ones(8)).float(),
    "a number": lambda model, left, right: left * left.abs().max().item(),
    "seen for a moment": lambda model, left, right: (right.tanh(), left)[1],
}


@pytest.mark.parametrize("between", ONE.values(), ids=ONE)
def test_operations_that_keep_one(between):
    assert origins(traced(Model(between), X), "last") == {"left"}


def test_products_and_sums_are_told_apart():
    graph = traced(Model(lambda model, left, right: left * right + left), X)
    (total,) = graph["last"].inputs
    assert graph[total].kind == "sum"
    assert {graph[each].kind for each in graph[total].inputs} == {"hidden", "product"}


def unseen(model, left, right):
    with torch._C.DisableTorchFunction():
        return left * right


LOST = {
    r"from an operation that torch does not show": unseen,
    r"last takes its input from fft_fft, an operation that is not known": lambda model, left, right: (
        torch.fft.fft(left).real
    ),
    r"from linear, with the parameter weight": lambda model, left, right: F.linear(left, model.weight),
    r"from matmul, with the parameter weight": lambda model, left, right: left @ (2 * model.weight.T),
    r"from matmul, with the parameter first\.module\.weight": lambda model, left, right: (
        left @ model.first.module.weight @ model.weight[:6]
    ),
    r"the parameter weight outside of a layer": lambda model, left, right: torch.ones(8) @ model.weight,
    r"numpy takes activations out of torch": lambda model, left, right: torch.from_numpy(left.numpy() + 1),
    r"__array__ takes activations": lambda model, left, right: torch.tensor(np.asarray(left)),
    r"tolist takes activations out of torch": lambda model, left, right: torch.tensor(left.tolist()),
    r"last takes its input from an operation": lambda model, left, right: torch.func.vmap(torch.mul)(left, right),
    r"last takes its input from cond, an operation": lambda model, left, right: torch.cond(
        torch.tensor(True), torch.add, torch.sub, (left, right)
    ),
    r"multi_head_attention_forward, an operation": lambda model, left, right: nn.MultiheadAttention(8, 2)(
        left, right, right
    )[0],
}


@pytest.mark.parametrize(("match", "between"), LOST.items())
def test_what_can_not_be_followed_is_named(match, between):
    if "cond" in match and torch.__version__ < (2, 7):
        pytest.skip("torch 2.6 allows no dispatch mode around cond")
    with pytest.raises(TracingError, match=match):
        traced(Model(between), X)


def test_layer_in_a_function_transform():
    model = Model(lambda model, left, right: left)
    model.between = lambda model, left, right: torch.func.vmap(model.left)(left)
    with pytest.raises(TracingError, match="left takes its input from a function transform, as vmap"):
        traced(model, X)


def test_scripted_modules_are_named():
    model = nn.Sequential(_models.mlp(8, _models.wrapped), torch.jit.script(nn.ReLU()))
    hooks = [len(module._forward_hooks) for module in model[0]]
    with pytest.raises(TracingError, match="1 is scripted"):
        traced(model, X)
    assert [len(module._forward_hooks) for module in model[0]] == hooks


def test_names_module_of_unknown_operation():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.linalg.qr(x).R

    model = nn.Sequential(
        _models.wrapped(nn.Linear(6, 8), 8, "embedding"), Odd(), _models.wrapped(nn.Linear(8, 3), 8, "readout")
    )
    with pytest.raises(TracingError, match=r"2 takes its input from 1\.linalg_qr"):
        traced(model, X)


def test_layer_that_was_forgotten():
    n = 8
    model = nn.Sequential(nn.Linear(6, n), nn.ReLU(), _models.wrapped(nn.Linear(n, n), n, "hidden"))
    with pytest.raises(TracingError, match=r"2 takes its input from the parameter 0\.weight outside of a layer"):
        traced(model, X)
    model = nn.Sequential(
        _models.mlp(n, _models.wrapped)[0], nn.Linear(n, n), _models.wrapped(nn.Linear(n, 3), n, "readout")
    )
    with pytest.raises(TracingError, match=r"2 takes its input from 1\.linear, with the parameter 1\.weight"):
        traced(model, X)


def test_compiled_models():
    graph = traced(torch.compile(_models.mlp(8, _models.wrapped), backend="eager"), X)
    assert [node.kind for node in graph.nodes] == ["embedding", "hidden", "readout"]
    model = _models.Transformer(16, _models.wrapped)
    expected = edges(traced(model, _models.TOKENS))
    for block in model.blocks:
        block.compile(backend="eager")
    with torch.no_grad():
        model(_models.TOKENS)
    assert edges(traced(model, _models.TOKENS)) == expected


def test_what_comes_after_the_last_layer_may_be_anything():
    class Loss(nn.Module):
        def forward(self, x):
            return torch.fft.fft(torch.linalg.svdvals(x)).abs().sum().item()

    graph = traced(nn.Sequential(_models.mlp(8, _models.wrapped), Loss()), X)
    assert [node.name for node in graph.nodes] == ["0.0", "0.3", "0.6"]


def test_layer_that_does_not_run():
    model = Model(lambda model, left, right: left)
    model.spare = _models.wrapped(nn.Linear(8, 8), 8, "hidden")
    with pytest.raises(TracingError, match="does not run spare"):
        traced(model, X)


def test_layer_called_twice():
    model = Model(lambda model, left, right: model.left(left) + right)
    graph = traced(model, X)
    assert edges(graph)["left#2"] == ("hidden", "left")
    assert graph["left#2"].shares == "left"


def test_scores_as_a_layer_of_their_own():
    scores = ParametrizedModule(lambda q, k: q @ k.mT, width_dim=8, layer_type="attention")
    model = Model(lambda model, left, right: model.scores(left, right).softmax(-1) @ right)
    model.scores = scores
    graph = traced(model, X)
    assert edges(graph)["scores"][0] == "attention"
    assert origins(graph, "scores") == {"left", "right"}
    assert origins(graph, "last") == {"left", "right"}


@pytest.mark.parametrize("inputs", [(X,), {"input": X}, X], ids=["tuple", "dict", "tensor"])
def test_inputs(inputs):
    assert len(traced(_models.mlp(8, _models.wrapped), inputs).nodes) == 3


class Restless(nn.Module):
    """It changes all that a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.layers = _models.mlp(8, _models.wrapped)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros(()))
        self.seen = None

    def forward(self, x):
        self.calls += 1
        self.seen = x + torch.rand(()) + random.random() + np.random.rand()
        self.fresh = True
        return self.layers(self.norm(self.seen))


@pytest.mark.parametrize("fails", [False, True])
def test_tracing_leaves_no_trace(fails):
    model = Restless()
    model.norm.eval()
    buffers, hooks = copy.deepcopy(dict(model.named_buffers())), [len(m._forward_hooks) for m in model.modules()]
    identities = {name: id(buffer) for name, buffer in model.named_buffers()}
    attributes = [sorted(vars(module)) for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    if fails:
        with pytest.raises(RuntimeError, match="should contain 5 elements"):
            traced(model, torch.zeros(4, 5))
    else:
        traced(model, torch.zeros(4, 6))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == identities
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert model.seen is None
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert [model.training, model.norm.training, model.layers.training] == [True, False, True]
    assert all(parameter.grad is None for parameter in model.parameters())

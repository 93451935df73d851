"""Drawn models of everything that a module tree may hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tests._models import Lambda

WIDTH, ROWS = 4, 5


def weights(*shape: int, **kwargs: Any) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, **kwargs) * 0.5)


def fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def linear(**kwargs: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **kwargs)


def cast(dtype: torch.dtype) -> Lambda:
    return Lambda(lambda self, x: self.inner(x.to(dtype)).to(x.dtype), inner=linear(dtype=dtype))


def odd_names() -> Lambda:
    inner = nn.ModuleDict({"ä b": linear(), "ä-b": linear(), "a_b": nn.Tanh(), "0": nn.Identity()})
    block = Lambda(lambda self, x: self.inner["0"](self.inner["ä b"](x)) * getattr(self, "größe 1"), inner=inner)
    block.register_parameter("größe 1", weights(WIDTH))
    block.register_parameter("gr__e_1", weights(WIDTH))
    return block


def conditional() -> Lambda:
    def function(self: Any, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.inner(x) if self.calls % 2 else x

    return Lambda(function, inner=linear(), calls=torch.zeros((), dtype=torch.int64))


def many_returns() -> Lambda:
    several = Lambda(
        lambda self, x: ({"out": self.inner(x), "half": x[:, :2], "none": None, 3: [x.long(), "text"]}, (x.mean(), 7)),
        inner=linear(),
    )
    nothing = Lambda(lambda self, x: None, unused=weights(2))
    number = Lambda(lambda self, x: 3, unused=weights(2))

    def function(self: Any, x: Tensor) -> Tensor:
        self.nothing(x)
        return self.several(x)[0]["out"] + self.number(x)

    return Lambda(function, several=several, nothing=nothing, number=number)


def in_place() -> nn.Module:
    return nn.Sequential(
        Lambda(lambda self, x: x.clone()),
        nn.LeakyReLU(inplace=True),
        Lambda(lambda self, x: x.clone()),
        Lambda(lambda self, x: x.add_(1)),
        Lambda(
            lambda self, x: x.mul_(self.scale.detach()).add_(self.shift), scale=weights(WIDTH), shift=weights(WIDTH)
        ),
    )


def attention(self: Any, x: Tensor) -> Tensor:
    x = x.view(1, 1, *x.shape)
    return F.scaled_dot_product_attention(x, x * self.scale, x)[0, 0]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "linear without bias": lambda: linear(bias=False),
    "two and tanh": lambda: nn.Sequential(linear(), nn.Tanh(), linear()),
    "empty parameter": lambda: Lambda(lambda self, x: x + self.empty.sum(), empty=weights(0)),
    "empty matrix": lambda: Lambda(lambda self, x: x + self.empty.sum(), empty=weights(0, 3)),
    "no features": lambda: nn.Sequential(nn.Linear(WIDTH, 0), nn.Linear(0, WIDTH)),
    "empty modules": lambda: nn.Sequential(nn.Sequential(), nn.Identity()),
    "no parameters": lambda: nn.Tanh(),
    "scalar": lambda: Lambda(lambda self, x: x * self.scale, scale=weights()),
    "complex": lambda: Lambda(lambda self, x: (x * self.phase).real, phase=weights(WIDTH, dtype=torch.complex64)),
    "complex scalar": lambda: Lambda(lambda self, x: (x * self.phase).abs(), phase=weights(dtype=torch.complex64)),
    "complex linear": lambda: Lambda(
        lambda self, x: self.inner(x.to(torch.complex64)).real.to(x.dtype), inner=linear(dtype=torch.complex64)
    ),
    "integers": lambda: Lambda(
        lambda self, x: x + (self.whole + self.bytes) / 200,
        whole=fixed(torch.arange(WIDTH)),
        bytes=fixed(torch.tensor([1, 200, 3, 0], dtype=torch.uint8)),
        flags=fixed(torch.tensor([[True, False]])),
    ),
    "buffers": lambda: Lambda(
        lambda self, x: (self.calls.add_(1), x * self.mask)[1],
        calls=torch.zeros((), dtype=torch.int64),
        mask=torch.tensor([True, False, True, True]),
    ),
    "float64": lambda: cast(torch.float64),
    "bfloat16": lambda: cast(torch.bfloat16),
    "float16": lambda: cast(torch.float16),
    "never called": lambda: Lambda(lambda self, x: x, inner=linear()),
    "conditional": conditional,
    "many returns": many_returns,
    "in place": in_place,
    "lists": lambda: Lambda(
        lambda self, x: x * self.list[0] + self.dict["b c"],
        list=nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)]),
        dict=nn.ParameterDict({"a": torch.ones(WIDTH), "b c": torch.zeros(())}),
    ),
    "sparse embedding": lambda: Lambda(
        lambda self, x: x + self.table((x > 0).long()).sum(1).to(x.dtype), table=nn.Embedding(3, WIDTH, sparse=True)
    ),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "not contiguous": lambda: Lambda(lambda self, x: x @ self.matrix, matrix=nn.Parameter(torch.randn(4, 4).t())),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "dropout": lambda: nn.Dropout(0.5),
    "attention": lambda: Lambda(attention, scale=weights(WIDTH)),
    "odd names": odd_names,
    "zero": lambda: Lambda(lambda self, x: x + self.inner(x) * 0, inner=linear()),
    "lazy": lambda: nn.LazyLinear(WIDTH),
    "lazy buffers": lambda: nn.LazyBatchNorm1d(affine=False),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a model."""

    blocks: tuple[str, ...]
    shared: int | None  # the block that comes once more at the end
    tied: bool  # whether the first two square matrices are one parameter
    frozen: int | None  # the place of a parameter that is frozen
    on_meta: bool  # whether it is made on the meta device, and materialized then
    used: bool  # whether a forward pass has been made, which lazy modules need
    optimizer: str

    def build(self) -> nn.Sequential:
        torch.manual_seed(0)
        with torch.device("meta" if self.on_meta else "cpu"):
            model = nn.Sequential(*(BLOCKS[kind]() for kind in self.blocks))
        if self.on_meta:
            model.to_empty(device="cpu")
            for tensor in model.state_dict().values():
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype) * 0.5)
                else:
                    tensor.zero_()
        if self.shared is not None:
            model.append(model[self.shared % len(self.blocks)])
        square = [item for item in model.modules() if type(item) is nn.Linear and item.weight.shape == (WIDTH, WIDTH)]
        alike = [item for item in square if item.weight.dtype == torch.float32]
        if self.tied and len(alike) > 1:
            alike[1].weight = alike[0].weight
        parameters = [item for item in model.parameters() if not is_lazy(item)]
        if self.frozen is not None and parameters:
            parameters[self.frozen % len(parameters)].requires_grad_(False)
        if self.used:
            with torch.no_grad():
                model(torch.ones(ROWS, WIDTH))
        return model

    def make_optimizer(self, model: nn.Sequential) -> torch.optim.Optimizer:
        parameters = [item for item in model.parameters() if item.requires_grad]
        # Others know no sparse gradients, or divide float16 by 0.
        if {"sparse embedding", "float16"} & {*self.blocks} or self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.05)
        if self.optimizer == "momentum":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)
        return torch.optim.AdamW(parameters, lr=0.01)


_ON_META = [kind for kind in BLOCKS if kind not in ("parametrized", "lazy", "lazy buffers", "lists", "dropout")]


@st.composite
def plans(draw: Any) -> Plan:
    on_meta = draw(st.sampled_from([False, False, True]))
    kinds = draw(st.lists(st.sampled_from(_ON_META if on_meta else [*BLOCKS]), min_size=1, max_size=4))
    # Something is to be trained, whatever else there is.
    kinds.insert(draw(st.integers(0, len(kinds))), "linear")
    return Plan(
        tuple(kinds),
        draw(st.none() | st.integers(0, 4)),
        draw(st.booleans()),
        draw(st.none() | st.integers(0, 9)),
        on_meta,
        draw(st.sampled_from([True, True, True, False])),
        draw(st.sampled_from(["sgd", "momentum", "adamw"])),
    )

"""Modules whose outputs are multiplied by a power of the width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm

from ignite_monitor.checks import check_count, check_real
from ignite_monitor.model._torch import known_forward_hooks, need, parameters_in, pytree
from ignite_monitor.model.names import named_modules
from ignite_monitor.scaling.graph import LAYER_TYPES, PRESETS, Node


class Multiplier:
    """A forward hook that multiplies what a module returns; it also says what is known of the layer.

    It is copied and pickled with the module, and ``torch.compile`` goes through it.

    Args:
        layer_type: "embedding", "hidden", "readout" or "attention".
        a: the exponent of the multiplier, None for the default.
        b: the exponent of the initial standard deviation, None for the default.
        c: the exponent of the learning rate, None to solve for it.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if there is no such layer type, or a number is out of its range.
    """

    def __init__(
        self,
        width: int,
        layer_type: str,
        a: float | None = None,
        b: float | None = None,
        c: float | None = None,
    ) -> None:
        if not isinstance(layer_type, str) or layer_type not in LAYER_TYPES:
            raise ValueError(f"Argument layer_type should be one of {LAYER_TYPES}, but given {layer_type!r}")
        need("A multiplier", pytree)
        self.width = check_count("width_dim", width, least=1)
        self.layer_type = layer_type
        self.a = None if a is None else check_real("a", a)
        self.b = None if b is None else check_real("b", b)
        self.c = None if c is None else check_real("c", c)
        self.value = 1.0
        self.start = 0.0  # the exponent of the layer's output before the first update
        self.rate = 0.0  # a + c with Adam, for a layer that sums over n

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The output, with every floating-point tensor in it multiplied."""
        if self.value == 1.0:
            return output
        if isinstance(output, Tensor):
            return self._times(output)
        return pytree.tree_map_only(Tensor, self._times, output)

    def _times(self, tensor: Tensor) -> Tensor:
        return tensor * self.value if tensor.is_floating_point() else tensor


def multiplier_of(module: nn.Module) -> Multiplier | None:
    """The multiplier that a module has, if it has one."""
    return next((hook for hook in known_forward_hooks(module).values() if isinstance(hook, Multiplier)), None)


class ParametrizedModule(nn.Module):
    r"""A layer whose output is multiplied by :math:`n^{-a}`, n its width, once a :class:`Parametrization` is made.

    Until then it does what the module does. It may be any module, whose parameters of two or more dimensions are taken
    as its weights, or a function without parameters that takes the products of two activations.

    Args:
        module: the module, or a function for ``layer_type="attention"``.
        width_dim: n: the fan-in of a hidden layer or a readout, how many features an embedding gives, the head's
            dimension in attention.
        layer_type: "embedding" (from inputs whose size does not grow), "hidden", "readout" (to outputs whose size does
            not grow), or "attention" for :math:`q k^\top` without weights, not divided by anything yet.
        a: the exponent of the multiplier; None for that of the layer type.
        b: the exponent of the initial standard deviation; None for that of the layer type.
        c: the exponent of the learning rate; None to solve for it.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, or what has to have weights has none.

    Examples:
        .. code-block:: python

            model = nn.Sequential(
                ParametrizedModule(nn.Linear(64, n), width_dim=n, layer_type="embedding"),
                nn.ReLU(),
                ParametrizedModule(nn.Linear(n, n), width_dim=n, layer_type="hidden"),
                nn.ReLU(),
                ParametrizedModule(nn.Linear(n, 10), width_dim=n, layer_type="readout"),
            )
            optimizer = torch.optim.Adam(Parametrization(model).param_groups)
    """

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        *,
        width_dim: int,
        layer_type: str,
        a: float | None = None,
        b: float | None = None,
        c: float | None = None,
    ) -> None:
        super().__init__()
        if not callable(module):
            raise TypeError(
                f"Argument module should be of type torch.nn.Module or a function, but given {type(module)}"
            )
        self.register_forward_hook(Multiplier(width_dim, layer_type, a, b, c))
        weights = isinstance(module, nn.Module) and any(parameter.ndim > 1 for parameter in module.parameters())
        if weights is (layer_type == "attention"):
            raise ValueError(
                f"Argument module should have {'no weights' if weights else 'weights, parameters of two dimensions'} "
                f"as a layer of type {layer_type!r}, but given {module}"
            )
        if layer_type == "attention" and (b, c) != (None, None):
            raise ValueError(f"Arguments b and c should be None for a layer without weights, but given {b} and {c}")
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns.

        Args:
            args: its arguments.
            kwargs: its keyword arguments.
        """
        return self.module(*args, **kwargs)


def draw_weights(weight: Tensor, std: float, seed: int, padding_idx: int | None = None) -> Tensor:
    """Normally distributed initial weights like a parameter; the same for the same seed, on any device.

    Args:
        weight: the parameter, of which shape, dtype and device are taken.
        padding_idx: a row that is 0.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
    if padding_idx is not None:
        drawn[padding_idx] = 0.0
    return drawn.to(device=weight.device, dtype=weight.dtype)


class FoundLayer(NamedTuple):
    """A layer before it has exponents.

    Attributes:
        module: the module that holds its weights.
        layer_type: "embedding", "hidden", "readout" or "attention".
        width: n.
        a: the multiplier's exponent, as that of its type or its module's.
        b: the initial standard deviation's, likewise.
        c: the learning rate's, None to solve for it.
        hook: what multiplies the module's output, or only says what is known of it; None where no module has it.
        own: the exponent of the factor that the model itself multiplies the layer by.
        weights: the names of its weights in the module.
        biases: those of its other parameters.
        is_module: whether what the module gives is what the layer gives.
        multiplies: whether its hook multiplies; otherwise b and c have to do it.
        from_zero: whether the weights are set to zero at the start, unless a and b are given.
    """

    module: nn.Module
    layer_type: str
    width: int
    a: float
    b: float
    c: float | None
    hook: Multiplier | None
    own: float
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    is_module: bool = True
    multiplies: bool = True
    from_zero: bool = False

    def node(self, name: str, ab: tuple[float, float] | None = None, c: float | None = None) -> Node:
        """A node without inputs, with exponents of its own or others."""
        a, b = (self.a, self.b) if ab is None else ab
        if not self.multiplies:
            a, b = 0.0 - self.own, a + b + self.own
        return Node(name, self.layer_type, (), a, b, self.c if c is None else c)


class FoundLayers(NamedTuple):
    """The layers of a model.

    Attributes:
        layers: by name.
        nodes: the nodes of their graph, whose exponents are not theirs yet.
    """

    layers: dict[str, FoundLayer]
    nodes: Iterable[Node]


def layer_name(modules: Mapping[str, nn.Module], name: str) -> str:
    """The name of the layer that a module is: its own, or that of the ParametrizedModule around it."""
    owner = name.rpartition(".")[0]
    return owner if name and isinstance(modules.get(owner), ParametrizedModule) else name


def layers_by_hand(model: nn.Module, frozen: bool = True) -> dict[str, FoundLayer]:
    """The layers that have a multiplier: ParametrizedModules, and what a parametrization has found before.

    Args:
        frozen: whether to have those, too, whose weights are all frozen.

    Raises:
        ValueError: if one is a part of another, or computes its weight from other parameters.
    """
    found: dict[str, FoundLayer] = {}
    inside: dict[int, str] = {}
    for name, module in named_modules(model):
        hook = multiplier_of(module)
        weights = [(key, each) for key, each in module.named_parameters() if each.ndim > 1]
        if hook is None or not (frozen or not weights or any(each.requires_grad for _, each in weights)):
            continue
        if id(module) in inside:
            raise ValueError(f"Layer {name} is a part of layer {inside[id(module)]}: no layer may hold another")
        if any(map(computes_weights, module.modules())):
            raise ValueError(
                f"Layer {name} computes its weight from other parameters, and it is not known how these should start: "
                "of all that do so only weight_norm can be parametrized"
            )
        inside |= dict.fromkeys(map(id, module.modules()), name)
        a, b = PRESETS["mup"][hook.layer_type]
        a, b = (a if hook.a is None else hook.a, b if hook.b is None else hook.b)
        norms = _norm_names(module)
        held = [key for key, _ in weights if key not in norms]
        others = [key for key, each in module.named_parameters() if each.ndim < 2 or key in norms]
        found[name] = FoundLayer(
            module, hook.layer_type, hook.width, a, b, hook.c, hook, 0.0, tuple(held), tuple(others)
        )
    return found


def computes_weights(module: nn.Module) -> bool:
    """Whether a module's weight is computed from other parameters, but by weight norm."""
    computed = getattr(module, "parametrizations", None)
    if isinstance(computed, nn.ModuleDict):
        return any(type(each) is not _WeightNorm for listed in computed.values() for each in listed.children())
    weight = vars(module).get("weight")  # where the older norms, which are hooks, leave it
    return (
        isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter) and "weight_g" not in parameters_in(module)
    )


def _norm_names(module: nn.Module) -> set[str]:
    """The names of the norms that weight norm multiplies with."""
    found = set()
    for path, each in module.named_modules():
        computed = getattr(each, "parametrizations", None)
        if isinstance(computed, nn.ModuleDict):
            found |= {f"{path}.parametrizations.{key}.original0".lstrip(".") for key in computed}
        if "weight_g" in parameters_in(each):
            found.add(f"{path}.weight_g".lstrip("."))
    return found


def set_norm(module: nn.Module, key: str) -> None:
    """Where weight norm computes a weight, let the norm that it multiplies with be that of the weight.

    Args:
        key: the weight's name in the module.
    """
    owner, _, last = key.rpartition(".")
    other = {"weight_v": "weight_g", "original1": "original0"}.get(last)
    if other is None:
        return
    weight, norm = (module.get_parameter(f"{owner}.{each}".lstrip(".")) for each in (last, other))
    if norm.ndim == 0:
        norm.copy_(torch.linalg.vector_norm(weight))
        return
    dims = [dim for dim in range(weight.ndim) if norm.shape[dim] == 1 < weight.shape[dim]]
    norm.copy_(torch.linalg.vector_norm(weight, dim=dims, keepdim=True) if dims else weight.abs())

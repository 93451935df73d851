"""Modules whose outputs are multiplied by a power of the width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import type_before_parametrizations

from ignite_monitor.checks import check_count, check_real
from ignite_monitor.model._torch import buffers_of_each, known_forward_hooks, need, parameters_in, pytree
from ignite_monitor.model.eager import Eager
from ignite_monitor.reference.isolation import put_back
from ignite_monitor.reference.rng import cuda_devices, generators_of, preserved_rng_state
from ignite_monitor.scaling.graph import LAYER_TYPES


class Multiplier:
    """A forward hook that multiplies what a module returns; it also says what is known of the layer.

    It is copied and pickled with the module, and ``torch.compile`` goes through it.
    """

    start = 0.0  # the exponent of the layer's output before the first update
    rate = 0.0  # a + c with Adam, for a layer that sums over n
    drift = 0.0  # the largest exponent with which inputs that drift may change the layer's output

    def __init__(
        self, width: int, layer_type: str, a: float | None = None, b: float | None = None, c: float | None = None
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

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The output, with every floating-point tensor in it multiplied."""
        if self.value == 1.0:
            return output
        return self._times(output) if isinstance(output, Tensor) else pytree.tree_map_only(Tensor, self._times, output)

    def _times(self, tensor: Tensor) -> Tensor:
        return tensor * self.value if tensor.is_floating_point() else tensor


def multiplier_of(module: nn.Module) -> Multiplier | None:
    """The multiplier that a module has, if it has one."""
    return next((hook for hook in known_forward_hooks([module])[0].values() if isinstance(hook, Multiplier)), None)


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


def layer_name(modules: Mapping[str, nn.Module], name: str) -> str:
    """The name of the layer that a module is: its own, or that of the ParametrizedModule around it."""
    owner = name.rpartition(".")[0]
    return owner if name and isinstance(modules.get(owner), ParametrizedModule) else name


def draw_weights(weight: Tensor, std: float, seed: int, padding_idx: int | None = None) -> Tensor:
    """Normally distributed initial weights of a parameter's shape; the same for the same seed, on any device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
    if padding_idx is not None:
        drawn[padding_idx] = 0.0
    return drawn.to(device=weight.device, dtype=weight.dtype)


def check_weights(name: str, module: nn.Module) -> None:
    """Refuse a module whose trained weight is computed from other parameters, but by weight norm.

    Raises:
        ValueError: if it is one.
    """
    computed = getattr(module, "parametrizations", None)
    if isinstance(computed, nn.ModuleDict):
        known = all(type(each) is _WeightNorm for listed in computed.values() for each in listed.children())
    else:
        weight = vars(module).get("weight")  # where the older norms, which are hooks, leave it
        is_computed = isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter)
        known = not is_computed or "weight_g" in parameters_in(module)
    if not known and any(each.requires_grad for each in module.parameters()):
        raise ValueError(
            f"{name or 'The model'} ({type_before_parametrizations(module).__name__}) computes its weight from other "
            "parameters, and it is not known how these should start: of all that do so only weight_norm can be "
            "parametrized. Make it without, or freeze it"
        )


_NORMS = {"weight_v": "weight_g", "original1": "original0"}


def norm_of(parameters: Mapping[str, nn.Parameter], key: str) -> str | None:
    """The name of the norm that weight norm multiplies a weight with, None if there is none."""
    owner, _, last = key.rpartition(".")
    norm = f"{owner}.{_NORMS.get(last)}".lstrip(".")
    return norm if norm in parameters else None


def set_norm(module: nn.Module, key: str) -> None:
    """Where weight norm computes a weight, let the norm that it multiplies with be that of the weight."""
    parameters = dict(module.named_parameters())
    name = norm_of(parameters, key)
    if name is None:
        return
    weight, norm = parameters[key], parameters[name]
    dims = [dim for dim in range(weight.ndim) if norm.ndim == 0 or norm.shape[dim] == 1 < weight.shape[dim]]
    norm.copy_(torch.linalg.vector_norm(weight, dim=dims, keepdim=norm.ndim > 0) if dims else weight.abs())


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A model that runs eagerly, in evaluation mode and without multipliers; afterwards it is as it was.

    So are random numbers, those of generators too that its modules hold.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    generators = [each for module in modules for each in generators_of(module).values()]
    multipliers = [(hook, hook.value) for module in modules if (hook := multiplier_of(module)) is not None]
    buffers, numbers = put_back(modules, buffers_of_each(modules)), preserved_rng_state(cuda_devices(), generators)
    try:
        with buffers, numbers, torch.no_grad(), Eager(model):
            model.eval()
            for hook, _ in multipliers:
                hook.value = 1.0
            yield
    finally:
        for hook, factor in multipliers:
            hook.value = factor
        for module, saved in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(saved)

"""Exponents and alignments by name."""

from __future__ import annotations

from typing import NamedTuple

from ignite_monitor.checks import check_real

LAYER_TYPES = ("embedding", "hidden", "readout")
OPTIMIZER_TYPES = ("adam", "sgd", "muon")

PRESETS: dict[str, dict[str, tuple[float, float]]] = {
    "mup": {"embedding": (-0.5, 0.5), "hidden": (0.0, 0.5), "readout": (0.5, 0.5)},
    "standard": {"embedding": (0.0, 0.0), "hidden": (0.0, 0.5), "readout": (0.0, 0.5)},
    "ntk": {"embedding": (0.0, 0.0), "hidden": (0.5, 0.0), "readout": (0.5, 0.0)},
    "mean_field": {"embedding": (0.0, 0.0), "hidden": (0.5, 0.0), "readout": (1.0, 0.0)},
}
"""Exponents (a, b) per layer type, as ``ab_overrides`` takes them."""

MUON_UPDATES = {"original": 0.0, "match_rms_adamw": 0.5}
"""Exponent of the change of a hidden layer's output per step of ``torch.optim.Muon``, by its ``adjust_lr_fn``."""


class Alignment(NamedTuple):
    r"""Growth of a layer's products with its fan-in n, as exponents of n.

    Attributes:
        alpha: of the initial input and the weights' change, :math:`z_0 \Delta W^\top`.
        omega: of the input's change and the initial weights, :math:`\Delta z W_0^\top`.
        u: of both changes, :math:`\Delta z \Delta W^\top`.
    """

    alpha: float
    omega: float
    u: float


ALIGNMENTS = {"full": Alignment(1.0, 0.5, 1.0), "no": Alignment(0.5, 0.5, 0.5)}


def as_alignment(name: str, value: object) -> Alignment:
    """Return an alignment that is given by its name or as three numbers.

    Raises:
        TypeError: if it is neither a name nor three numbers.
        ValueError: if the name is unknown, or a number is not finite.
    """
    if isinstance(value, str) and value in ALIGNMENTS:
        return ALIGNMENTS[value]
    message = f"Argument {name} should be one of {list(ALIGNMENTS)} or three numbers, but given {value!r}"
    if isinstance(value, str):
        raise ValueError(message)
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise TypeError(message)
    return Alignment(*(check_real(name, number) for number in value))

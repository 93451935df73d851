"""Where a model is."""

from __future__ import annotations

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter that has data; the CPU if none has."""
    return next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))

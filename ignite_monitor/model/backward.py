"""Whether a backward pass is going on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ignite_monitor.model._torch import in_backward as in_backward


def users_grad_mode() -> AbstractContextManager[Any]:
    """What to call a user's function in: in a backward pass autograd has turned gradients off, which nobody expects."""
    return torch.enable_grad() if in_backward() else nullcontext()

"""Whether a backward pass is going on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def in_backward() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def users_grad_mode() -> AbstractContextManager[Any]:
    """What to call a user's function in: in a backward pass autograd has turned gradients off, which nobody expects."""
    return torch.enable_grad() if in_backward() else nullcontext()

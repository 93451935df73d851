"""Running compiled models as they are written, so that hooks on their modules are called."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """While it lasts, what ``torch.compile`` has compiled runs eagerly; nothing is compiled again for it.

    Hooks that come after a model's first compiled call would not run otherwise.
    """
    # Whoever compiles anything has imported it, which takes seconds.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield

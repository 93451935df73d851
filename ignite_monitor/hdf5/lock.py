"""One writer per file."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment, unused-ignore]


class Lock:
    """Holds a file beside the one to be written, until it is released or the process ends, however it ends.

    Where the file system has no locks, nobody is refused.

    Args:
        path: the file that only one may hold.

    Raises:
        BlockingIOError: if another does.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._process = path, os.getpid()
        self._file = path.open("ab")
        try:
            _lock(self._file.fileno())
            # Its last holder may have removed it between the opening and the locking.
            held = path.exists() and os.path.samestat(path.stat(), os.fstat(self._file.fileno()))
        except BlockingIOError:
            held = False
        if not held:
            self._file.close()
            raise BlockingIOError(f"{path} is held by another writer")
        _HELD.add(self)

    def release(self) -> None:
        """Let others have it."""
        if os.getpid() == self._process and not self._file.closed:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._file.close()


def _lock(descriptor: int) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass


def _let_go() -> None:
    """A forked process has the same open file, and would go on holding it when its parent has been killed."""
    for lock in _HELD:
        lock._file.close()


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)

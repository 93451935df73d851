"""Appending to an HDF5 file such that a complete, closed file has its name at every moment.

HDF5 files are not written in one piece, and a process that is killed while writing leaves one that can't be opened. So
there are two copies, and one has the name. New data goes to the other one, the standby copy, which is then closed
and renamed over the first. The first becomes the standby copy, and gets what it lacks with the next write.

The whole file is copied only where the standby copy can't be used: at the first write, once after a reader has opened
the file or given it a second name (neither is written to), and at every write where the file system has no hard links.

A reader that opens the first copy while it has the name, and locks it only when it is being written again, gets a
BlockingIOError from its lock and never half a file; :func:`~ignite_monitor.read_hdf5` tries again.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ignite_monitor.hdf5.layout import DATASETS, create, import_h5py

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment, unused-ignore]

Patch = list[tuple[str, int, NDArray[Any]]]
"""Dataset, first index, elements. Applying a patch twice has the same effect as once."""


class DoubleBuffer:
    """A file, locked against other writers until it is closed or the process ends.

    Raises:
        BlockingIOError: if another writer has it.
        FileExistsError: if it exists, in mode ``"x"``.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self._standby, self._spare, lock = (
            path.with_name(f".{path.name}.{end}") for end in ("standby", "spare", "lock")
        )
        self._behind: Patch | None = None  # what the standby copy lacks; None if there is no usable one
        if mode == "x" and path.exists():
            raise FileExistsError("file exists; mode 'a' continues it, mode 'w' replaces it")
        self._lock = lock.open("ab")
        # The last holder may have removed it between opening and locking.
        if not (_lock(self._lock) and lock.exists() and os.path.samestat(lock.stat(), os.fstat(self._lock.fileno()))):
            self._lock.close()
            raise BlockingIOError("it is open in another program, or in another logger of this one")
        if hasattr(os, "register_at_fork"):  # a forked process would hold it after its parent has been killed
            os.register_at_fork(after_in_child=self._lock.close)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._discard()
            if mode == "w" or not path.exists():
                create(self._standby)
                os.replace(self._standby, path)
            self._published = {_identity(path)}
            undo.pop_all()

    def write(self, patch: Patch) -> None:
        """Apply a patch to the file; if that fails, the file is unchanged."""
        behind, self._behind = self._behind, None
        if self.path.exists():
            identity = _identity(self.path)
            if identity not in self._published:
                raise FileExistsError("another program has changed it, or put another file in its place")
            self._published = {identity}
        if behind is None or not self._apply([*behind, *patch]):
            self._discard()
            shutil.copyfile(self.path, self._standby)
            self._apply(patch)

        self._spare.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it was removed, or the file system has no hard links
            shutil.copymode(self.path, self._standby)
            os.link(self.path, self._spare)
        self._published.add(_identity(self._standby))  # before the renaming: an interrupt may come right after
        os.replace(self._standby, self.path)
        with contextlib.suppress(FileNotFoundError):  # the first copy could not be kept
            os.replace(self._spare, self._standby)
            self._behind = patch

    def close(self) -> None:
        """Remove all files but the one with the name."""
        self._discard()
        if not self._lock.closed:
            with contextlib.suppress(OSError):
                os.unlink(self._lock.name)
        self._lock.close()

    def _apply(self, patch: Patch) -> bool:
        """Apply a patch to the standby copy; False if a reader has opened it, or it has another name.

        A full disk ends HDF5 in a segmentation fault. So the space that it may need is reserved first.

        Raises:
            OSError: if there is no space.
        """
        with self._standby.open("r+b") as file:
            if not _lock(file) or os.fstat(file.fileno()).st_nlink > 1:
                return False
            needed = (1 << 17) + sum(_space_for(name, len(elements)) for name, _, elements in patch)
            try:
                end = file.seek(0, os.SEEK_END)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), end, needed)
                else:
                    file.write(bytes(needed))
                    file.flush()
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}: a write may need {needed / 1000:,.0f} kB") from error
            # Not locked again: its lock would be refused.
            with import_h5py().File(self._standby, "r+", libver=("v110", "v110"), locking=False) as opened:
                for name, first, elements in patch:
                    dataset = opened[name]
                    dataset.resize((first + len(elements),))
                    dataset[first:] = elements
        return True

    def _discard(self) -> None:
        for path in (self._standby, self._spare):
            with contextlib.suppress(OSError):
                path.unlink()


def _space_for(name: str, elements: int) -> int:
    """Upper bound of the bytes by which a dataset grows when elements are added, compressed or not."""
    dtype, chunk = DATASETS[name]
    return (math.ceil(elements / chunk) + 2) * (chunk * dtype.itemsize + 4096)


def _identity(path: Path) -> tuple[int, int, int]:
    """Device, inode and size: the inode of a removed file is soon reused."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size


def _lock(file: Any) -> bool:
    """Lock a file; False if it is locked."""
    try:
        if fcntl is not None:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True

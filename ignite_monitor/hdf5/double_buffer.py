"""Appending to an HDF5 file such that there is a complete, closed file under its name at every moment.

HDF5 files are not written in one piece, and a process that is killed within leaves one that doesn't open. So there are
two copies, of which one has the name. What is new goes to the other, the shadow, which is closed and renamed over the
first. The first becomes the shadow, and gets what it lacks with the next write: nothing is ever copied as a whole.

A reader that has the first copy open keeps it: what is open or has another name too is not written to, and a fresh copy
is made instead. A reader that opens it while it has the name, and locks it only once it is written again (it has to be
stopped in between for as long as passes between two writes), gets a BlockingIOError from its lock and never half a
file; :func:`~ignite_monitor.read_hdf5` tries again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ignite_monitor.hdf5.layout import COLUMNS, create, import_h5py

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment, unused-ignore]

Patch = list[tuple[str, int, NDArray[Any]]]
"""What to put where: dataset, first index, elements. Applying it twice does no harm."""


class SwappedFile:
    """The file, which nobody else writes until it is closed; BlockingIOError if another writer has it."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self._shadow, self._spare = (path.with_name(f".{path.name}.{end}") for end in ("shadow", "spare"))
        self._behind: Patch | None = None  # what the shadow lacks; None: there is no shadow that can be relied on
        if mode == "x" and path.exists():
            raise FileExistsError(path)
        self._lock = Lock(path.with_name(f".{path.name}.lock"))
        try:
            self._discard()
            if mode == "w" or not path.exists():
                create(self._shadow)
                if mode != "w" and path.exists():
                    raise FileExistsError(path)
                os.replace(self._shadow, path)
            self._published = {_identity(path)}
        except BaseException:
            self.close()
            raise

    def write(self, patch: Patch) -> None:
        """Put a patch into the file.

        Raises:
            OSError: if that fails. The file is then as it was.
        """
        behind, self._behind = self._behind, None
        try:
            self._check_place()
            if behind is None or not self._is_free() or not self._apply([*behind, *patch], locking=True):
                self._discard()
                self._copy()
                self._apply(patch, locking=False)
            kept = self._publish()
        except BaseException:
            self._discard()
            raise
        if kept:
            self._behind = patch

    def close(self) -> None:
        """Leave nothing but the file."""
        self._discard()
        self._lock.release()

    def _is_free(self) -> bool:
        """Whether the shadow is open nowhere else, which HDF5 says by its locks, and has no other name."""
        try:
            with self._shadow.open("r+b") as file:
                if fcntl is not None:
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return os.fstat(file.fileno()).st_nlink == 1
        except OSError:
            return False

    def _check_place(self) -> None:
        """Leave alone what somebody else has put there.

        Raises:
            FileExistsError: if the file is not the one that was put there.
        """
        if self.path.exists():
            found = _identity(self.path)
            if found not in self._published:
                raise FileExistsError("another program has changed it, or put another file in its place")
            self._published = {found}

    def _copy(self) -> None:
        needed = self.path.stat().st_size
        if shutil.disk_usage(self.path.parent).free < needed:  # known before a long file is copied in vain
            raise self._no_room(errno.ENOSPC, needed)
        shutil.copyfile(self.path, self._shadow)

    def _apply(self, patch: Patch, *, locking: bool) -> bool:
        """Put a patch into the shadow; False if a reader has opened it just now, which may be only with ``locking``.

        HDF5 does not survive a disk that is full: the process ends in a segmentation fault. So the room that it may
        need is taken before, where an error is an error.

        Raises:
            OSError: if there is no room, or the shadow can't be opened although nobody else has it.
        """
        with self._shadow.open("r+b") as file:
            needed = (1 << 17) + sum(_room_for(name, len(elements)) for name, _, elements in patch)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), needed)
                else:
                    file.seek(0, os.SEEK_END)
                    file.write(bytes(needed))
            except OSError as error:
                raise self._no_room(error.errno, needed) from error
        try:
            opened = import_h5py().File(self._shadow, "r+", libver=("v110", "v110"), locking=locking)
        except OSError:
            if locking:
                return False
            raise
        with opened:
            for name, first, elements in patch:
                dataset = opened[name]
                if first + len(elements) > len(dataset):
                    dataset.resize((first + len(elements),))
                dataset[first : first + len(elements)] = elements
        return True

    def _publish(self) -> bool:
        """Swap the copies; False if the first could not be kept.

        Raises:
            FileExistsError: if the file is not the one that was put there.
        """
        kept = True
        try:
            self._check_place()
            shutil.copymode(self.path, self._shadow)
            os.link(self.path, self._spare)
        except FileExistsError:
            raise
        except OSError:  # it was removed, or there are no hard links here
            kept = False
        next_one = _identity(self._shadow)
        self._published.add(next_one)  # before it is put there: an interrupt may come right after
        os.replace(self._shadow, self.path)
        self._published = {next_one}
        if kept:
            try:
                os.replace(self._spare, self._shadow)
            except OSError:
                kept = False
        return kept

    def _no_room(self, number: int | None, needed: int) -> OSError:
        words = f"{os.strerror(number or errno.EIO)}: a write may need {_kilobytes(needed)} of room"
        if number == errno.ENOSPC:
            words += f", and {_kilobytes(shutil.disk_usage(self.path.parent).free)} are free"
        return OSError(number, words)

    def _discard(self) -> None:
        for path in (self._shadow, self._spare):
            with contextlib.suppress(OSError):
                path.unlink()


def _kilobytes(size: int) -> str:
    return f"{size / 1000:,.0f} kB"


def _room_for(name: str, elements: int) -> int:
    """How many bytes a dataset may grow by at most when elements are added, compressed or not."""
    dtype, chunk = COLUMNS[name]
    return (math.ceil(elements / chunk) + 2) * (chunk * dtype.itemsize + 4096)


def _identity(path: Path) -> tuple[int, int, int]:
    """The size too, since the inode of a file that was removed is soon another's."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size


class Lock:
    """Holds a file beside the one to be written, until it is released or the process ends, however it ends.

    Where the file system has no locks, nobody is refused.
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


def _close_in_child() -> None:
    """A forked process has the same open file, and would go on holding it when its parent has been killed."""
    for lock in _HELD:
        lock._file.close()


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

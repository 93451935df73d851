"""Appending to an HDF5 file such that a complete file has its name at every moment.

HDF5 changes a file in many places to append to it, and a process that is killed meanwhile leaves a file that can't be
opened. So HDF5 only makes files: datasets that are larger than what they hold. Elements are then written by the system
behind those that count, and last, in one small write, ``state`` says how many count now. Every ten seconds all is
written to the disk first, so that a loss of power leaves what was there. A file without space for more is replaced by a
larger one, which is renamed over it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import time
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from ignite_monitor.hdf5.layout import EMPTY, TABLES, VERSION, Elements, State, extended, import_h5py, sealed

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment, unused-ignore]

SYNC_EVERY = 10.0  # seconds
BLOCK = 2**16  # elements or bytes
SPACE = {"rows": 512, "values": 8192, "lines": 4096}  # elements, at least
LIBVER = ("v110", "v110")  # the format of HDF5 1.10 has checksums for all but the data


class Store:
    """A file, locked against other writers until it is released or the process ends.

    It keeps no state of the contents, so an interrupted call can be made again.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self._new, lock = (path.with_name(f".{path.name}.{end}") for end in ("new", "lock"))
        self._h5py = import_h5py()
        self._file: FileIO | None = None  # the file with the name
        self._places: dict[str, tuple[int, int]] = {}  # in it: offset in bytes, and number of elements
        self._own: set[tuple[int, int]] = set()  # files that may have the name
        self._synced = 0.0  # time at which all was on the disk
        if mode == "x" and path.exists():
            raise FileExistsError("file exists; mode 'a' continues it, mode 'w' replaces it")
        self._lock = lock.open("ab")
        try:
            if fcntl is not None:
                fcntl.flock(self._lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(lock.stat(), os.fstat(self._lock.fileno())):
                    raise BlockingIOError  # the last holder has removed it between opening and locking
        except (BlockingIOError, FileNotFoundError):
            self._lock.close()
            raise BlockingIOError("it is open in another program, or in another logger of this one") from None
        except OSError:  # a file system without locks
            pass
        if hasattr(os, "register_at_fork"):  # a forked process would hold it after its parent has been killed
            os.register_at_fork(after_in_child=self._lock.close)
        with contextlib.ExitStack() as undo:
            undo.callback(self.release)
            self._new.unlink(missing_ok=True)  # of a killed writer
            if mode == "w" or not path.exists():
                self._replace(EMPTY, EMPTY)
            path.open("r+b").close()  # or what is written to it would be lost
            self._own = {_identity(path)}
            undo.pop_all()

    def append(self, state: State, additions: Elements) -> State:
        """Write elements behind those that count, and return the state that counts them too.

        If that fails, the file counts what it did; after an interrupt, maybe the new ones: the call can be repeated.
        """
        after = extended(state, additions)
        file = self._open()
        if any(size > self._places[name][1] for name, (size, _) in after.items()):
            self._replace(state, after)
            file = self._open()
        for name, elements in additions.items():
            _write(file, self._places[name][0] + state[name][0] * elements.itemsize, elements.tobytes())
        numbers = sealed(after).tobytes()
        if time.monotonic() - self._synced > SYNC_EVERY:
            self._sync(file)
            numbers *= 2
        _write(file, self._places["state"][0], numbers)
        return after

    def close(self, state: State) -> None:
        """Write all to the disk, if possible, and release the file."""
        with contextlib.suppress(Exception):
            self._synced = 0.0
            self.append(state, {name: np.empty(0, dtype) for name, dtype in TABLES.items()})
        self.release()

    def release(self) -> None:
        """Leave the file as it is, and remove the others."""
        if self._file is not None:
            self._file.close()
        if not self._lock.closed:
            for path in (self._new, self._lock.name):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            self._lock.close()

    def _open(self) -> FileIO:
        """Open the file with the name."""
        if _identity(self.path) not in self._own:
            raise FileExistsError("another program has put another file in its place")
        if self._file is None:
            with contextlib.ExitStack() as undo:
                file = undo.enter_context(self.path.open("r+b", buffering=0))
                with self._h5py.File(file, "r") as opened:  # by its name it may be open in this process already
                    self._places = {name: (opened[name].id.get_offset(), len(opened[name])) for name in opened}
                undo.pop_all()
            self._file, self._own = file, {_identity(self.path)}
        return self._file

    def _replace(self, state: State, needed: State) -> None:
        """Put a copy in the place of the file, with space for half as much again as needed."""
        sizes = {name: size + size // 2 + SPACE[name] for name, (size, _) in needed.items()}
        self._make_room(sizes)
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(self._h5py.File(self._new, "r+", libver=LIBVER, locking=False))
            source = stack.enter_context(self._h5py.File(self._file, "r")) if self._file is not None else {}
            # Before the rest: the file may be copied while it is written.
            target["state"] = np.tile(sealed(state), 2)
            for name, dtype in TABLES.items():
                dataset = target.create_dataset(name, (sizes[name],), dtype)
                dataset[-1:] = np.zeros(1, dtype)  # HDF5 gives it its place now
                for begin in range(0, state[name][0], BLOCK):
                    end = min(begin + BLOCK, state[name][0])
                    dataset[begin:end] = source[name][begin:end]
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(self.path, self._new)
        with self._new.open("r+b") as new:
            self._sync(new)
        if self._file is not None:
            former, self._file = self._file, None
            former.close()
        self._own.add(_identity(self._new))  # before it has the name: an interrupt may come right after
        os.replace(self._new, self.path)

    def _sync(self, file: Any) -> None:
        os.fsync(file.fileno())
        self._synced = time.monotonic()

    def _make_room(self, sizes: dict[str, int]) -> None:
        """Make a file without datasets, with the space that they need: a full disk can crash HDF5."""
        image = io.BytesIO()
        with self._h5py.File(image, "w", libver=LIBVER) as empty:
            empty.attrs["version"] = VERSION
        needed = BLOCK + sum(sizes[name] * dtype.itemsize for name, dtype in TABLES.items())
        try:
            with self._new.open("wb") as file:
                file.write(image.getvalue())
                for _ in range(0, needed, BLOCK):  # not all file systems can allocate space without writing
                    file.write(bytes(BLOCK))
        except OSError as error:
            self._new.unlink(missing_ok=True)  # it may hold the last free space
            raise OSError(error.errno, f"{error.strerror}: a larger file needs {needed / 1000:,.0f} kB") from error


def _write(file: FileIO, offset: int, data: bytes) -> None:
    file.seek(offset)
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino

"""Files that no HDF5Logger has written: made of one of its files, with one thing in it replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

NAMES = ("names", "ids", "values", "exact", "rows")
Change = Callable[[Any, Path], None]


def strangers() -> Iterator[tuple[str, Change]]:
    """What is changed, and a function that changes it in a file that is open. Numbers stay what they were."""
    for name in NAMES:
        for what, change in (DATASETS | LINKS).items():
            yield f"{name}: {what}", lambda file, folder, name=name, change=change: change(file, name, folder)
    for name in ("format", "version", "created"):
        for what, value in ATTRIBUTES.items():
            yield f"attribute {name}: {what}", lambda file, _, name=name, value=value: attribute(file, name, value)
    yield "another dataset", lambda file, _: file.create_dataset("more", data=[1])
    yield "another group", lambda file, _: file.create_group("more")
    yield "a link to the whole", lambda file, _: file.__setitem__("more", h5py.SoftLink("/"))
    yield "many links", lambda file, _: [file.create_group(str(number)) for number in range(2000)]


def again(file: Any, name: str, data: Any = None, **options: Any) -> None:
    data = file[name][()] if data is None else data
    del file[name]
    file.create_dataset(name, **{"data": data, **options})


def claimed(file: Any, name: str, shape: Any, **options: Any) -> None:
    """A dataset without data."""
    dtype = options.pop("dtype", file[name].dtype)
    del file[name]
    file.create_dataset(name, shape, dtype, **options)


def resized(file: Any, name: str, change: int) -> None:
    file[name].resize((max(0, len(file[name]) + change),))


def linked(file: Any, name: str, link: Any) -> None:
    del file[name]
    file[name] = link


def moved(file: Any, name: str) -> None:
    file.move(name, "elsewhere")
    file[name] = h5py.SoftLink("/elsewhere")


def virtual(file: Any, name: str, folder: Path) -> None:
    layout = h5py.VirtualLayout(file[name].shape, file[name].dtype)
    layout[:] = h5py.VirtualSource(str(folder / "whole.h5"), name, file[name].shape)
    del file[name]
    file.create_virtual_dataset(name, layout)


def external(file: Any, name: str, folder: Path) -> None:
    data = file[name][()]
    (folder / "raw").write_bytes(data.tobytes())
    del file[name]
    file.create_dataset(name, data.shape, data.dtype, external=[(str(folder / "raw"), 0, max(1, data.nbytes))])


def committed(file: Any, name: str) -> None:
    linked(file, name, np.dtype("<i8"))


def attribute(file: Any, name: str, value: Any) -> None:
    del file.attrs[name]
    if value is not None:
        file.attrs[name] = value


CHUNKS = {"maxshape": (None,), "chunks": (64,)}
DATASETS: dict[str, Callable[[Any, str, Path], None]] = {
    **{
        f"of type {dtype!r}": lambda file, name, _, dtype=dtype: claimed(file, name, (8,), dtype=dtype)
        for dtype in [
            "f8", ">f4", "f2", "i1", ">i8", "i4", "c8", "S5", "?", "V7", h5py.string_dtype(), h5py.ref_dtype,
            h5py.vlen_dtype("i4"), h5py.enum_dtype({"a": 1}, "i8"), np.dtype(("f4", (3,))),
            [("place", "<f8"), ("value", "<f8")], [("value", "<f8"), ("place", "<i8")], [("step", "<i8")],
        ]
    },
    **{
        f"of shape {shape}": lambda file, name, _, shape=shape: claimed(file, name, shape)
        for shape in [(), (2, 4), (0,), (1,), (0, 3)]
    },
    "of no shape": lambda file, name, _: linked(file, name, h5py.Empty("<i4")),
    "contiguous and never written": lambda file, name, _: claimed(file, name, (8,)),
    "of 1e12 elements": lambda file, name, _: claimed(file, name, (10**12,), maxshape=(None,), chunks=(1 << 16,)),
    "of 1e12 elements, contiguous": lambda file, name, _: claimed(file, name, (10**12,)),
    "of 1e8 elements, compressed": lambda file, name, _: claimed(file, name, (10**8,), compression=1, **CHUNKS),
    "of long chunks": lambda file, name, _: again(file, name, maxshape=(None,), chunks=(1 << 18,), compression=1),
    "without the last elements": lambda file, name, _: resized(file, name, -3),
    "with more elements": lambda file, name, _: resized(file, name, 3),
    "with many more elements": lambda file, name, _: resized(file, name, 100_000),
    "contiguous": lambda file, name, _: again(file, name),
    "chunked": lambda file, name, _: again(file, name, **CHUNKS),
    "deflated": lambda file, name, _: again(file, name, compression=9, **CHUNKS),
    "of one chunk": lambda file, name, _: again(file, name, chunks=True, fletcher32=True),
    "with another filter": lambda file, name, _: again(file, name, compression="lzf", **CHUNKS),
    "in 2 dimensions": lambda file, name, _: again(file, name, file[name][()][None]),
    "virtual": virtual,
    "external": external,
}  # fmt: skip
LINKS: dict[str, Callable[[Any, str, Path], None]] = {
    "deleted": lambda file, name, _: file.__delitem__(name),
    "a group": lambda file, name, _: (file.__delitem__(name), file.create_group(name)),
    "a type": lambda file, name, _: committed(file, name),
    "the root": lambda file, name, _: linked(file, name, file["/"]),
    "another dataset": lambda file, name, _: linked(file, name, file[NAMES[NAMES.index(name) - 1]]),
    "a soft link": lambda file, name, _: moved(file, name),
    "a soft link to itself": lambda file, name, _: linked(file, name, h5py.SoftLink(f"/{name}")),
    "a soft link to nothing": lambda file, name, _: linked(file, name, h5py.SoftLink("/nothing")),
    "a link to a file": lambda file, name, folder: linked(
        file, name, h5py.ExternalLink(str(folder / "whole.h5"), name)
    ),
    "a link to no file": lambda file, name, folder: linked(file, name, h5py.ExternalLink("no.h5", name)),
    "another name for it": lambda file, name, _: file.__setitem__("more", file[name]),
}
ATTRIBUTES: dict[str, Any] = {
    "deleted": None,
    "an integer": 7,
    "a number": np.nan,
    "another text": "x" * 1000,
    "bytes": np.bytes_(b"ignite_monitor"),
    "a list of texts": ["ignite_monitor"],
    "numbers": np.ones(1000, np.int64),
    "a 1 in two dimensions": np.ones((1, 1)),
    "nothing": h5py.Empty("<i8"),
    "of several parts": np.zeros((), [("a", "<i8"), ("b", "<f8")]),
    "complex": 1 + 2j,
}

# What is done to the bytes of a file.


def _flip(data: bytearray, place: int, chance: np.random.Generator) -> None:
    data[place] ^= 1 << int(chance.integers(8))


def _flips(data: bytearray, place: int, chance: np.random.Generator) -> None:
    for _ in range(20):
        _flip(data, int(chance.integers(len(data))), chance)


def _zeros(data: bytearray, place: int, chance: np.random.Generator) -> None:
    end = min(len(data), place + int(chance.integers(1, 200)))
    data[place:end] = bytes(end - place)


def _noise(data: bytearray, place: int, chance: np.random.Generator) -> None:
    end = min(len(data), place + int(chance.integers(1, 50)))
    data[place:end] = chance.bytes(end - place)


def _cut(data: bytearray, place: int, chance: np.random.Generator) -> None:
    del data[place:]


def _removed(data: bytearray, place: int, chance: np.random.Generator) -> None:
    del data[place : place + int(chance.integers(1, 100))]


def _inserted(data: bytearray, place: int, chance: np.random.Generator) -> None:
    data[place:place] = chance.bytes(int(chance.integers(1, 100)))


def _copied(data: bytearray, place: int, chance: np.random.Generator) -> None:
    length, other = int(chance.integers(1, 300)), int(chance.integers(len(data)))
    part = data[other : other + length]
    data[place : place + len(part)] = part


DAMAGES = (_flip, _flips, _zeros, _noise, _cut, _removed, _inserted, _copied)


def damaged(data: bytes, seed: int) -> bytes:
    chance, changed = np.random.default_rng(seed), bytearray(data)
    DAMAGES[seed % len(DAMAGES)](changed, int(chance.integers(len(data))), chance)
    return bytes(changed)

"""A device that is not the CPU, simulated on it: tensors lie on "sim:0", and every synchronization is reported.

What a GPU shows and a CPU hides: a value that is read on the host in the middle of an iteration, an index that is
uploaded, tensors of two devices in one operation, how many operations are launched. It is built with the machine's C++
compiler when it is first needed, in some 8 s, and stays until the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "sim"
SOURCE = Path(__file__).with_name("simulated.cpp")

_LAUNCH_NOTHING = """
    view detach alias t transpose expand select slice unsqueeze squeeze permute as_strided unbind split _unsafe_view
    _reshape_alias empty empty_like empty_strided lift_fresh diagonal split_with_sizes unfold new_empty set_ resize_
    new_empty_strided
"""
VIEWS = frozenset(_LAUNCH_NOTHING.split())

_synchronizations: list[str] | None = None


class NoDeviceError(Exception):
    """Why there is no simulated device."""


class _DeviceModule:
    """The functions that torch calls on a device's module."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        _tell("synchronize")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        self.set_rng_state(torch.Generator("cpu").manual_seed(seed).get_state())

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.ops.simulated.generator_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.ops.simulated.set_generator_state(state)


@functools.cache
def load() -> None:
    """Make the device known to torch.

    Raises:
        NoDeviceError: if it can't be built.
    """
    global _library, _function
    _library = ctypes.CDLL(str(build()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _DeviceModule())
    torch.utils.generate_methods_for_privateuse1_backend()
    _library.launched.restype = ctypes.c_long
    _library.start()
    _function = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda kind: _tell(kind.decode()))
    _library.tell(_function)


def build() -> Path:
    """The library, of this source and for this torch.

    Raises:
        NoDeviceError: if it can't be built.
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None or os.name != "posix":
        raise NoDeviceError("no C++ compiler: c++, g++ and clang++ are not there")
    torch_files = Path(torch.__file__).parent
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + str(torch_files).encode()).hexdigest()
    library = Path(tempfile.gettempdir(), f"simulated-device-{os.getuid()}", f"{digest[:16]}.so")
    if library.exists():
        return library
    library.parent.mkdir(exist_ok=True, mode=0o700)
    part = library.with_suffix(f".{os.getpid()}")
    include = torch_files / "include"
    command = [compiler, "-std=c++20", "-O0", "-w", "-fPIC", "-shared", "-DAT_PER_OPERATOR_HEADERS"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{include}", f"-I{include}/torch/csrc/api/include", str(SOURCE), "-o", str(part)]
    command += [f"-L{torch_files}/lib", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoDeviceError(f"{compiler} can't build it for torch {torch.__version__}: {done.stderr.strip()[-300:]}")
    part.rename(library)
    return library


@contextlib.contextmanager
def synchronizations() -> Iterator[list[str]]:
    """Synchronizations meanwhile: each as its kind and the places in the code."""
    global _synchronizations
    outer, _synchronizations = _synchronizations, []
    try:
        yield _synchronizations
    finally:
        _synchronizations = outer


@contextlib.contextmanager
def operations(device: str = NAME) -> Iterator[Counter[str]]:
    """Count operations launched on a device: name -> number, without views; a foreach operation counts as one."""
    counts: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            name = function._schema.name.partition("::")[2]
            if name not in VIEWS:
                leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
                if any(isinstance(item, torch.Tensor) and item.device.type == device for item in leaves):
                    counts[name] += 1
            return result

    with Count():
        yield counts


def launched() -> int:
    """Return the number of operations that the device has run, including those that no dispatch mode sees."""
    return int(_library.launched())


def _tell(kind: str) -> None:
    if _synchronizations is not None:
        elsewhere = (f"{os.sep}torch{os.sep}", str(Path(__file__)))
        frames = [item for item in traceback.extract_stack() if not any(name in item.filename for name in elsewhere)]
        where = [f"{Path(item.filename).name}:{item.lineno} {item.line}" for item in frames[-4:]]
        _synchronizations.append(f"{kind}: {' < '.join(reversed(where))}")

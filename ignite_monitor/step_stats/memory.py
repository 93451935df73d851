"""How much memory a process has."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def peak_memory() -> float | None:
    """The most memory that this process ever had resident, in MiB; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (2**20 if sys.platform == "darwin" else 2**10)


def resident_memory() -> float | None:
    """The memory that this process has resident now, in MiB; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

"""Environment variables that the supervisor sets for one worker, and not for the processes that the worker starts."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

MALLOC, UCX = "GLIBC_TUNABLES", "UCX_DEBUG_SIGNO"
"""The variables: glibc reads the first when the process starts, UCX, below MPI, the second when MPI's library loads."""


def take_out(names: Iterable[str]) -> None:
    """Remove the variables that the supervisor has set for this process: `names`, without those that the user set."""
    for name in names:
        value = os.environ.pop(name, None)
        if name == UCX and value is not None:
            sys.meta_path.insert(0, _WhileMpiLoads(value))


class _WhileMpiLoads:
    """Finds `mpi4py.MPI` as Python does, and loads it with UCX's variable set."""

    def __init__(self, value: str) -> None:
        self._value = value

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        if UCX in os.environ:  # the program's own
            return None
        os.environ[UCX] = self._value
        try:
            spec = find_spec(name)
            if spec is not None and spec.origin is not None:
                with suppress(OSError):  # Python's own error tells more
                    ctypes.CDLL(spec.origin, sys.getdlopenflags())
            return spec
        finally:
            del os.environ[UCX]

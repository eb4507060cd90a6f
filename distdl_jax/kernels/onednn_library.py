"""The compiled library of oneDNN's convolutions: finding and loading it, and its three XLA custom calls.

It is optional. If there is none, or it was compiled for another jaxlib or from other sources, convolutions are computed
without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jax
import jaxlib
import numpy as np

SOURCE = Path(__file__).parent / "onednn.cc"
DIRECTIONS = ("forward", "input_gradient", "weight_gradient")


def path() -> Path:
    """Return its path in this environment, if it was compiled."""
    return Path(sysconfig.get_path("platlib")) / "distdl_jax_onednn.so"


def made_for() -> str:
    """Return what it must have been compiled for: the text of its source, and jaxlib."""
    return f"{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}, jaxlib {jaxlib.__version__}"


@cache
def loaded() -> ctypes.CDLL | None:
    """Load the library once, and register its calls with JAX; None if none is usable, with a warning if one exists."""
    if not path().exists():
        return None
    try:
        library = ctypes.CDLL(str(path()))
        library.convolution_made_for.restype = ctypes.c_char_p
        library.convolution_onednn_version.restype = library.convolution_bytes_needed.restype = ctypes.c_int64
        found = library.convolution_made_for().decode()
    except (OSError, AttributeError) as error:
        found = str(error)
    if found != made_for():
        _warn(found)
        return None
    library.convolution_set_threads(ctypes.c_int64(threads()))
    for direction in DIRECTIONS:
        call = jax.ffi.pycapsule(getattr(library, f"convolution_{direction}"))
        jax.ffi.register_ffi_target(target(direction), call, platform="cpu")
    return library


def _warn(found: str) -> None:
    warnings.warn(
        f"{path()} is ignored, and convolutions don't use oneDNN: it must have been compiled for {made_for()}, but was "
        f"for {found}. Compile it again: python -m distdl_jax.onednn.",
        RuntimeWarning,
        stacklevel=3,
    )


def target(direction: str) -> str:
    """Return the name by which XLA calls the convolution in this direction."""
    return f"distdl_jax_onednn_{direction}"


def version() -> str:
    """Return oneDNN's version, such as "3.2.0"; "none" if there is no usable library."""
    library = loaded()
    if library is None:
        return "none"
    number = library.convolution_onednn_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def threads() -> int:
    """Return how many threads each of its calls uses: OMP_NUM_THREADS, or NPROC, or 1."""
    values = (os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "NPROC"))
    return next((int(text) for text in values if text.isdecimal() and int(text) > 0), 1)


def bytes_needed(direction: int, order: int, groups: int, integers: Sequence[Sequence[int]]) -> int | None:
    """Return how many bytes a call needs besides operands and result; None if oneDNN has nothing fast for it.

    - `direction`: its index in `DIRECTIONS`.
    - `order`: the memory order of activations while oneDNN computes, numbered as in onednn.cc.
    - `integers`: the shapes of x, the weight and y; stride, dilation, low and high padding; the number of sides around
      the block if x is split, otherwise 0, and for each its dimension, and the entries before the block and after it.
    """
    library = loaded()
    if library is None:
        return None
    rank, flat = len(integers[0]), np.concatenate([np.array(each, np.int64) for each in integers])
    number: int = library.convolution_bytes_needed(
        *map(ctypes.c_int64, (direction, order, groups, rank)), flat.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
    )
    return None if number < 0 else number

"""The compiled library, once for a process: what it is, and its three convolutions as XLA custom calls.

It is optional. Where there is none, or one that was compiled for another jaxlib or from other sources, convolutions are
computed without it.
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

SOURCE = Path(__file__).with_name("convolution.cc")

DIRECTIONS = ("forward", "input_gradient", "weight_gradient")


def path() -> Path:
    """Where it is in this environment, if it was compiled."""
    return Path(sysconfig.get_path("platlib")) / "distdl_jax_onednn.so"


def made_for() -> str:
    """What it must have been compiled for: the text of its source, and jaxlib."""
    return f"{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}, jaxlib {jaxlib.__version__}"


@cache
def loaded() -> ctypes.CDLL | None:
    """The library, its calls registered with JAX; None where there is none that fits. It warns of one that doesn't."""
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
        _warn_of(found)
        return None
    library.convolution_set_threads(ctypes.c_int64(threads()))
    for direction in DIRECTIONS:
        call = jax.ffi.pycapsule(getattr(library, f"convolution_{direction}"))
        jax.ffi.register_ffi_target(target(direction), call, platform="cpu")
    return library


def _warn_of(found: str) -> None:
    warnings.warn(
        f"{path()} is left out, and convolutions don't use oneDNN: it must have been compiled for {made_for()}, but "
        f"says {found}. Make it anew: python -m distdl_jax.onednn.",
        RuntimeWarning,
        stacklevel=3,
    )


def target(direction: str) -> str:
    """The name by which XLA calls the convolution in this direction."""
    return f"distdl_jax_onednn_{direction}"


def version() -> str:
    """oneDNN's version, as "3.2.0"; "none" where there is no library that fits."""
    library = loaded()
    if library is None:
        return "none"
    told = library.convolution_onednn_version()
    return f"{told // 10000}.{told // 100 % 100}.{told % 100}"


def threads() -> int:
    """How many threads each of its calls uses: OMP_NUM_THREADS, or NPROC, or 1."""
    told = (os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "NPROC"))
    return next((int(text) for text in told if text.isdecimal() and int(text) > 0), 1)


def bytes_needed(direction: int, order: int, groups: int, integers: Sequence[Sequence[int]]) -> int | None:
    """How many bytes a call needs beside its operands and its result; None where oneDNN has nothing fast for it.

    - `direction`: its place in `DIRECTIONS`.
    - `order`: in which order activations are in memory while oneDNN computes, as convolution.cc numbers them.
    - `integers`: the shapes of x, the weight and y; stride, dilation, low and high padding; the number of sides of the
      block if x lies apart, else 0, and for each its dimension, and the entries before the block and after it.
    """
    library = loaded()
    if library is None:
        return None
    rank, flat = len(integers[0]), np.concatenate([np.array(each, np.int64) for each in integers])
    told = library.convolution_bytes_needed(
        *map(ctypes.c_int64, (direction, order, groups, rank)), flat.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
    )
    return None if told < 0 else told

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
from typing import NamedTuple

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
        library.convolution_instruction_set.restype = ctypes.c_char_p
        for function in ("onednn_version", "bytes_needed", "multiplies_bfloat16"):
            getattr(library, f"convolution_{function}").restype = ctypes.c_int64
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


def instruction_set() -> str:
    """Return the processor's instruction set for which oneDNN compiles, such as "avx2"; "" without the library."""
    library = loaded()
    return library.convolution_instruction_set().decode().removeprefix("cpu_isa_") if library else ""


def multiplies_bfloat16() -> bool:
    """Return whether the processor has products of bfloat16, avx512_bf16 or AMX, and oneDNN may use them."""
    library = loaded()
    return library is not None and library.convolution_multiplies_bfloat16() != 0


def description() -> str:
    """Return a sentence that says what the compiled library can do on this processor."""
    computed = f"oneDNN {version()} computes with {instruction_set()}"
    if multiplies_bfloat16():
        return f"{computed}: bfloat16 natively, but for depthwise convolutions; float16 in float32."
    return f"{computed}: bfloat16 and float16 in float32, since it found neither avx512_bf16 nor AMX."


class Planned(NamedTuple):
    """One call as oneDNN plans it: the memory that it needs besides operands and result, and its implementation."""

    bytes: int
    implementation: str


def planned(options: Sequence[int], integers: Sequence[Sequence[int]]) -> Planned | None:
    """Return the plan of a call; None if oneDNN has nothing fast for it, or there is no library.

    - `options`: the index of the direction in `DIRECTIONS`; 1 for bfloat16, 0 for float32; whether channels are last;
      whether products may be of bfloat16; the memory order of activations while oneDNN computes, numbered as in
      onednn.cc; the number of groups.
    - `integers`: the logical shapes of x, the weight and y; stride, dilation, low and high padding.
    """
    library = loaded()
    if library is None:
        return None
    flat = np.concatenate([np.array(each, np.int64) for each in (options, [len(integers[0])], *integers)])
    name = ctypes.create_string_buffer(256)
    number: int = library.convolution_bytes_needed(
        flat.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)), name, ctypes.c_size_t(len(name))
    )
    return None if number < 0 else Planned(number, name.value.decode())

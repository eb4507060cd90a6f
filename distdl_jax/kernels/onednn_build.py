"""Compilation of the library against an installed oneDNN, and a test of what was compiled."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import SetupError
from distdl_jax.kernels import onednn, xla
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.onednn_library import SOURCE, description, made_for, path, version
from distdl_jax.kernels.problem import DIRECTIONS, Problem

_HEADER, _VERSION = "include/oneapi/dnnl/dnnl.hpp", "include/oneapi/dnnl/dnnl_version.h"

_NO_COMPILER = "There is no C++ compiler on PATH (c++, g++ or clang++); CXX can name another one."

# Tried if the library can't be compiled, to find the reason.
_NOTHING = "int nothing() { return 0; }\n"
_CALL = """\
#include "oneapi/dnnl/dnnl.hpp"
#if DNNL_VERSION_MAJOR < 3
#error "oneDNN 3 or newer is needed"
#endif
const void* call() { return dnnl_version(); }
"""

_NOT_FOUND = """\
No oneDNN 3 or newer (headers and library) was found that {compiler} can use.

It looked in {places}, and says:

{complaint}

Do one of these, and try again:

  * x86-64 Linux:     python -m pip install 'distdl_jax[onednn]'
  * Debian 13:        sudo apt install g++ libdnnl-dev
  * conda:            conda install -c conda-forge onednn
  * macOS:            brew install onednn
  * elsewhere:        set ONEDNN_ROOT to the folder with its include and lib"""


def main() -> int:
    """Build and test, and return the exit status."""
    try:
        library = build()
        try:
            ctypes.CDLL(str(library))
            _try()
        except (SetupError, OSError):
            library.unlink()  # programs run better without it
            raise
    except OSError as error:
        print(f"The compiled library can't be loaded: {error}", file=sys.stderr)
        return 1
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"-- {library} is ready: {description()}")
    return 0


def _try() -> None:
    """Raise `SetupError` unless a convolution, and its gradients, equal XLA's in each dtype and order of dimensions."""
    window, draw = Placement((1, 2), ((1, 1), (0, 1)), (1, 1)), np.random.default_rng(0).standard_normal
    first = Problem((2, 6, 9, 8), (20, 3, 3, 2), window, 2, "float32")
    shapes = {"x": first.x, "weight": first.weight, "dy": first.y}
    arrays = {name: jnp.asarray(draw(shape), "bfloat16").astype("float32") for name, shape in shapes.items()}
    last = {"x": (0, 2, 3, 1), "weight": (2, 3, 1, 0), "dy": (0, 2, 3, 1)}
    names = ("x", "weight", "dy"), ("weight", "dy", "x"), ("x", "dy", "weight")
    for direction, (one, other, result) in zip(DIRECTIONS, names, strict=True):
        expected = getattr(xla, direction)(first, arrays[one], arrays[other])
        for (dtype, tolerance), channels_last in product((("float32", 1e-4), ("bfloat16", 1e-2)), (False, True)):
            problem = replace(first, dtype=dtype, channels_last=channels_last)
            what = f"{direction}: {problem.x} by {problem.weight}, {dtype}{', channels last' if channels_last else ''}"
            if not onednn.can_compute(problem, direction):
                if dtype == "float32":
                    raise SetupError(f"oneDNN {version()} can't compute a small convolution ({what}).")
                continue
            given = (arrays[name].transpose(last[name] if channels_last else range(4)) for name in (one, other))
            ours = getattr(onednn, direction)(problem, *(array.astype(dtype) for array in given))
            xlas = jnp.transpose(expected, last[result]) if channels_last else expected
            if not jnp.allclose(ours.astype("float32"), xlas, rtol=tolerance, atol=tolerance):
                raise SetupError(f"The result of oneDNN {version()} differs from XLA's ({what}).")


def build() -> Path:
    """Compile the library into this environment, and return its path.

    **Raises:** `SetupError` if there is no C++ compiler or no oneDNN, or the environment can't be written.
    """
    compiler = _compiler()
    if not compiler:
        raise SetupError(_NO_COMPILER)
    named = os.environ.get("ONEDNN_ROOT", "")
    if named and not (Path(named) / _HEADER).exists():
        raise SetupError(f"The environment variable ONEDNN_ROOT (={named!r}) must be a folder with {_HEADER}.")
    places = list(_places(named))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path().name
        complaints = []
        for _, flags in places:
            complaint = _compile(compiler, SOURCE, flags, made)
            if not complaint:
                _put_in_place(made)
                return path()
            complaints.append(complaint)
        raise SetupError(_why(compiler, places, complaints, Path(folder)))


def _why(compiler: str, places: list[tuple[str, list[str]]], complaints: list[str], folder: Path) -> str:
    """Return why the library can't be compiled: because of the compiler, the candidates found, or our source."""
    tried, made = folder / "tried.cc", folder / "tried.so"
    tried.write_text(_NOTHING)
    if complaint := _compile(compiler, tried, [], made):
        return f"The C++ compiler ({compiler}) doesn't work: {complaint}"
    tried.write_text(_CALL)
    calls = [_compile(compiler, tried, flags, made) for _, flags in places]
    for (place, _), call, complaint in zip(places, calls, complaints, strict=True):
        if not call:
            return f"{compiler} can't compile {SOURCE} with the oneDNN in {place}: {complaint}"
    # The first place has the headers; the compiler's own folders, which come last, may have nothing.
    listed = ", ".join(place for place, _ in places)
    return _NOT_FOUND.format(compiler=compiler, complaint=calls[0], places=listed)


def can_be_tried() -> bool:
    """Return whether a C++ compiler and headers of oneDNN 3 or newer exist, without compiling anything."""
    named = os.environ.get("ONEDNN_ROOT", "")
    headers = (Path(root) / _VERSION for root in (*_roots(named), *(() if named else ("/usr",))))
    found = any(re.search(r"MAJOR +([3-9]|\d\d)", each.read_text()) for each in headers if each.exists())
    return found and shutil.which(shlex.split(_compiler() or "c++")[0]) is not None


def _compiler() -> str:
    """Return the command of the C++ compiler; "" if there is none."""
    return os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "")


def _roots(named: str) -> Iterator[str]:
    others = sys.prefix, os.environ.get("CONDA_PREFIX"), "/opt/homebrew", "/usr/local"
    yield from dict.fromkeys(filter(None, (named,) if named else others))


def _places(named: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the places where oneDNN may be, with the compiler's flags for each; the compiler's own folders last."""
    for root in _roots(named):
        if (Path(root) / _HEADER).exists():
            folders = [f"{root}/{name}" for name in ("lib", "lib64") if (Path(root) / name).is_dir()]
            found = [flag for folder in folders for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
            yield root, [f"-I{root}/include", *found, "-ldnnl"]
    if not named:
        yield "the compiler's own folders", ["-ldnnl"]


def _compile(compiler: str, source: Path, flags: list[str], made: Path) -> str:
    """Compile, and return the compiler's error message, empty if it succeeded."""
    result = subprocess.run(
        [
            *shlex.split(compiler),
            *("-std=c++17", "-O2", "-shared", "-fPIC"),
            *(f"-I{jax.ffi.include_dir()}", f'-DDISTDL_JAX_MADE_FOR="{made_for()}"', str(source), "-o", str(made)),
            *(*flags, *(["-ldl"] if sys.platform.startswith("linux") else [])),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = result.stderr.splitlines()
    errors = [line for line in lines if any(word in line for word in ("error", "cannot find", "not found"))] or lines
    return "\n".join(errors[:5]) or "no message" if result.returncode else ""


def _put_in_place(made: Path) -> None:
    # Into another file first: a running worker may have the old one mapped.
    copy = path().with_suffix(".part")
    try:
        shutil.copy(made, copy)
        os.replace(copy, path())
    except OSError as error:
        raise SetupError(f"The compiled library can't be written to {path()}: {error}.") from error

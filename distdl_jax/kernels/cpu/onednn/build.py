"""Compilation of the library against the oneDNN that is found."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from distdl_jax.errors import SetupError
from distdl_jax.kernels.cpu.onednn.shared_library import SOURCE, made_for, path

_HEADER = "include/oneapi/dnnl/dnnl.hpp"

_NOT_FOUND = """\
No oneDNN 3 or newer (headers and library) was found that a C++ compiler can use: {compiler} failed with

{complaint}

Looked in {places}. Do one of these, and try again:

  * x86-64 Linux:     python -m pip install 'distdl_jax[onednn]'
  * Debian 13:        sudo apt install g++ libdnnl-dev
  * conda:            conda install -c conda-forge onednn
  * macOS:            brew install onednn
  * elsewhere:        set ONEDNN_ROOT to the folder that has its include and lib"""


def build() -> Path:
    """Compile the library into this environment, and return its path.

    **Raises:** `SetupError` where there is no C++ compiler or no oneDNN, or the environment can't be written.
    """
    compiler = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "")
    if not compiler:
        raise SetupError("There is no C++ compiler on PATH (c++, g++ or clang++); CXX can name another one.")
    named = os.environ.get("ONEDNN_ROOT", "")
    if named and not (Path(named) / _HEADER).exists():
        raise SetupError(f"The environment variable ONEDNN_ROOT (={named!r}) must be a folder that has {_HEADER}.")
    complaints, places = [], []
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path().name
        for place, flags in _places(named):
            places.append(place)
            complaint = _compile(compiler, flags, made)
            if not complaint:
                _put_in_place(made)
                return path()
            complaints.append(complaint)
    # The first place has the headers; the compiler's own folders, which come last, may have nothing.
    raise SetupError(_NOT_FOUND.format(compiler=compiler, complaint=complaints[0], places=", ".join(places)))


def _places(named: str) -> Iterator[tuple[str, list[str]]]:
    """Yield where oneDNN may be, with the compiler's flags for it; the compiler's own folders last."""
    others = sys.prefix, os.environ.get("CONDA_PREFIX"), "/opt/homebrew", "/usr/local"
    roots = (named,) if named else others
    for root in dict.fromkeys(filter(None, roots)):
        if (Path(root) / _HEADER).exists():
            folders = [f"{root}/{name}" for name in ("lib", "lib64") if (Path(root) / name).is_dir()]
            found = [flag for folder in folders for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
            yield root, [f"-I{root}/include", *found]
    if not named:
        yield "the compiler's own folders", []


def _compile(compiler: str, flags: list[str], made: Path) -> str:
    """Compile, and return the compiler's complaint, empty if there was none."""
    result = subprocess.run(
        [
            *shlex.split(compiler),
            *("-std=c++17", "-O2", "-shared", "-fPIC"),
            *(f"-I{jax.ffi.include_dir()}", f'-DDISTDL_JAX_MADE_FOR="{made_for()}"', str(SOURCE), "-o", str(made)),
            *(*flags, "-ldnnl", *(["-ldl"] if sys.platform.startswith("linux") else [])),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = result.stderr.splitlines()
    errors = [line for line in lines if "error" in line] or lines
    return "\n".join(errors[:5]) or "no message" if result.returncode else ""


def _put_in_place(made: Path) -> None:
    # Into a file of its own first: a worker that runs may have the old one mapped.
    beside = path().with_suffix(".part")
    try:
        shutil.copy(made, beside)
        os.replace(beside, path())
    except OSError as error:
        raise SetupError(f"The compiled library can't be written to {path()}: {error}.") from error

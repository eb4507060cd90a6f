"""The build backend of distdl_jax: setuptools, and before it a look at what mpi4jax will need.

mpi4jax has no wheels, so pip compiles it, and where MPI is missing the compiler's traceback is all that a user sees.
pip asks a package for its metadata before it builds what that package depends on. That is when this backend looks,
and what it finds missing it names in a few lines, with the commands that mend it.

Every hook but the two `prepare_metadata` ones and `build_editable` is setuptools' own: `python -m build` needs no MPI.
DISTDL_JAX_SKIP_MPI_CHECK=1 turns the check off.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (a backend is its module's functions; three of them are replaced below)

_SKIP = "DISTDL_JAX_SKIP_MPI_CHECK"

_NO_MPI = """\
distdl_jax needs MPI, and no MPI compiler was found: {looked}.
(pip compiles mpi4jax, which distdl_jax stands on, with MPI's compiler wrapper.)
Nothing was installed. Do one of these, then run the same pip command again:

  * from PyPI, into an environment that is active:
        python -m pip install mpich
  * from the system:
        sudo apt install openmpi-bin libopenmpi-dev     (Debian, Ubuntu)
        brew install open-mpi                           (macOS)
  * on a cluster, load its MPI:
        module load openmpi                             (`module avail mpi` lists the names)
  * if the wrapper is elsewhere or has another name, give its full path:
        export MPI4JAX_BUILD_MPICC=/path/to/mpicc

In a checkout, `make venv` does all of it. Every way: docs/install.md."""

_NOT_ACTIVE = """\
distdl_jax needs MPI's compiler wrapper on PATH. It is installed, as {mpicc}, but that directory is not on PATH.
Nothing was installed. Activate the environment, then run the same pip command again:

    source {activate}

Every way: docs/install.md."""

_CANNOT_COMPILE = """\
distdl_jax needs mpi4jax, which pip compiles, and {mpicc} can't compile it here.
Nothing was installed. A small C++ program that includes {headers} failed with:

{errors}

Usual cures, then the same pip command again:

  * no C++ compiler:    sudo apt install g++           xcode-select --install (macOS)
  * no Python.h:        sudo apt install python3-dev   (the one for this Python: {python})
  * no mpi.h:           {mpicc} is not a compiler wrapper of a complete MPI; install its development package

Every way: docs/install.md."""

_NO_CUDA_HEADERS = """\
mpi4jax, which distdl_jax stands on, would fail to build here: it found CUDA in {cuda} and so would build its
CUDA bridge, but cuda_runtime.h is not there.
Nothing was installed. Run one of these instead:

  * workers on CPUs only (an empty directory as CUDA_ROOT turns the CUDA bridge off):
        CUDA_ROOT=$(mktemp -d) python -m pip install .
  * workers on GPUs, with a CUDA toolkit that has its headers:
        CUDA_ROOT=/path/to/cuda python -m pip install .

Every way: docs/install.md."""


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Check for MPI, then let setuptools write the metadata."""
    _check()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Any = None) -> str:
    """Check for MPI, then let setuptools write the metadata."""
    _check()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build an editable install by a path in a .pth file: type checkers don't follow setuptools' usual import hook."""
    settings = {"editable_mode": "compat", **(config_settings or {})}
    return build_meta.build_editable(wheel_directory, settings, metadata_directory)


def _check() -> None:
    """End the process with a sentence if mpi4jax is still to be built and can't be."""
    if os.environ.get(_SKIP, "") not in ("", "0") or _mpi4jax_is_installed():
        return
    complaint = complain()
    if complaint is not None:
        # SystemExit, not an exception: pip then shows these lines and no traceback.
        print(complaint, file=sys.stderr, flush=True)
        raise SystemExit(1)


def complain() -> str | None:
    """What keeps mpi4jax from building here, and the cure; None if nothing does."""
    # mpi4jax's own rule (its setup.py): MPI4JAX_BUILD_MPICC, an existing file, or else `mpicc` on PATH.
    named = os.environ.get("MPI4JAX_BUILD_MPICC")
    mpicc = shutil.which("mpicc") if named is None else named
    if mpicc is None:
        scripts = sysconfig.get_path("scripts")
        if os.path.exists(os.path.join(scripts, "mpicc")):
            return _NOT_ACTIVE.format(mpicc=os.path.join(scripts, "mpicc"), activate=os.path.join(scripts, "activate"))
        return _NO_MPI.format(looked="`mpicc` is not on PATH")
    if not os.path.exists(mpicc):
        return _NO_MPI.format(looked=f"MPI4JAX_BUILD_MPICC is {mpicc!r}, which is not a file")

    # Where pip isolates the build, sys.prefix still is the target environment, and so is its Python.h.
    headers = ["mpi.h", "Python.h", "string"]
    errors = _compile_errors(mpicc, headers, [sysconfig.get_path("include"), sysconfig.get_path("platinclude")])
    if errors is not None:
        return _CANNOT_COMPILE.format(
            mpicc=mpicc, headers=", ".join(headers), errors=errors, python=sys.version.split()[0]
        )

    cuda = _cuda_root()
    if cuda is not None and _compile_errors(mpicc, ["cuda_runtime.h"], [os.path.join(cuda, "include")]) is not None:
        return _NO_CUDA_HEADERS.format(cuda=cuda)
    return None


def _mpi4jax_is_installed() -> bool:
    """Whether the target environment has mpi4jax; pip hides that environment's packages from a backend."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if sys.prefix == sys.base_prefix:
        paths.append(site.getusersitepackages())
    return any(True for _ in importlib.metadata.distributions(name="mpi4jax", path=paths))


def _compile_errors(mpicc: str, headers: list[str], include: list[str]) -> str | None:
    """The first lines of the compiler's complaint about a C++ program with these headers; None if it compiles."""
    with tempfile.TemporaryDirectory() as directory:
        source = os.path.join(directory, "probe.cpp")
        with open(source, "w", encoding="utf-8") as file:
            file.writelines(f"#include <{header}>\n" for header in headers)
            file.write("int main() { return 0; }\n")
        flags = ["-std=c++17", "-fsyntax-only", *dict.fromkeys(f"-I{directory}" for directory in include)]
        try:
            done = subprocess.run(
                [*shlex.split(mpicc), *flags, source], capture_output=True, text=True, timeout=120, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"    {error}"
    if done.returncode == 0:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines()
    return "\n".join(f"    {line}" for line in lines[:6]) or f"    exit status {done.returncode}"


def _cuda_root() -> str | None:
    """The CUDA directory for which mpi4jax would build its CUDA bridge (its setup.py's rule), None if none."""
    nvcc = shutil.which("nvcc")
    named = os.environ.get("CUDA_PATH") or os.environ.get("CUDA_ROOT") or ""
    if named and os.path.exists(named):
        root = named
    elif nvcc is not None:
        root = os.path.normpath(os.path.join(os.path.dirname(nvcc), ".."))
    else:
        root = "/usr/local/cuda"
    complete = os.path.isdir(os.path.join(root, "include")) and any(
        os.path.isdir(os.path.join(root, lib)) for lib in ("lib64", "lib")
    )
    return root if complete else None

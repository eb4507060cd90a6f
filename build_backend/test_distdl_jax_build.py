"""The build backend says what is missing before pip compiles anything, and shows no traceback."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# What pip runs: a hook in a fresh process, from the root of the source tree.
HOOK = "import sys; sys.path.insert(0, sys.argv[1]); import distdl_jax_build as b; b.{hook}(sys.argv[2])"
# As in an environment without mpi4jax: the one that runs this test has it.
WITHOUT_MPI4JAX = HOOK.replace("b.{hook}", "b._mpi4jax_is_installed = lambda: False; b.{hook}")


def run_hook(tmp_path: Path, path: Path, hook: str, code: str = WITHOUT_MPI4JAX, **environment: str):
    """Run `hook` with `path` as the whole PATH, in an empty project."""
    pyproject = '[project]\nname = "probe"\nversion = "0"\n[tool.setuptools]\npackages = []\n'
    (tmp_path / "pyproject.toml").write_text(pyproject)
    # Neither a CUDA toolkit nor an MPI of the machine that runs the tests may decide.
    environment = {"PATH": str(path), "CUDA_ROOT": str(tmp_path), **environment}
    arguments = [sys.executable, "-c", code.format(hook=hook), str(HERE), str(tmp_path)]
    return subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)


def make_mpicc(directory: Path, script: str) -> Path:
    """Write a stand-in for MPI's compiler wrapper; `$*` holds its arguments, of which the last is the program."""
    directory.mkdir(exist_ok=True)
    mpicc = directory / "mpicc"
    mpicc.write_text(f"#!/bin/sh\nfor program; do :; done\n{script}\n")
    mpicc.chmod(mpicc.stat().st_mode | stat.S_IXUSR)
    return mpicc


@pytest.fixture
def bin_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    return directory


@pytest.fixture(params=["prepare_metadata_for_build_wheel", "prepare_metadata_for_build_editable"])
def hook(request: pytest.FixtureRequest) -> str:
    return request.param


def assert_refused(done: subprocess.CompletedProcess[str], *sentences: str) -> None:
    assert done.returncode == 1
    for sentence in sentences:
        assert sentence in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "docs/install.md" in done.stderr


def test_named_compiler_that_is_not_there(tmp_path, bin_directory, hook):
    done = run_hook(tmp_path, bin_directory, hook, MPI4JAX_BUILD_MPICC="/nowhere/mpicc")
    assert_refused(done, "no MPI compiler was found", "'/nowhere/mpicc'", "pip install mpich", "module load")


def test_no_mpicc_on_path(tmp_path, bin_directory, hook):
    done = run_hook(tmp_path, bin_directory, hook)
    # Where PyPI's MPI is installed into the environment that runs this, the cure is to activate it.
    installed = os.path.exists(os.path.join(os.path.dirname(sys.executable), "mpicc"))
    assert_refused(done, "source " if installed else "pip install mpich")


def test_compiler_that_does_not_compile(tmp_path, bin_directory, hook):
    make_mpicc(bin_directory, "echo 'cc: cannot execute cc1plus' >&2; exit 1")
    done = run_hook(tmp_path, bin_directory, hook)
    assert_refused(done, "can't compile it here", "cannot execute cc1plus", "apt install g++", "python3-dev")


def test_cuda_without_headers(tmp_path, bin_directory, hook):
    make_mpicc(bin_directory, 'while read -r line; do case $line in *cuda*) exit 1 ;; esac; done <"$program"')
    for name in ("include", "lib64"):
        (tmp_path / "cuda" / name).mkdir(parents=True)
    done = run_hook(tmp_path, bin_directory, hook, CUDA_ROOT=str(tmp_path / "cuda"))
    assert_refused(done, "cuda_runtime.h is not there", "CUDA_ROOT=$(mktemp -d)")


def test_all_is_there(tmp_path, bin_directory, hook):
    make_mpicc(bin_directory, "exit 0")
    done = run_hook(tmp_path, bin_directory, hook)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("probe*.dist-info"))


def test_check_can_be_turned_off(tmp_path, bin_directory, hook):
    done = run_hook(tmp_path, bin_directory, hook, DISTDL_JAX_SKIP_MPI_CHECK="1")
    assert done.returncode == 0, done.stderr


def test_installed_mpi4jax_needs_no_compiler(tmp_path, bin_directory, hook):
    pytest.importorskip("mpi4jax")
    done = run_hook(tmp_path, bin_directory, hook, code=HOOK)
    assert done.returncode == 0, done.stderr


def test_building_a_wheel_needs_no_mpi(tmp_path, bin_directory):
    done = run_hook(tmp_path, bin_directory, "build_wheel")
    assert done.returncode == 0, done.stderr

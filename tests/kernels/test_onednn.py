"""oneDNN's convolutions: how they are compiled, found and refused. What they compute: test_convolution.py."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from distdl_jax.errors import SetupError
from distdl_jax.kernels import onednn
from distdl_jax.kernels import onednn_build as build
from distdl_jax.kernels import onednn_library as shared_library
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.problem import Problem

WINDOW = Placement((1, 1), ((0, 0), (0, 0)), (1, 1))
needs_it = pytest.mark.skipif(shared_library.version() == "none", reason="oneDNN's convolutions are not compiled here")


def test_without_it(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_library, "path", lambda: tmp_path / "none.so")
    assert shared_library.loaded.__wrapped__() is None


@needs_it
def test_one_that_was_compiled_for_something_else_is_left_out_with_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_library, "made_for", lambda: "another jaxlib")
    with pytest.warns(RuntimeWarning, match="must have been compiled for another jaxlib, but was for .*, jaxlib"):
        assert shared_library.loaded.__wrapped__() is None
    monkeypatch.setattr(shared_library, "path", lambda: tmp_path / "broken.so")
    (tmp_path / "broken.so").write_text("no library")
    with pytest.warns(RuntimeWarning, match="Compile it again: python -m distdl_jax.onednn"):
        assert shared_library.loaded.__wrapped__() is None


@pytest.mark.parametrize(
    ("environment", "count"),
    [({}, 1), ({"NPROC": "3"}, 3), ({"NPROC": "3", "OMP_NUM_THREADS": "2"}, 2), ({"OMP_NUM_THREADS": "2,1"}, 1)],
)
def test_how_many_threads(monkeypatch, environment, count):
    for name in ("NPROC", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert shared_library.threads() == count


def test_a_folder_without_it_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("ONEDNN_ROOT", str(tmp_path))
    assert build.main() == 1
    error = capsys.readouterr().err
    assert error.startswith(f"The environment variable ONEDNN_ROOT (={str(tmp_path)!r}) must be a folder with inc")


@needs_it
def test_it_is_compiled_and_computes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "path", lambda: tmp_path / "new.so")
    assert build.main() == 0
    new = ctypes.CDLL(str(tmp_path / "new.so"))
    new.convolution_made_for.restype = ctypes.c_char_p
    assert new.convolution_made_for().decode() == shared_library.made_for()
    assert f"is ready: oneDNN {shared_library.version()}" in capsys.readouterr().out


@needs_it
def test_the_memory_of_a_call_is_allocated_by_xla():
    problem = Problem((4, 32, 16, 16), (32, 32, 3, 3), WINDOW, 1, "float32")
    x, weight = jnp.ones(problem.x, "float32"), jnp.ones(problem.weight, "float32")
    program = jax.jit(lambda x, weight: onednn.forward(problem, x, weight)).lower(x, weight).compile()
    assert program.memory_analysis().temp_size_in_bytes >= onednn.memory(problem, "forward") > x.nbytes


needs_a_compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("c++")), reason="there is no C++ compiler"
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return a folder for oneDNN's include and lib, which alone is looked in."""
    monkeypatch.setenv("ONEDNN_ROOT", str(tmp_path))
    return tmp_path


def make_headers(root: Path, version: int) -> None:
    folder = root / "include" / "oneapi" / "dnnl"
    folder.mkdir(parents=True)
    (folder / "dnnl_version.h").write_text(f"#define DNNL_VERSION_MAJOR {version}\n#define DNNL_VERSION_MINOR 9\n")
    (folder / "dnnl.hpp").write_text('#include "dnnl_version.h"\nextern "C" const int* dnnl_version();\n')


def make_library(root: Path) -> None:
    (root / "lib").mkdir()
    (root / "dnnl.c").write_text("const int* dnnl_version(void) { return 0; }\n")
    command = ["cc", "-shared", "-fPIC", "-o", str(root / "lib" / "libdnnl.so"), str(root / "dnnl.c")]
    subprocess.run(command, check=True)


def complaint() -> str:
    with pytest.raises(SetupError) as raised:
        build.build()
    return str(raised.value)


def test_without_a_compiler_that_works(monkeypatch, tmp_path, root):
    make_headers(root, 3)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not build.can_be_tried()
    assert complaint().startswith("There is no C++ compiler on PATH (c++, g++ or clang++); CXX ")
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'internal error: no disk' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert complaint() == f"The C++ compiler ({compiler}) doesn't work: internal error: no disk"


@needs_a_compiler
def test_headers_without_a_library_or_of_a_version_that_is_too_old(root):
    nothing = "No oneDNN 3 or newer (headers and library) was found that "
    make_headers(root, 3)
    text = complaint()
    assert text.startswith(nothing)
    assert "dnnl" in text.split("and says:")[1].split("Do one")[0] and "libdnnl-dev" in text
    shutil.rmtree(root / "include")
    make_headers(root, 2)
    make_library(root)
    text = complaint()
    assert text.startswith(nothing) and "oneDNN 3 or newer is needed" in text
    assert not build.can_be_tried()


@needs_a_compiler
def test_a_source_that_does_not_compile_is_not_taken_for_a_missing_library(root):
    make_headers(root, 3)
    make_library(root)
    assert build.can_be_tried()
    text = complaint()
    assert f"can't compile {build.SOURCE} with the oneDNN in {root}: " in text and "No oneDNN" not in text


@needs_a_compiler
def test_the_complaint_is_that_of_where_the_headers_are(tmp_path, monkeypatch):
    """The compiler's own folders, which are tried last, have no headers, and to say so would mislead."""
    make_headers(tmp_path, 2)
    monkeypatch.delenv("ONEDNN_ROOT", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert f"It looked in {tmp_path}, " in complaint() and "oneDNN 3 or newer is needed" in complaint()


@needs_a_compiler
def test_what_can_not_be_loaded_is_not_left_behind(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "build", lambda: tmp_path / "made.so")
    (tmp_path / "made.so").write_text("no library")
    assert build.main() == 1
    assert capsys.readouterr().err.startswith("The compiled library can't be loaded: ")
    assert not (tmp_path / "made.so").exists()

"""What is said where oneDNN's convolutions can't be compiled: by the compiler that is here, of headers made for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distdl_jax import onednn as command
from distdl_jax.errors import SetupError
from distdl_jax.nn.kernels.cpu.onednn import build

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


def test_no_compiler(monkeypatch, root):
    make_headers(root, 3)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not build.can_be_tried()
    assert complaint().startswith("There is no C++ compiler on PATH (c++, g++ or clang++); CXX ")


def test_a_compiler_that_fails(monkeypatch, tmp_path, root):
    make_headers(root, 3)
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'internal error: no disk' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert complaint() == f"The C++ compiler ({compiler}) doesn't work: internal error: no disk"


@needs_a_compiler
def test_headers_without_a_library(root):
    make_headers(root, 3)
    text = complaint()
    assert text.startswith("No oneDNN 3 or newer (headers and library) was found that ")
    assert "dnnl" in text.split("and says:")[1].split("Do one")[0] and "libdnnl-dev" in text


@needs_a_compiler
def test_a_version_that_is_too_old(root):
    make_headers(root, 2)
    make_library(root)
    text = complaint()
    assert text.startswith("No oneDNN 3 or newer (headers and library) was found that ")
    assert "oneDNN 3 or newer is needed" in text
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
    monkeypatch.setattr(command, "build", lambda: tmp_path / "made.so")
    (tmp_path / "made.so").write_text("no library")
    assert command.main() == 1
    assert capsys.readouterr().err.startswith("What was compiled can't be loaded: ")
    assert not (tmp_path / "made.so").exists()

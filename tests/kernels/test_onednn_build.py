"""What is said where oneDNN's convolutions can't be compiled."""

import sys

import pytest

from distdl_jax.errors import SetupError
from distdl_jax.kernels.cpu.onednn.build import build


def test_the_complaint_is_that_of_where_the_headers_are(tmp_path, monkeypatch):
    """The compiler's own folders, which are tried last, have no headers, and to say so would mislead."""
    header = tmp_path / "include/oneapi/dnnl/dnnl.hpp"
    header.parent.mkdir(parents=True)
    header.touch()
    compiler = tmp_path / "c++"
    script = f'case "$*" in *{tmp_path}/include*) echo "error: in it" ;; *) echo "error: none" ;; esac'
    compiler.write_text(f"#!/bin/sh\n{script} >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv("ONEDNN_ROOT", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(SetupError, match="failed with\n\nerror: in it\n\n"):
        build()

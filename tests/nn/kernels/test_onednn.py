"""oneDNN's convolutions: how they are compiled, found and refused. What they compute: test_convolution.py."""

import ctypes

import jax
import jax.numpy as jnp
import pytest

from distdl_jax import onednn as command
from distdl_jax.nn.kernels.cpu.onednn import build, convolution
from distdl_jax.nn.kernels.geometry import Placement
from distdl_jax.nn.kernels.problem import Problem
from distdl_jax.watchdog.launch import onednn_library as shared_library

WINDOW = Placement((1, 1), ((0, 0), (0, 0)), (1, 1))
needs_it = pytest.mark.skipif(shared_library.version() == "none", reason="oneDNN's convolutions are not compiled here")


def test_without_it(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_library, "path", lambda: tmp_path / "none.so")
    assert shared_library.loaded.__wrapped__() is None


@needs_it
def test_one_that_was_compiled_for_something_else_is_left_out_with_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_library, "made_for", lambda: "another jaxlib")
    with pytest.warns(RuntimeWarning, match="must have been compiled for another jaxlib, but says .*, jaxlib"):
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
    assert command.main() == 1
    error = capsys.readouterr().err
    assert error.startswith(f"The environment variable ONEDNN_ROOT (={str(tmp_path)!r}) must be a folder that has inc")


@needs_it
def test_it_is_compiled_and_computes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "path", lambda: tmp_path / "new.so")
    assert command.main() == 0
    new = ctypes.CDLL(str(tmp_path / "new.so"))
    new.convolution_made_for.restype = ctypes.c_char_p
    assert new.convolution_made_for().decode() == shared_library.made_for()
    assert f"is ready: oneDNN {shared_library.version()}" in capsys.readouterr().out


@needs_it
def test_the_memory_of_a_call_is_allocated_by_xla():
    problem = Problem((4, 32, 16, 16), (32, 32, 3, 3), WINDOW, 1, "float32")
    x, weight = jnp.ones(problem.x, "float32"), jnp.ones(problem.weight, "float32")
    program = jax.jit(lambda x, weight: convolution.forward(problem, x, weight)).lower(x, weight).compile()
    assert program.memory_analysis().temp_size_in_bytes >= convolution.memory(problem, "forward") > x.nbytes

"""The options of XLA by `dj.jit`, in workers that `python -m distdl_jax` starts, and where a user says otherwise."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import compiler_options
from distdl_jax.compiler_options import ONEDNN, OPTIONS, convolves_by_onednn, flags_for, known_options, options_for
from distdl_jax.kernels.cpu.onednn.shared_library import version
from distdl_jax.launch.worker_environment import worker_environment
from distdl_jax.settings import Settings

needs_it = pytest.mark.skipif(not known_options(), reason="this jaxlib has no oneDNN of its own")
x, weight = (
    jnp.asarray(np.random.default_rng(0).normal(size=s), "float32") for s in ((1, 4, 8, 8, 8), (4, 4, 3, 3, 3))
)


def convolution(x, weight):
    return lax.conv_general_dilated(x, weight, (1, 1, 1), "SAME")


@pytest.fixture
def without(monkeypatch, tmp_path):
    """Where our own calls of oneDNN are not compiled, and JAX keeps no compiled programs."""
    monkeypatch.setattr(compiler_options, "OWN_ONEDNN", tmp_path / "none.so")
    monkeypatch.setattr(compiler_options, "current_settings", lambda: Settings(onednn="off"))
    keeps = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", keeps)


def calls_onednn(jitted, *args):
    return "__onednn" in jitted.lower(*args).compile().as_text()


def test_it_is_asked_of_what_xla_knows():
    """An option that it doesn't know is an error; a flag would end the process."""
    jaxlib = tuple(int(part) for part in jax.lib.__version__.split(".")[:2])
    assert known_options() in ({}, OPTIONS) and (jaxlib >= (0, 11) or known_options() == {})
    jax.jit(lambda x: x + 1, compiler_options=dict(known_options())).lower(x).compile()


@pytest.mark.parametrize(("jaxlib", "known"), [("0.10.2", {}), ("0.12.0.1", None), ("none at all", {})])
def test_the_version_decides_first(jaxlib, known, monkeypatch):
    monkeypatch.setattr(compiler_options, "version", lambda package: jaxlib)
    found = compiler_options.known_options.__wrapped__()
    assert found == known if known is not None else found in ({}, OPTIONS)


@needs_it
@pytest.mark.simulated(1)
def test_dj_jit_asks_for_it_and_jax_jit_does_not(without):
    assert calls_onednn(dj.jit(convolution), x, weight)
    assert not calls_onednn(jax.jit(convolution), x, weight)
    np.testing.assert_allclose(dj.jit(convolution)(x, weight), convolution(x, weight), rtol=0, atol=1e-4)


@needs_it
@pytest.mark.simulated(1)
def test_what_is_given_to_dj_jit_wins(without):
    assert not calls_onednn(dj.jit(convolution, compiler_options={ONEDNN: False}), x, weight)
    assert calls_onednn(dj.jit(convolution, compiler_options={"xla_cpu_enable_fast_min_max": True}), x, weight)


@needs_it
@pytest.mark.simulated(1)
def test_a_setting_turns_it_off(monkeypatch, without):
    monkeypatch.setattr(compiler_options, "current_settings", lambda: Settings(onednn="off", compiler_options=False))
    assert options_for("cpu") == {} and not calls_onednn(dj.jit(convolution), x, weight)


@needs_it
def test_none_where_it_would_be_of_no_use_or_wrong(monkeypatch, without, tmp_path):
    assert options_for("gpu") == {} and options_for("cpu") == OPTIONS
    jax.config.update("jax_enable_compilation_cache", True)
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert options_for("cpu") == {}  # XLA can't write programs that call oneDNN
    jax.config.update("jax_compilation_cache_dir", folder)


@pytest.mark.skipif(version() == "none", reason="oneDNN's convolutions are not compiled here")
def test_not_where_our_own_calls_are_compiled(without, monkeypatch):
    monkeypatch.setattr(compiler_options, "current_settings", lambda: Settings())
    assert options_for("cpu") == {}


@needs_it
def test_flags_of_the_user_win_and_the_log_says_so(monkeypatch, caplog, without):
    monkeypatch.setenv("XLA_FLAGS", f"--{ONEDNN}=false")
    compiler_options._tell_once.cache_clear()
    with caplog.at_level("INFO", "distdl_jax"):
        assert options_for("cpu") == {}
    assert f"XLA_FLAGS has {ONEDNN}, which stays as it is." in caplog.text
    assert flags_for({"XLA_FLAGS": f"--{ONEDNN}=false"}) == f"--{ONEDNN}=false"
    assert flags_for({"XLA_FLAGS": "--xla_disable_hlo_passes=cse"}) == "--xla_disable_hlo_passes=cse"
    assert not convolves_by_onednn()
    monkeypatch.setenv("XLA_FLAGS", f"--{ONEDNN}=true")
    assert convolves_by_onednn() and options_for("cpu") == {}


FLAGS = f"--{ONEDNN}=true --xla_disable_hlo_passes=onednn-ops-rewriter"


@needs_it
def test_workers_get_it_by_flags(without):
    assert worker_environment({}, 2, 2, bound=False)["XLA_FLAGS"] == FLAGS
    given = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    assert worker_environment(given, 2, 2, bound=False)["XLA_FLAGS"] == f"--xla_cpu_enable_fast_math=false {FLAGS}"
    assert "XLA_FLAGS" not in worker_environment({}, 2, 2, bound=False, computes_on_cpu=False)
    for name, value in (("DISTDL_JAX_COMPILER_OPTIONS", "0"), ("JAX_COMPILATION_CACHE_DIR", "/tmp/kept")):
        assert "XLA_FLAGS" not in worker_environment({name: value}, 2, 2, bound=False)


@needs_it
def test_a_job_has_it_in_jax_jit_too():
    program = "import os, jax; print(os.environ['XLA_FLAGS'], jax.jit(lambda x: x + 1)(1))"
    command = [sys.executable, "-m", "distdl_jax", "-c", program]
    environment = {**os.environ, "DISTDL_JAX_ONEDNN": "off"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)
    assert found.returncode == 0 and FLAGS in found.stdout, found.stderr


@needs_it
@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache")
def test_softmax_keeps_nan():
    """XLA's softmax by oneDNN doesn't; should this fail without the second option, it may go."""
    nan = x.ravel().at[3].set(jnp.nan)
    assert np.isnan(jax.jit(jax.nn.softmax, compiler_options=dict(OPTIONS))(nan)).all()
    assert not np.isnan(jax.jit(jax.nn.softmax, compiler_options={ONEDNN: True})(nan)).all()


@needs_it
@pytest.mark.simulated(1)
def test_the_trace_knows_what_its_program_is_compiled_with(without):
    seen = []

    def step(x):
        seen.append(convolves_by_onednn())
        return 2 * x

    dj.jit(step)(1.0)
    jax.jit(step)(1.0)
    dj.jit(step, compiler_options={ONEDNN: False})(1.0)
    dj.jit(lambda x: dj.jit(step)(x))(1.0)  # compiled as part of the outer one
    jax.jit(lambda x: dj.jit(step)(x))(1.0)
    jax.grad(dj.jit(step))(1.0)
    assert seen == [True, False, False, True, False, True]

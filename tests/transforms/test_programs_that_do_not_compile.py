"""A worker that can't compile its part of a program doesn't leave the others waiting, whatever its program catches."""

from pathlib import Path

import pytest
from jobs import FAST_TO_COMPILE, finish, patience, start

PROGRAM = """
import sys, time
import jax, jax.numpy as jnp
import distdl_jax as dj

jax.config.update("jax_cpu_enable_async_dispatch", False)  # a program that fails as it runs raises in the call, too
P = dj.Partition()
P_all = P.grid([P.size])

@dj.jit
def total(x):
    if P.rank == 1 or "on all" in sys.argv:
        x = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    return dj.functional.all_sum_reduce(x, P_all, axes_keep=())

def wrong(y):
    raise ValueError("not a good sum")

@dj.jit
def looked_at(x):
    y = dj.functional.all_sum_reduce(x, P_all, axes_keep=())[0]
    if P.rank == 1:
        return jax.pure_callback(wrong, y, y)
    return jax.lax.fori_loop(0, 60_000_000, lambda i, y: jnp.sin(y), y)  # seconds

try:
    jax.block_until_ready((looked_at if "runs" in sys.argv else total)(jnp.ones(100_000)))
except Exception as error:
    print(f"caught on {P.rank}: {error}", flush=True)
    if "busy" in sys.argv:
        time.sleep(3600)
    if "ends" in sys.argv:
        sys.exit()
print(f"{float(dj.jit(lambda x: dj.functional.all_sum_reduce(x, P_all, axes_keep=()))(jnp.ones(())))} workers go on")
"""


@pytest.mark.limit(900)
@pytest.mark.parametrize("afterwards", ["goes on", "busy", "ends"])
def test_an_error_that_is_caught_on_one_worker_ends_the_job(afterwards: str, tmp_path: Path) -> None:
    """With the compiler's message, and long before the timeout; whatever the worker does then."""
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"DISTDL_JAX_TIMEOUT": "3000"}
    job = start(2, tmp_path / "program.py", afterwards, settings=settings, flags=FAST_TO_COMPILE)
    status, output = finish(job, patience(120))
    words = " ".join(output.split())
    assert status != 0, output
    assert "distdl_jax ends the job. Worker 1 can't run its program of call 1, of total" in words, output
    assert "Worker 1 says: JaxRuntimeError: NOT_FOUND: No FFI handler registered for no_such_target" in words, output


@pytest.mark.limit(300)
def test_an_error_that_is_caught_on_all_workers_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    status, output = finish(start(2, tmp_path / "program.py", "on all", flags=FAST_TO_COMPILE), patience(120))
    assert status == 0, output
    assert output.count("caught on") == output.count("2.0 workers go on") == 2, output


@pytest.mark.limit(300)
def test_an_error_after_a_worker_s_last_message_ends_nothing(tmp_path: Path) -> None:
    """Its program has run: the other worker's, which takes longer, needs it no more."""
    (tmp_path / "program.py").write_text(PROGRAM)
    status, output = finish(start(2, tmp_path / "program.py", "runs", flags=FAST_TO_COMPILE), patience(120))
    assert status == 0, output
    assert output.count("caught on 1") == 1 and output.count("2.0 workers go on") == 2, output

"""As test_compat_jax.py, of what JAX orders programs by: effects and their tokens."""

import threading
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe
from mpi4py import MPI
from private_parts import calls, what_breaks, while_watched

from distdl_jax import jax_compat, jax_patches
from distdl_jax.transports.mpi.compat import import_mpi4jax


@pytest.mark.world(2)
@what_breaks(jax_compat.dispatched_by_this_thread)
def test_a_program_under_way_is_seen_from_another_thread() -> None:
    """The program waits for the other worker, which sends once it was seen to wait."""
    comm, x = MPI.COMM_WORLD, np.ones((300, 300))
    mpi4jax = import_mpi4jax()
    if comm.rank == 1:
        comm.recv(source=0)
        jax.jit(lambda x: mpi4jax.send(x, dest=0, comm=comm))(x)
        jax.effects_barrier()
        return
    buffers = jax_compat.dispatched_by_this_thread()

    def look() -> bool:
        return any(not buffer.is_deleted() and not buffer.is_ready() for buffer in buffers())

    def wait(may_end: threading.Event) -> None:
        y = program(x)
        may_end.wait()
        comm.send(None, dest=1)
        y.block_until_ready()

    program = jax.jit(lambda x: mpi4jax.recv(x, source=1, comm=comm) @ x @ x)  # what XLA calls cheap, it runs at once
    assert while_watched(look, wait)
    jax.effects_barrier()
    assert not look()


@what_breaks(jax_patches.let_loops_move_data)  # what it does: tests/tracing/test_loops.py
@what_breaks(jax_patches.install_jax_patches)
@what_breaks(jax_patches.remove_jax_patches)
def test_patches_of_jax_are_removed() -> None:
    from jax._src.dispatch import RuntimeTokenSet

    def parts() -> list[Any]:
        registries = ad.primitive_transposes, pe.partial_eval_jaxpr_custom_rules
        return [RuntimeTokenSet.get_token_input, *(rules[lax.while_p] for rules in registries)]

    jax_patches.remove_jax_patches()
    own = parts()
    jax_patches.install_jax_patches()
    jax_patches.install_jax_patches()
    assert all(part is not before for part, before in zip(parts(), own, strict=True))
    jax_patches.remove_jax_patches()
    assert parts() == own
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr("jax._src.checkify.Error")
        for _ in range(2):
            with pytest.raises(ImportError):
                jax_patches.install_jax_patches()
            assert parts() == own
    jax_patches.install_jax_patches()


def noting(called: list[float]) -> Any:
    """Return a program that notes its argument in order, raises if it is negative, and adds 1."""

    def note(x: Any) -> Any:
        called.append(float(x))
        if x < 0:
            raise ValueError("a negative number")
        return x

    return jax.jit(lambda x: io_callback(note, jax.typeof(x), x, ordered=True) + 1)


@what_breaks(jax_patches.hand_tokens_back)
def test_a_program_takes_the_token_of_the_one_before_it() -> None:
    """In the order of the calls; what a program raised is raised where it is waited for, and the next ones run."""
    from jax._src.dispatch import runtime_tokens

    jax_patches.install_jax_patches()
    called: list[float] = []
    program = noting(called)
    jax.effects_barrier()
    x = program(0.0)
    ((effect, token),) = runtime_tokens.current_tokens.items()
    assert runtime_tokens.get_token_input(effect, jax.devices()[:1]) is token
    for _ in range(9):
        x = program(x)
    assert float(x) == 10 and called == [*range(10)]
    with pytest.raises(Exception, match="a negative number"):
        program(-1.0).block_until_ready()
    with suppress(Exception):  # which jax 0.10 raises again here
        jax.effects_barrier()
    runtime_tokens.clear()
    assert float(program(3.0)) == 4


@what_breaks(jax_compat.wait_for_program)
def test_the_last_program_is_waited_for_and_what_it_raised_is_raised() -> None:
    effect, x, seen = jax_compat.ordered_effect("test"), jnp.eye(300), []

    def wait() -> None:  # in a thread of its own, which has tokens of its own
        jax_compat.wait_for_program(effect)  # there is none
        jax_compat.set_last_program(effect, jax.jit(lambda x: lax.fori_loop(0, 300, lambda _, y: y @ x, x))(x))
        jax_compat.wait_for_program(effect)
        (done,) = jax_compat.dispatched_by_this_thread()()
        seen.append(done.is_ready())
        done.delete()  # there are few ways to have a program fail beside the thread; so does its result
        with pytest.raises(RuntimeError, match="deleted"):
            jax_compat.wait_for_program(effect)
        seen.append("deleted")

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [True, "deleted"]


@what_breaks(jax_compat.set_last_program)
def test_a_program_comes_after_the_one_that_is_set() -> None:
    called: list[Any] = []
    effect = jax_compat.ordered_effect("test")
    call, done = calls(effect, called), jax.jit(lambda x: x)(np.zeros(0, bool))
    jax_compat.set_last_program(effect, done)
    assert jax_compat.dispatched_by_this_thread()()[-1] is done
    jax.jit(call)(1.0).block_until_ready()
    assert jax_compat.dispatched_by_this_thread()()[-1] is not done and [x for x, _ in called] == [1]
    jax.effects_barrier()
    assert jax_compat.dispatched_by_this_thread()() == []


@what_breaks(jax_patches.give_tokens_to_compiled_functions)
def test_a_compiled_function_with_ordered_effects_runs_again() -> None:
    jax_patches.install_jax_patches()
    called: list[float] = []
    compiled = noting(called).lower(0.0).compile()
    assert [float(compiled(float(n))) for n in range(3)] == [1, 2, 3] and called == [0, 1, 2]


@what_breaks(jax_compat.ordered_effect)
def test_an_ordered_effect_in_all_structures() -> None:
    called: list[Any] = []
    call = calls(jax_compat.ordered_effect("test"), called)

    @jax.custom_vjp
    def f(x: Any) -> Any:
        return call(x)

    f.defvjp(lambda x: (call(x), None), lambda _, dy: (call(dy + 10),))

    @jax.jit
    def program(x: Any) -> Any:
        x = lax.fori_loop(0, 2, lambda _, x: call(x + 1), x)
        x = lax.cond(x > 0, lambda x: call(x + 1), lambda x: x, x)
        return jax.grad(jax.checkpoint(f))(x)

    program(0.0).block_until_ready()
    assert [x for x, _ in called][:4] == [1, 2, 3, 3] and called[-1][0] == 11

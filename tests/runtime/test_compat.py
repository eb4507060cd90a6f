"""Each private part of jax and mpi4jax does what the library uses it for; where not, its docstring is what fails."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Effect, Primitive
from jax.interpreters import mlir
from mpi4py import MPI
from programs import ROOT

from distdl_jax import compat

MOST_LOOKS = 3000
"""How often a thread looks, every 10 ms, before what it waits for counts as not there."""

tested = set()


def what_breaks(item: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that says, where it fails, what `item` is for and what would replace it."""
    tested.add(item.__name__)

    def explained(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                raise AssertionError(f"distdl_jax.compat.{item.__name__}: {inspect.getdoc(item)}") from error

        return run

    return explained


def test_each_item_has_a_test_and_says_what_would_replace_it() -> None:
    items = {name: item for name, item in vars(compat).items() if getattr(item, "__module__", "") == compat.__name__}
    items = {name: item for name, item in items.items() if not inspect.isclass(item)}
    assert set(items) == tested
    for item in items.values():
        assert "Private: " in str(item.__doc__)


def test_a_failure_gives_the_sentence() -> None:
    def breaks() -> None:
        raise AttributeError("jax has no such name")

    with pytest.raises(AssertionError, match=r"^distdl_jax\.compat\.source_frames: Where (.|\n)* would replace"):
        what_breaks(compat.source_frames)(breaks)()


def imported(file: Any) -> set[str]:
    """The modules that a file of Python imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_nothing_else_imports_what_is_private() -> None:
    files = [file for folder in ("distdl_jax", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    guilty = [file for file in files if any("._src" in name for name in imported(file))]
    assert guilty == [ROOT / "distdl_jax" / "compat.py"]


# --- jax ------------------------------------------------------------------------------------------------------------


@what_breaks(compat.allow_in_checkpoint)
def test_checkpoint_accepts_an_effect() -> None:
    class Unheard(Effect):
        pass

    effect, operation = Unheard(), Primitive("unheard")
    operation.def_effectful_abstract_eval(lambda x: (x, {effect}))

    @jax.checkpoint
    def f(x: Any) -> Any:
        return jnp.sin(x) * operation.bind(jnp.ones(()))

    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.make_jaxpr(jax.grad(f))(1.0)
    compat.allow_in_checkpoint(Unheard)
    assert jax.make_jaxpr(jax.grad(f))(1.0).effects == {effect}


@what_breaks(compat.source_frames)
def test_the_lines_of_an_equation() -> None:
    def inner(x: Any) -> Any:
        return jnp.sin(x)

    def outer(x: Any) -> Any:
        return inner(x)

    (equation,) = jax.make_jaxpr(outer)(1.0).eqns
    first, second, *_ = compat.source_frames(equation.source_info.traceback)
    for frame, function in ((first, inner), (second, outer)):
        assert frame.file_name == __file__
        assert frame.function_name.endswith(function.__name__)
        assert frame.start_line == inspect.getsourcelines(function)[1] + 1
    assert list(compat.source_frames(None)) == []


def squared_twice(x: Any) -> Any:
    with jax.named_scope("inner"):
        return jax.jit(jnp.square)(jax.checkpoint(jnp.sin)(x))


@what_breaks(compat.bound_again)
def test_a_program_evaluated_equation_by_equation() -> None:
    """It gives what the function gives, and its equations keep their lines, scopes and settings."""

    def f(x: Any) -> Any:
        with jax.default_matmul_precision("float32"):
            return jnp.dot(jax.nn.relu(squared_twice(x)), x)

    program = jax.make_jaxpr(f)(X := np.arange(3.0))

    def again(x: Any) -> Any:
        values = {program.jaxpr.invars[0]: x}
        for eqn in program.jaxpr.eqns:
            args = [values[var] for var in eqn.invars]
            values.update(zip(eqn.outvars, compat.bound_again(eqn, args), strict=True))
        return values[program.jaxpr.outvars[0]]

    assert again(X) == f(X)
    np.testing.assert_array_equal(jax.grad(again)(X), jax.grad(f)(X))
    same = jax.make_jaxpr(again)(X)
    assert str(same) == str(program)
    for got, expected in zip(same.jaxpr.eqns, program.jaxpr.eqns, strict=True):
        lines = [next(compat.source_frames(eqn.source_info.traceback)).start_line for eqn in (got, expected)]
        assert lines[0] == lines[1]
        assert str(got.source_info.name_stack) == str(expected.source_info.name_stack)


@what_breaks(compat.at_line_of)
def test_what_is_traced_takes_the_line_of_an_equation() -> None:
    first = jax.make_jaxpr(squared_twice)(1.0).jaxpr.eqns[0]

    def elsewhere(x: Any) -> Any:
        with compat.at_line_of(first):
            return lax.sin(x)

    (eqn,) = jax.make_jaxpr(elsewhere)(1.0).jaxpr.eqns
    assert next(compat.source_frames(eqn.source_info.traceback)).function_name.endswith("squared_twice")
    assert str(eqn.source_info.name_stack) == "inner"


def while_watched(look: Callable[[], bool], work: Callable[[threading.Event], None]) -> bool:
    """Whether `look`, from another thread, was ever true while `work` ran; the event tells `work` that it may end."""
    found, may_end = [], threading.Event()

    def watch() -> None:
        for _ in range(MOST_LOOKS):
            if look():
                found.append(True)
                break
            time.sleep(0.01)
        may_end.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    work(may_end)
    watcher.join()
    return bool(found)


def is_in(kind: str) -> Callable[[], bool]:
    """Whether the main thread is in it."""
    return lambda: compat.activity(sys._current_frames()[threading.main_thread().ident or 0]) == kind


@what_breaks(compat.activity)
def test_a_main_thread_that_executes_is_recognised() -> None:
    def execute(may_end: threading.Event) -> None:
        def poll() -> Any:
            return np.bool_(may_end.is_set())

        @jax.jit
        def program(ended: Any) -> Any:
            return lax.while_loop(
                lambda ended: ~ended, lambda ended: io_callback(poll, jax.typeof(ended), ordered=True), ended
            )

        program(False).block_until_ready()

    assert while_watched(is_in("executing"), execute)


@what_breaks(compat.activity)
def test_a_main_thread_that_compiles_is_recognised() -> None:
    def compile_programs(may_end: threading.Event) -> None:
        factor = 0.0
        while not may_end.is_set():
            factor += 1.0

            def program(x: Any, factor: float = factor) -> Any:
                for _ in range(20):
                    x = jnp.sin(factor * x) @ x
                return x

            jax.jit(program).lower(np.ones((2, 2))).compile()

    assert while_watched(is_in("compiling"), compile_programs)


@pytest.mark.world(2)
@what_breaks(compat.dispatched_by_this_thread)
def test_a_program_under_way_is_seen_from_another_thread() -> None:
    """The program waits for the other worker, which sends once it was seen to wait."""
    comm, x = MPI.COMM_WORLD, np.ones((300, 300))
    mpi4jax = compat.import_mpi4jax()
    if comm.rank == 1:
        comm.recv(source=0)
        jax.jit(lambda x: mpi4jax.send(x, dest=0, comm=comm))(x)
        jax.effects_barrier()
        return
    buffers = compat.dispatched_by_this_thread()

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


# --- mpi4jax --------------------------------------------------------------------------------------------------------


def calls(effect: Effect, called: list[Any]) -> Callable[[Any], Any]:
    """An operation that calls Python, in the order that `effect` keeps, and notes its operand and the thread."""
    operation = Primitive("call")
    operation.def_effectful_abstract_eval(lambda x: (x, {effect}))

    def lower(ctx: Any, x: Any) -> Any:
        def call(x: Any) -> Any:
            called.append((float(x), threading.get_ident()))
            return (x,)

        results, token, _ = mlir.emit_python_callback(
            ctx, call, ctx.tokens_in.get(effect), [x], ctx.avals_in, ctx.avals_out, has_side_effect=True
        )
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
        return results

    mlir.register_lowering(operation, lower, cacheable=False)
    return operation.bind


@what_breaks(compat.ordered_effect)
def test_an_ordered_effect_in_all_structures() -> None:
    called: list[Any] = []
    call = calls(compat.ordered_effect("test"), called)

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


@what_breaks(compat.new_cpu_device)
def test_a_device_of_its_own_runs_programs_in_the_calling_thread() -> None:
    called: list[Any] = []
    call = calls(compat.ordered_effect("test"), called)
    environment = dict(os.environ)
    device = compat.new_cpu_device(1)
    assert os.environ == environment and device.platform == "cpu" and device != jax.devices("cpu")[0]
    with jax.default_device(device):
        program = jax.jit(lambda x: call(jnp.sum(jnp.sin(x) @ jnp.cos(x))))
        for _ in range(3):
            y = program(jnp.ones((600, 600)))
    assert y.devices() == {device}
    assert [thread for _, thread in called] == [threading.get_ident()] * 3
    assert float(y + jnp.ones(())) == float(y) + 1  # arrays go from one client to another


@pytest.mark.world(1)
@what_breaks(compat.import_mpi4jax)
def test_the_warning_of_a_new_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.import_mpi4jax()
    monkeypatch.setattr(jax, "__version__", "99.0")
    monkeypatch.delenv("MPI4JAX_NO_WARN_JAX_VERSION", raising=False)
    with pytest.warns(UserWarning, match=f"^{compat.WARNING_OF_A_NEW_JAX}"):
        importlib.import_module("mpi4jax._src.jax_compat").check_jax_version()


@what_breaks(compat.import_mpi4jax)
def test_the_library_is_imported_without_that_warning() -> None:
    """With the jax that is installed, which is one of those that were tried."""
    environment = {name: value for name, value in os.environ.items() if name != "MPI4JAX_NO_WARN_JAX_VERSION"}
    program = "from distdl_jax.compat import import_mpi4jax; print(import_mpi4jax().sendrecv.__name__)"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment
    )
    assert process.stdout == "sendrecv\n"
    assert "JAX version" not in process.stderr


@pytest.mark.world(2)
@what_breaks(compat.mpi_effect)
def test_the_effect_of_mpi4jax() -> None:
    mpi4jax = compat.import_mpi4jax()

    def f(x: Any) -> Any:
        return mpi4jax.allreduce(jnp.sin(x), MPI.SUM, comm=MPI.COMM_WORLD)

    for function in (f, jax.grad(f), jax.grad(jax.checkpoint(f))):
        assert jax.make_jaxpr(function)(1.0).effects == {compat.mpi_effect()}


@pytest.mark.world(2)
@what_breaks(compat.mpi_bcast)
def test_the_primitive_of_broadcast() -> None:
    rank, comm = MPI.COMM_WORLD.rank, compat.as_parameter(MPI.COMM_WORLD)
    y = jax.jit(lambda x: compat.mpi_bcast().bind(x, root=0, comm=comm))(np.arange(3) + rank)
    np.testing.assert_array_equal(y, [0, 1, 2] if rank == 1 else [])


@pytest.mark.world(2)
@what_breaks(compat.mpi_reduce)
def test_the_primitive_of_reduction() -> None:
    rank, comm = MPI.COMM_WORLD.rank, compat.as_parameter(MPI.COMM_WORLD)
    op = compat.as_parameter(MPI.SUM)
    y = jax.jit(lambda x: compat.mpi_reduce().bind(x, op=op, root=0, comm=comm))(np.arange(3) + rank)
    np.testing.assert_array_equal(y, [1, 3, 5] if rank == 0 else [])


@pytest.mark.world(1)
@what_breaks(compat.as_parameter)
def test_a_parameter_is_hashable_and_equal_to_itself() -> None:
    for mpi_object in (MPI.COMM_WORLD, MPI.SUM):
        parameter = compat.as_parameter(mpi_object)
        assert hash(parameter) == hash(compat.as_parameter(mpi_object))
        assert compat.as_parameter(parameter) is parameter


@pytest.mark.world(2)
@what_breaks(compat.mpi_operation)
def test_the_equations_of_mpi4jax() -> None:
    mpi4jax, comm = compat.import_mpi4jax(), MPI.COMM_WORLD

    def program(x: Any) -> None:
        mpi4jax.sendrecv(x, x, source=0, dest=1, sendtag=2, recvtag=3, comm=comm)
        mpi4jax.send(x, dest=1, tag=4, comm=comm)
        mpi4jax.recv(x, source=0, tag=5, comm=comm)
        mpi4jax.allreduce(x, op=MPI.MAX, comm=comm)
        mpi4jax.reduce(x, op=MPI.MIN, root=1, comm=comm)
        mpi4jax.bcast(x, root=1, comm=comm)
        jnp.sin(x)

    expected = [
        ("sendrecv", {"source": 0, "dest": 1, "sendtag": 2, "recvtag": 3, "comm": comm}),
        ("send", {"dest": 1, "tag": 4, "comm": comm}),
        ("recv", {"source": 0, "tag": 5, "comm": comm}),
        ("allreduce", {"op": MPI.MAX, "comm": comm}),
        ("reduce", {"op": MPI.MIN, "root": 1, "comm": comm}),
        ("bcast", {"root": 1, "comm": comm}),
    ]
    found = list(map(compat.mpi_operation, jax.make_jaxpr(program)(1.0).eqns))
    assert [operation and operation[0] for operation in found] == [*(name for name, _ in expected), None]
    for operation, (_, parameters) in zip(found, expected, strict=False):
        assert operation is not None
        assert parameters.items() <= operation[1].items()

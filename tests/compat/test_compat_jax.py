"""Each private part of jax does what the library uses it for; where not, its docstring is what fails."""

import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, mlir
from private_parts import calls, what_breaks, while_watched

from distdl_jax import jax_compat
from distdl_jax.transports.threads import workers


@what_breaks(jax_compat.hiding_frames)
def test_frames_of_the_library_are_hidden() -> None:
    before = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    try:
        for filtering, shown in (("quiet_remove_frames", False), ("off", True)):
            jax.config.update("jax_traceback_filtering", filtering)
            with pytest.raises(ZeroDivisionError) as found:
                jax_compat.hiding_frames(lambda: [1 // divisor for divisor in (0,)])()
            files = [frame.filename for frame in traceback.extract_tb(found.value.__traceback__)]
            assert files[-1] == __file__ and any("traceback_util" in file for file in files) == shown
    finally:
        jax.config.update("jax_traceback_filtering", before)


@what_breaks(jax_compat.source_frames)
def test_the_lines_of_an_equation() -> None:
    def inner(x: Any) -> Any:
        return jnp.sin(x)

    def outer(x: Any) -> Any:
        return inner(x)

    (equation,) = jax.make_jaxpr(outer)(1.0).eqns
    first, second, *_ = jax_compat.source_frames(equation.source_info.traceback)
    for frame, function in ((first, inner), (second, outer)):
        assert frame.file_name == __file__
        assert frame.function_name.endswith(function.__name__)
        assert frame.start_line == inspect.getsourcelines(function)[1] + 1
    assert list(jax_compat.source_frames(None)) == []


def squared_twice(x: Any) -> Any:
    with jax.named_scope("inner"):
        return jax.jit(jnp.square)(jax.checkpoint(jnp.sin)(x))


@what_breaks(jax_compat.bound_again)
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
            values.update(zip(eqn.outvars, jax_compat.bound_again(eqn, args), strict=True))
        return values[program.jaxpr.outvars[0]]

    assert again(X) == f(X)
    np.testing.assert_array_equal(jax.grad(again)(X), jax.grad(f)(X))
    same = jax.make_jaxpr(again)(X)
    assert str(same) == str(program)
    for got, expected in zip(same.jaxpr.eqns, program.jaxpr.eqns, strict=True):
        lines = [next(jax_compat.source_frames(eqn.source_info.traceback)).start_line for eqn in (got, expected)]
        assert lines[0] == lines[1]
        assert str(got.source_info.name_stack) == str(expected.source_info.name_stack)


@what_breaks(jax_compat.without_dead_equations)
def test_a_program_without_dead_equations() -> None:
    """All arguments stay, also unused ones."""
    closed = jax.make_jaxpr(lambda x, y: (jnp.sin(x) * jnp.cos(y), x + 1)[1])(1.0, 2.0)
    living = jax_compat.without_dead_equations(closed)
    assert [eqn.primitive.name for eqn in living.eqns] == ["add"]
    assert len(living.in_avals) == 2


@what_breaks(jax_compat.expansion)
def test_an_operation_is_expanded() -> None:
    """As JAX has some since 0.12; primitives, and all operations of earlier versions, aren't."""
    closed = jax.make_jaxpr(lambda x: jnp.nonzero(x + 1, size=2)[0])(jnp.arange(4))
    for eqn in closed.eqns:
        body = jax_compat.expansion(eqn)
        assert (body is None) == (eqn.primitive.name != "call_hi_primitive")
        if body is not None:
            assert [aval.shape for aval in body.out_avals] == [var.aval.shape for var in eqn.outvars]
            assert "call_hi_primitive" not in str(body)


@what_breaks(jax_compat.at_line_of)
def test_what_is_traced_takes_the_line_of_an_equation() -> None:
    first = jax.make_jaxpr(squared_twice)(1.0).jaxpr.eqns[0]

    def elsewhere(x: Any) -> Any:
        with jax_compat.at_line_of(first):
            return lax.sin(x)

    (eqn,) = jax.make_jaxpr(elsewhere)(1.0).jaxpr.eqns
    assert next(jax_compat.source_frames(eqn.source_info.traceback)).function_name.endswith("squared_twice")
    assert str(eqn.source_info.name_stack) == "inner"


@what_breaks(jax_compat.linearize_at_once)
def test_a_linear_operation_is_differentiated_without_tracing_its_rule() -> None:
    """An integer argument has no derivative."""
    weighted, traced = Primitive("weighted"), []

    def tangent(dx: Any, dy: Any, by: int) -> Any:
        there = [weight * dz for weight, dz in ((by, dx), (1, dy)) if type(dz) is not ad.Zero]
        return sum(there[1:], start=there[0])

    def differentiated(primals: Any, tangents: Any, by: int) -> Any:
        traced.append(tangents)
        return weighted.bind(*primals, by=by), tangent(*tangents, by)

    weighted.def_impl(lambda x, y, by: jnp.asarray(by * x + y, x.dtype))
    weighted.def_abstract_eval(lambda x, y, by: x)
    ad.primitive_jvps[weighted] = differentiated
    jax_compat.linearize_at_once(weighted, tangent)

    def used(x: Any, y: Any) -> Any:
        return weighted.bind(x, y, by=3) * 2

    x, y = jnp.float32(5), jnp.float32(7)
    assert jax.grad(used)(x, y) == 6 and jax.grad(used, 1)(x, y) == 2
    assert jax.grad(used, (0, 1))(x, y) == (6, 2) and jax.grad(lambda x: used(x, x))(x) == 8
    assert jax.grad(lambda x: x * used(jnp.float32(2), y))(x) == 26
    assert jax.grad(used)(x, jnp.int32(7)) == 6
    whole, pullback = jax.vjp(lambda x: weighted.bind(jnp.int32(2), x, by=3), x)
    assert whole == 11 and pullback(np.zeros((), jax.dtypes.float0)) == (0,)
    assert not traced
    assert jax.jvp(lambda x: used(x, x), (x,), (x,)) == (40, 40) and len(traced) == 1


def is_in(kind: str) -> Callable[[], bool]:
    """Return whether the main thread is in the function."""
    return lambda: jax_compat.activity(sys._current_frames()[threading.main_thread().ident or 0]) == kind


@what_breaks(jax_compat.activity)
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


@what_breaks(jax_compat.activity)
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


@what_breaks(jax_compat.is_transformed)
def test_whether_something_is_transformed() -> None:
    seen: list[bool] = []

    def f(x: Any) -> Any:
        seen.append(jax_compat.is_transformed())
        return x * x

    f(1.0)
    for transformed in (jax.jit(f), jax.grad(f), lambda x: jax.jvp(f, (x,), (x,))):
        transformed(1.0)
    jax.vmap(f)(jnp.ones(2))
    assert seen == [False, True, True, True, True]


def test_a_device_of_its_own_runs_programs_in_the_calling_thread() -> None:
    called: list[Any] = []
    call = calls(jax_compat.ordered_effect("test"), called)
    environment = dict(os.environ)
    device = workers.new_cpu_device(1)
    assert os.environ == environment and device.platform == "cpu" and device != jax.devices("cpu")[0]
    with jax.default_device(device):
        program = jax.jit(lambda x: call(jnp.sum(jnp.sin(x) @ jnp.cos(x))))
        for _ in range(3):
            y = program(jnp.ones((600, 600)))
    assert y.devices() == {device}
    assert [thread for _, thread in called] == [threading.get_ident()] * 3
    assert float(y + jnp.ones(())) == float(y) + 1  # arrays go from one client to another


@what_breaks(jax_compat.found_not_finite)
def test_found_not_finite() -> None:
    """While JAX runs a function again to find where a NaN arises."""
    found = []

    @jax.jit
    def logarithm(x: Any) -> Any:
        found.append(jax_compat.found_not_finite())
        return jnp.log(x)

    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        logarithm(-1.0)
    assert found == [None, ("jit(logarithm)", "nan")] and jax_compat.found_not_finite() is None


@what_breaks(jax_compat.check_for_nans_again)
def test_nans_are_found_after_what_turns_the_check_off() -> None:
    logarithm = jax.jit(lambda x: jnp.log(x))
    jax.config.update("jax_debug_nans", True)
    try:
        for _ in range(2):
            logarithm(1.0)
        with jax.debug_nans(False):  # as JAX itself does while it lowers a `custom_vmap`
            jax_compat.check_for_nans_again()
            assert np.isnan(logarithm(-1.0))
        jax_compat.check_for_nans_again()
        with pytest.raises(FloatingPointError):
            logarithm(-1.0)
    finally:
        jax.config.update("jax_debug_nans", False)


@what_breaks(jax_compat.scan_counts)
def test_the_arguments_of_a_scan() -> None:
    def f(x: Any, w: Any) -> Any:
        return lax.scan(lambda carry, a: ((carry[0] * w + a, carry[0]), a), (x, x), jnp.ones((3, 2)))

    (eqn,) = (eqn for eqn in jax.make_jaxpr(f)(jnp.ones(2), 2.0).eqns if eqn.primitive.name == "scan")
    assert jax_compat.scan_counts(eqn) == (1, 2) and len(eqn.invars) == 4


@what_breaks(jax_compat.name_and_params)
@what_breaks(jax_compat.constant_arguments)
@pytest.mark.parametrize("next_one", [False, True])
def test_functions_with_their_own_derivatives_and_checkpoints(next_one: bool) -> None:
    """They have the same names and parameters with the flags of JAX's next ones; `w` is a constant of the function."""
    flags = ("jax_custom_vjp3", "jax_remat3")
    if next_one and jax.__version_info__ < (0, 12):
        pytest.skip("this jax's next ones take no constants")

    def outer(w: Any, x: Any) -> Any:
        @jax.custom_vjp
        def weighted(x: Any) -> Any:
            return w * x

        weighted.defvjp(lambda x: (w * x, w), lambda w, dy: (w * dy,))
        return jax.checkpoint(jnp.sin)(weighted(x))

    before = {flag: getattr(jax.config, flag) for flag in flags if hasattr(jax.config, flag)}
    try:
        for flag in before:
            jax.config.update(flag, next_one)
        eqns = jax.make_jaxpr(outer)(2.0, 3.0).eqns
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)
    by_name = {jax_compat.name_and_params(eqn)[0]: eqn for eqn in eqns}
    (eqn,) = (by_name[name] for name in ("checkpoint", "remat2") if name in by_name)
    assert {"policy", "prevent_cse"} <= jax_compat.name_and_params(eqn)[1].keys()
    eqn = by_name["custom_vjp_call"]
    assert "symbolic_zeros" in jax_compat.name_and_params(eqn)[1]
    assert (jax_compat.constant_arguments(eqn), len(eqn.invars)) == (1, 2)


@what_breaks(jax_compat.is_staged)
def test_whether_a_program_is_traced() -> None:
    seen: list[bool] = []

    def f(x: Any) -> Any:
        seen.append(jax_compat.is_staged())
        return jnp.sum(x)

    x = jnp.ones(3)
    for call in (f, jax.grad(f), jax.vmap(f), jax.vmap(jax.grad(lambda x: f(x) ** 2))):
        call(x)
    eager = len(seen)
    for call in (jax.jit(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f)), jax.make_jaxpr(jax.vmap(f))):
        call(x)
    lax.scan(lambda carry, x: (f(x), None), 0.0, x)
    assert not any(seen[:eager]) and all(seen[eager:]) and len(seen) > eager >= 4
    assert not jax_compat.is_staged()


@what_breaks(jax_compat.settings_of_this_thread)
def test_another_thread_computes_with_the_settings_of_this_one() -> None:
    mine = jax.make_user_context("nobody's")

    def seen() -> Any:
        names = ("enable_x64", "debug_nans", "default_matmul_precision", "numpy_rank_promotion", "disable_jit")
        names += ("numpy_dtype_promotion", "transfer_guard_device_to_host", "default_prng_impl", "check_tracer_leaks")
        return mine.value, jnp.result_type(float), [getattr(jax.config, f"jax_{name}") for name in names]

    def there(settings: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            with_them, after = (pool.submit(run) for run in (lambda: with_settings(settings), seen))
            return with_them.result(), after.result()

    def with_settings(settings: Any) -> Any:
        with settings():
            return seen()

    usual = seen()
    assert there(jax_compat.settings_of_this_thread()) == (usual, usual)
    with ExitStack() as stack:
        for setting in (
            jax.enable_x64(not jax.config.jax_enable_x64),  # type: ignore[attr-defined]
            jax.debug_nans(True),
            jax.default_matmul_precision("highest"),
            jax.numpy_rank_promotion("raise"),
            jax.numpy_dtype_promotion("strict"),
            jax.transfer_guard("log"),
            jax.default_prng_impl("rbg"),
            jax.disable_jit(),
            jax.checking_leaks(),
            mine("a user's"),
        ):
            stack.enter_context(setting)
        here, settings = seen(), jax_compat.settings_of_this_thread()
    assert here[0] == "a user's" and all(a != b for a, b in zip(here[2], usual[2], strict=True))
    assert there(settings) == (here, usual) and seen() == usual


@what_breaks(jax_compat.mapped_sizes)
def test_mapped_sizes() -> None:
    found = []

    def look(x: Any, y: Any) -> Any:
        found.append((jax_compat.mapped_sizes(x), jax_compat.mapped_sizes(y)))
        return x * y

    jax.vmap(jax.vmap(look), in_axes=(0, None))(jnp.ones((3, 2)), jnp.ones(2))
    jax.vmap(jax.grad(look))(jnp.ones(5), jnp.ones(5))
    jax.jit(jax.vmap(look))(jnp.ones(4), jnp.ones(4))
    look(jnp.ones(4), jnp.ones(4))
    assert found == [((2, 3), (2,)), ((5,), (5,)), ((4,), (4,)), ((), ())]


@what_breaks(jax_compat.add_dependency)
def test_a_value_that_is_read_after_a_token() -> None:
    """The order is in the compiled program, where an optimization barrier is not."""
    doubled = Primitive("doubled_after_a_token")
    doubled.def_abstract_eval(lambda x: x)
    mlir.register_lowering(
        doubled, lambda context, x: [jax_compat.add_dependency(context, x, stablehlo.create_token())], platform="cpu"
    )
    function = jax.jit(lambda x: 2 * doubled.bind(x + 1))
    program = function.lower(jnp.ones(3)).compile()
    assert "add-dependency" in program.as_text()
    assert np.array_equal(program(jnp.ones(3)), np.full(3, 4.0))
    exported = jax.export.export(function, platforms=["cpu"])(jnp.ones(3))  # which has no such operation
    assert np.array_equal(exported.call(jnp.ones(3)), np.full(3, 4.0))


@what_breaks(jax_compat.count_constants_among_residuals)
def test_residuals_of_second_derivatives_through_a_loop() -> None:
    """The function has a constant of its own, of the shape of its arguments."""
    jax_compat.install_jax_patches()

    @jax.custom_vjp
    def f(x: Any, y: Any) -> Any:
        return jnp.sin(x * y + jnp.arange(3.0))

    def forward(x: Any, y: Any) -> Any:
        return f(x, y), (x, y)

    def backward(residuals: Any, dz: Any) -> Any:
        x, y = residuals
        scaled = dz * jnp.cos(x * y + jnp.arange(3.0))
        return scaled * y, scaled * x

    f.defvjp(forward, backward)

    def in_a_loop(x: Any) -> Any:
        return jnp.sum(lax.scan(lambda x, _: (f(x, jnp.cos(x)), None), x, length=2)[0])

    def without(x: Any) -> Any:
        return jnp.sum(f(f(x, jnp.cos(x)), jnp.cos(f(x, jnp.cos(x)))))

    x = jnp.arange(1.0, 4.0)
    got, want = (jax.jit(jax.grad(lambda x, g=g: jnp.sum(jax.grad(g)(x) ** 2)))(x) for g in (in_a_loop, without))
    np.testing.assert_allclose(got, want, 1e-12)


@what_breaks(jax_compat.count_constants_among_residuals)
def test_residuals_of_a_function_that_is_checked() -> None:
    """An error may be found before it: its two numbers go in front of the arguments."""
    jax_compat.install_jax_patches()

    @jax.custom_vjp
    def product(x: Any, y: Any) -> Any:
        return x * y

    product.defvjp(lambda x, y: (product(x, y), (x, y)), lambda residuals, dz: (dz * residuals[1], dz * residuals[0]))

    def f(x: Any, y: Any) -> Any:
        return product(jnp.tanh(x), y)

    def checked(x: Any, y: Any) -> Any:
        return checkify.checkify(f, errors=checkify.float_checks)(x, y)[1]

    got, want = (jax.grad(g, argnums=(0, 1))(2.0, 3.0) for g in (checked, f))
    np.testing.assert_allclose(got, want, 1e-6)

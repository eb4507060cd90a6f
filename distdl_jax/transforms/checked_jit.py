"""`dj.jit` and `dj.check`: the workers' programs, compared before any part of them runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial, update_wrapper, wraps
from time import perf_counter
from typing import Any, Generic, ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary

import jax
from jax import Array
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from distdl_jax.errors import PLAN_OF, PlanError, SetupError
from distdl_jax.jax_compat import (
    check_for_nans_again,
    hiding_frames,
    is_staged,
    is_transformed,
    set_last_program,
    wait_for_program,
)
from distdl_jax.partitions.spec_trees import different_masks, masked_places
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.cache_keys import sizes_in_key
from distdl_jax.tracing.closures import static_arguments
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.effect_free_call import call_without_effect
from distdl_jax.tracing.known_values import know_arguments
from distdl_jax.tracing.marks import refuse_forward_mode
from distdl_jax.tracing.program_reader import constants_text, moved_constants, read_flow
from distdl_jax.transforms.any_leaves import JittedOfAnyLeaves
from distdl_jax.transforms.equal_losses import WithLosses, returning_losses, without_losses
from distdl_jax.transports.open_world import world_of, worlds_used
from distdl_jax.transports.world import OutsideWorldError, World
from distdl_jax.validation import check_function, difference
from distdl_jax.watchdog.programs.diagnosis import problem_text
from distdl_jax.watchdog.programs.ir import Flow, Program
from distdl_jax.watchdog.programs.report import Report
from distdl_jax.watchdog.watch.call_log import CallLog, Earlier
from distdl_jax.watchdog.watch.deadlock import different_earlier_calls
from distdl_jax.watchdog.watch.dependencies import takes_all
from distdl_jax.watchdog.watch.log import log
from distdl_jax.watchdog.watch.status import WorkerStatus, worker_status

P = ParamSpec("P")
R = TypeVar("R")


@overload
def jit(fun: Callable[P, R], **options: Any) -> CheckedFunction[P, R]: ...


@overload
def jit(fun: None = None, **options: Any) -> Callable[[Callable[P, R]], CheckedFunction[P, R]]: ...


def jit(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile like `jax.jit`, and compare the workers' programs on every trace, before anything runs.

    On every new trace each worker determines its communication: which operation, with whom, how many elements of which
    dtype, from which arguments or closed-over arrays, including inside scans, conditionals, while loops,
    `jax.checkpoint` and nested jits.
    Worker 0 simulates the programs against each other; if one of them would wait for ever, two partners disagree, or
    two workers pass the arguments of similar calls in different order, all workers raise the same `PlanError`, which
    names the workers, the operations and the source lines. After that a call costs a few microseconds, less than one of
    `jax.jit`, which JAX runs in Python if a program communicates.

    All workers of the world must call the function, and trace it in the same call: if a shape, dtype or static argument
    changes on some workers only, they raise that error. For functions that only some workers call (e.g. a metric on the
    root), use `jax.jit`. The first call waits for its result, and gives a `CopiesWarning` if the workers' losses in a
    `dj.value_and_grad` are equal, so that they count once for each.

    **Arguments:**

    - `fun`: the function or method to compile. Without it, a decorator is returned.
    - `options`: those of `jax.jit`: `static_argnums`, `static_argnames`, `donate_argnums`, ...

    **Returns:** a function that is called like `fun`. It has `jax.jit`'s attributes too (`lower`, `trace`,
    `clear_cache`, ...).

    **Raises:** `InvalidTypeError` if `fun` is not a function; `PlanError`, on all workers, when called.

    >>> import jax.numpy as jnp
    >>> step = jit(lambda x: 2 * x)
    >>> float(step(jnp.float32(21)))
    42.0

    In a call under `jax.grad` the derivative's program is not compared; `jit` the function that takes the gradient.
    """
    if fun is None:
        return partial(jit, **options)
    checked = CheckedFunction(fun, options)
    if not getattr(fun, "takes_any_leaves", False):
        return checked
    return JittedOfAnyLeaves(fun, checked, lambda fun: CheckedFunction(fun, {}), options)


def check(fun: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Report:
    """Compare the communication of `fun(*args, **kwargs)` on all workers, without running it.

    Collective in the world: all workers call it, each with its own arguments.

    **Arguments:**

    - `fun`: a function, jitted or not.
    - `args`, `kwargs`: its arguments; only the shapes and dtypes of arrays matter.

    **Returns:** a `Report`, the same on all workers: printed, it lists each worker's operations, messages and bytes;
    `report.ok` tells whether the programs complete together, `report.problem` what doesn't match; `dj.draw(report)`
    draws the messages in order, and with `in_order=False` the totals between workers.

    **Raises:** `InvalidTypeError` if `fun` is not a function; `SetupError` if it communicates in several worlds; and
    errors of `fun` while it is traced.

    >>> import jax.numpy as jnp
    >>> check(lambda x: 2 * x, jnp.ones(3)).ok
    True
    """
    check_function("fun", fun)
    name = function_name(fun)
    if trace_context.whole_program:  # it is of whole arrays, and moves nothing
        return Report(name, {}, None)
    with worker_status().call(f"check of {name}"), worker_status().traced():
        takes_any_leaves = getattr(fun, "takes_any_leaves", False)
        traceable = fun if hasattr(fun, "trace") else jit(fun) if takes_any_leaves else jax.jit(unequal(fun))
        with trace_context.set(compared=True, sizes_agreed=True), worlds_used() as worlds:
            traced = traceable.trace(*args, **kwargs)
        world, program, flow = _read(traced.jaxpr, worlds, _variables(fun, args, kwargs))
        if world is None:
            raise SetupError(f"{name} {_SEVERAL_WORLDS}")

        def report(contributions: dict[int, tuple[Program, Flow]]) -> Report:
            programs = {worker: program for worker, (program, _) in contributions.items()}
            flows = {worker: flow for worker, (_, flow) in contributions.items()}
            return Report(name, programs, problem_text(name, programs, flows))

        return world.agree(tuple(range(world.size)), f"the check of {name}", (program, flow), report)


class CheckedFunction(Generic[P, R]):
    """A jitted function whose program is compared between the workers on every trace; made by `jit`.

    The user's Python runs once per trace. With `dj.value_and_grad` in it JAX makes four programs: of the loss, so that
    its movements can be ordered; of its derivative, from the first one, which the workers compare; of the whole
    function, around both, which they compare again, since a user may move data around a derivative; and of the call, by
    which C++ finds the compiled program.
    """

    def __init__(self, fun: Callable[P, R], options: dict[str, Any]) -> None:
        check_function("fun", fun)
        _listen_for_compilations()
        self._fun = fun
        self._name = function_name(fun)
        # The outer function has the options that a jitted function within another may not have.
        inner = {key: value for key, value in options.items() if not key.startswith(("donate", "compiler_options"))}
        # With `out_shardings` JAX would ask for the losses' ones, too.
        traceable = unequal(fun) if "out_shardings" in options else returning_losses(unequal(fun))
        self._inner: Any = jax.jit(traceable, **inner)
        # The log in which calls count, by worker (of dj.simulate, too): none if one trace counts and another doesn't.
        self._counts_in: WeakKeyDictionary[WorkerStatus, CallLog | None] = WeakKeyDictionary()
        self._effects: list[Any] = []  # of the messages that it is known to send: by MPI, in dj.simulate

        @wraps(fun)
        def compared(*args: Any, **kwargs: Any) -> Any:
            if not trace_context.compared and not trace_context.whole_program:
                self._trace(args, kwargs)
            return without_losses(self._inner(*args, **kwargs))

        @wraps(fun)
        def compared_alone(*args: Any, **kwargs: Any) -> tuple[dict[int, Array], Any]:
            traced, world = self._trace(args, kwargs)
            return self._call_without_effect(traced, world, args, kwargs)

        self._jitted: Any = jax.jit(compared, **options)
        # For a top-level call: with an array that exists when its program is done, if it communicates; under the number
        # of its effect, since another call of the same function may have another one. (An effect has an address in its
        # name, and would be a different key in JAX's persistent cache in each process.)
        self._alone: Any = None if "out_shardings" in options else jax.jit(compared_alone, **options)
        # Not its __dict__, which is ours if `fun` wraps another checked function.
        update_wrapper(self, fun, updated=())

    @hiding_frames
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        transformed = is_transformed()
        if transformed and is_staged():  # it is part of another one, and not called any more once that is compiled
            return self._jitted(*args, **kwargs)
        status = worker_status()
        with status.call(self._name, self._counts_in.get(status)), sizes_in_key((args, kwargs)):
            trace_context.to_compile = trace_context.is_first_call = False
            trace_context.called_with = (args, kwargs)
            try:
                if transformed or self._alone is None:
                    return self._jitted(*args, **kwargs)
                done, result = self._run(args, kwargs) if self._effects else self._alone(*args, **kwargs)
                if isinstance(result, WithLosses):
                    if trace_context.is_first_call:
                        result.compare()
                    result = result.result
            except Exception as error:
                if trace_context.to_compile:  # the caller may catch it, but the others wait
                    status.cannot_run(error)
                refuse_forward_mode(error)
                raise
            for number, array in done.items():
                set_last_program(self._effects[number], array)
            return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a communicating call: C++ has no frame, so the watchdog recognises it by this one."""
        for effect in self._effects:
            wait_for_program(effect)
        return self._alone(*args, **kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, World | None]:
        """Trace it, and compare its communication; return the traced program, and its world."""
        with worker_status().traced():
            with trace_context.set(compared=True, sizes_agreed=True, values={}), worlds_used() as worlds:
                traced = self._inner.trace(*args, **kwargs)
            masked = masked_places(args=args, kwargs=kwargs, **_result_of(traced))
            variables = _variables(self._fun, args, kwargs)
            world, log = _compare(self._name, traced.jaxpr, variables, worlds, masked)
            counts_in = self._counts_in.setdefault(worker_status(), log)
            self._counts_in[worker_status()] = log if counts_in is log else None
        trace_context.to_compile, trace_context.handled = True, sys.exc_info()[1]
        trace_context.is_first_call = True
        return traced, world

    def _call_without_effect(
        self, traced: Any, world: World | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[int, Array], Any]:
        """Return the result of the traced program, and an array that exists when it is done, by its effect."""
        effect = None if world is None else world.transport.effect
        if traced.jaxpr.effects != {effect} or not is_transformed():  # not traced: jax.disable_jit, jax_debug_nans
            return {}, self._inner(*args, **kwargs)
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            # XLA treats calls without arguments as constants, and then aborts, for instance at scatters.
            return {}, jax.tree.unflatten(traced.out_tree, jaxpr_as_fun(traced.jaxpr)())
        if effect not in self._effects:
            self._effects.append(effect)
        wait_for_program(effect)
        done, result = call_without_effect(self._inner, traced, effect, args, kwargs)
        return {self._effects.index(effect): done}, result

    def clear_cache(self) -> None:
        """Trace and compile the function again when it is next called, as for `jax.jit`."""
        for jitted in (self._jitted, self._alone, self._inner):
            if jitted is not None:
                jitted.clear_cache()

    def __reduce__(self) -> str:
        """Copy and pickle it like a function: a copy is the function itself, a pickle its name."""
        return getattr(self, "__qualname__", self._name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self.__call__, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def __repr__(self) -> str:
        return f"dj.jit({self._name})"


def unequal(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same, but is equal to no other.

    Equal functions, as layers are, share JAX's traces until one of them is freed, which is sooner on some workers; and
    a worker whose block of a larger tensor has an earlier shape would not trace when the others do.
    """

    @wraps(fun)
    def other(*args: Any, **kwargs: Any) -> Any:
        know_arguments((args, kwargs))
        return fun(*args, **kwargs)

    return other


@cache
def _listen_for_compilations() -> None:
    def compiled(event: str, duration_secs: float, **kwargs: str | int) -> None:
        # JAX also reports a failed compilation, while its error propagates.
        if event == "/jax/core/compile/backend_compile_duration":
            check_for_nans_again()
            if sys.exc_info()[1] is trace_context.handled:
                trace_context.to_compile = False

    jax.monitoring.register_event_duration_secs_listener(compiled)


@dataclass(frozen=True)
class _Contribution:
    """A worker's program for the comparison: 64-bit numbers or not, operations, origins of values, masked leaves, and
    the calls before it."""

    x64: bool
    program: Program
    flow: Flow
    masked: tuple[str, ...]
    earlier: Earlier = field(compare=False)


_SEVERAL_WORLDS = (
    "communicates over several communicators, none of which has all of its workers, so its programs can't be compared. "
    "Make a partition of MPI.COMM_WORLD first."
)


def _result_of(traced: Any) -> dict[str, Any]:
    """Return the result of a traced function as `result`; nothing if a user's node accepts only arrays."""
    with suppress(Exception):
        return {"result": traced.out_info}
    return {}


def _variables(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what holds the constants of a traced function: itself, and its static arguments, by name."""
    return {"": fun, **static_arguments(fun, args, kwargs)}


def _compare(
    name: str,
    closed: ClosedJaxpr,
    variables: dict[str, Any],
    worlds: list[World],
    masked: tuple[str, ...],
) -> tuple[World | None, CallLog | None]:
    """Raise on all workers if the programs of the function don't complete together.

    Returns its world, if any; if all must call it, the log in which its calls count.
    """
    world, program, flow = _read(closed, worlds, variables)
    if world is None:
        log.warning("%s %s", name, _SEVERAL_WORLDS)
        return None, None
    if not program and not worlds and worker_status().is_beside_the_program:
        return world, None  # a loader's, for instance: it needs no other worker, and runs at any time
    world.check_devices()
    if world.size == 1:
        return world, None
    start, call_log = perf_counter(), world.calls
    earlier = Earlier(0, None) if call_log is None else call_log.earlier()
    x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined, unused-ignore]
    mine = _Contribution(x64, program, flow, masked, earlier)

    def decide(contributions: dict[int, _Contribution]) -> tuple[str | None, int | None]:
        programs = {worker: one.program for worker, one in contributions.items()}
        world.remember(name, programs)
        number = max(one.earlier.number for one in contributions.values()) + 1 if takes_all(programs) else None
        earlier = {worker: one.earlier for worker, one in contributions.items()}
        widths = {worker: "on" if one.x64 else "off" for worker, one in contributions.items()}
        if (problem := difference("jax_enable_x64", widths)) is not None:
            return problem, 0
        if (problem := different_masks({worker: one.masked for worker, one in contributions.items()})) is not None:
            return f"{name}: {problem}", 0
        if (different := different_earlier_calls(name, earlier)) is not None:
            return different[0], 0
        problem = problem_text(name, programs, {worker: one.flow for worker, one in contributions.items()})
        return problem, number

    # A worker that runs its operations one by one does not run the compared program.
    label = f"{PLAN_OF}{name}{' (jax_disable_jit)' if jax.config.jax_disable_jit else ''}"  # type: ignore[attr-defined, unused-ignore]
    everyone = tuple(range(world.size))
    problem, number = world.agree(everyone, label, mine, decide)
    log.info("the plan of %s was compared in %.1f ms", name, 1e3 * (perf_counter() - start))
    if problem is not None:
        if call_log is not None:
            call_log.cannot_compare()
        moved = world.agree(everyone, f"what is constant in {PLAN_OF}{name}", moved_constants(closed.jaxpr))
        raise PlanError(problem + constants_text(moved))
    if call_log is None or number is None:
        return world, None
    worker_status().agreed_on(call_log, number, name)
    return world, call_log


def _read(closed: ClosedJaxpr, worlds: list[World], variables: dict[str, Any]) -> tuple[World | None, Program, Flow]:
    """Return the world of a program that uses `worlds`, if any, and the program's communication."""
    for world in (world_of(worlds), world_of(())):
        with suppress(OutsideWorldError):
            if world is not None:
                return world, *read_flow(world.transport, closed.jaxpr, closed.consts, variables)
    return None, (), Flow()

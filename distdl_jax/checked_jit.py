"""`dj.jit` and `dj.check`: the workers' programs, compared before anything of them runs."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial, update_wrapper, wraps
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from distdl_jax.agreement.replay import Agreed
from distdl_jax.autodiff.constant_inputs import told_of_constants
from distdl_jax.compat import is_staged, is_transformed, set_last_program, wait_for_program
from distdl_jax.errors import PLAN_OF, PlanError, SetupError
from distdl_jax.programs.diagnosis import mismatch_text
from distdl_jax.programs.ir import Program
from distdl_jax.programs.matching import find_mismatch
from distdl_jax.programs.report import Report
from distdl_jax.tracing.effect_free_call import contained, inputs_unread
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.tracing.vmap_check import compared_as_a_whole
from distdl_jax.transports.open_world import world_of, worlds_used
from distdl_jax.validation import check_function
from distdl_jax.watchdog.call_log import CallLog, Earlier
from distdl_jax.watchdog.deadlock import different_earlier_calls
from distdl_jax.watchdog.dependencies import takes_all
from distdl_jax.watchdog.log import log
from distdl_jax.watchdog.status import WorkerStatus, worker_status
from distdl_jax.world import OutsideWorldError, World


def jit(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`jax.jit`, which also compares the workers' programs whenever the function is traced, before anything runs.

    On every new trace each worker reads off what it is about to communicate: which operation, with whom, how many
    elements of which dtype, also inside scans, conditionals, while loops, `jax.checkpoint` and nested jits. Worker 0
    plays the programs against each other; if one of them would wait for ever, or two partners do not mean the same,
    all workers raise the same `PlanError`, which names the workers, the operations and the source lines. After that
    a call costs a few microseconds, less than one of `jax.jit`, which JAX makes in Python where a program communicates.

    All workers of the world must call the function, and trace it in the same call: where a shape, dtype or static
    argument changes on some workers only, that is the error that they raise. Functions that some workers call alone
    (a metric on the root, say) go with `jax.jit`.

    **Arguments:**

    - `fun`: what to compile: a function or a method. Without it, a decorator is returned that takes it.
    - `options`: those of `jax.jit`: `static_argnums`, `static_argnames`, `donate_argnums`, ...

    **Returns:** what is called like `fun`. It has `jax.jit`'s attributes too (`lower`, `trace`, `clear_cache`, ...).

    **Raises:** `InvalidTypeError` where `fun` is no function; `PlanError`, on all workers, when called.

    >>> import jax.numpy as jnp
    >>> step = jit(lambda x: 2 * x)
    >>> float(step(jnp.float32(21)))
    42.0

    In a call under `jax.grad` the derivative's program is not compared; `jit` the function that takes the gradient.
    """
    return partial(jit, **options) if fun is None else CheckedFunction(fun, options)


def check(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Compare what `fun(*args, **kwargs)` would communicate on each worker, without running it.

    Collective in the world: all workers call it, each with its own arguments.

    **Arguments:**

    - `fun`: a function, jitted or not.
    - `args`, `kwargs`: what it would be called with; of arrays, only shapes and dtypes matter.

    **Returns:** a `Report`, the same on all workers: printed, it lists each worker's operations, messages and bytes;
    `report.ok` says whether the programs complete together, `report.problem` what doesn't fit; `report.picture()`
    draws who sends what to whom.

    >>> import jax.numpy as jnp
    >>> check(lambda x: 2 * x, jnp.ones(3)).ok
    True
    """
    check_function("fun", fun)
    name = function_name(fun)
    with worker_status().call(f"check of {name}"), worker_status().traced():
        traceable = fun if hasattr(fun, "trace") else jax.jit(_another(fun))
        with _unchecked(), worlds_used() as worlds:
            traced = traceable.trace(*args, **kwargs)
        world, program = _read(traced.jaxpr.jaxpr, worlds)
        if world is None:
            raise SetupError(f"{name} {_SEVERAL_WORLDS}")
        return world.agree(
            tuple(range(world.size)), f"the check of {name}", program, lambda programs: _report(name, programs)
        )


class CheckedFunction:
    """A jitted function whose program is compared between the workers on every trace; made by `jit`."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]) -> None:
        check_function("fun", fun)
        _hear_of_compilations()
        self._name = function_name(fun)
        self._inner: Any = jax.jit(_another(fun), **_of_the_inner_jit(options))
        # Where its calls count, by worker (of dj.simulate, too): nowhere if one trace counts, another doesn't.
        self._counts_in: WeakKeyDictionary[WorkerStatus, CallLog | None] = WeakKeyDictionary()
        # What was agreed on in its traces, by worker and by their arguments.
        self._agreed: WeakKeyDictionary[WorkerStatus, dict[Hashable, list[Agreed]]] = WeakKeyDictionary()
        self._effects: list[Any] = []  # those of the messages which it is known to send: by MPI, in dj.simulate

        @wraps(fun)
        def compared(*args: Any, **kwargs: Any) -> Any:
            if not _enclosing.compared:
                self._trace(args, kwargs)
            return self._inner(*args, **kwargs)

        @wraps(fun)
        def compared_alone(*args: Any, **kwargs: Any) -> tuple[dict[int, Array], Any]:
            traced, world = self._trace(args, kwargs)
            return self._contained(traced, world, args, kwargs)

        self._jitted: Any = jax.jit(compared, **options)
        # What is not part of anything else: with the array that is there when its program is done, if it communicates;
        # under the number of its effect, for another call of the same function may have another one. (What has an
        # address in its name would be a key of its own, in each process, in JAX's persistent cache.)
        self._alone: Any = None if _SHAPED_LIKE_THE_RESULT & set(options) else jax.jit(compared_alone, **options)
        # Not its __dict__, which is ours where `fun` wraps another checked function.
        update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        transformed = is_transformed()
        if transformed and is_staged():  # it is part of another one, and called no more once that is compiled
            return self._jitted(*args, **kwargs)
        status = worker_status()
        with status.call(self._name, self._counts_in.get(status)):
            _enclosing.to_compile = False
            try:
                if transformed or self._alone is None:
                    return self._jitted(*args, **kwargs)
                done, result = self._run(args, kwargs) if self._effects else self._alone(*args, **kwargs)
            except Exception as error:
                if _enclosing.to_compile:  # the caller may catch it, but the others wait
                    status.cannot_run(f"{type(error).__name__}: {error}"[:MOST_OF_AN_ERROR])
                raise
            for number, array in done.items():
                set_last_program(self._effects[number], array)
            return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that communicates: C++ has no frame, so the watchdog knows it by this one."""
        for effect in self._effects:
            wait_for_program(effect)
        return self._alone(*args, **kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, World | None]:
        """Trace it, and compare what it communicates; the traced program, and the world that it belongs to."""
        agreed, signature = self._agreed.setdefault(worker_status(), {}), _signature(args, kwargs)
        with worker_status().traced(agreed.get(signature)) as agreements:
            with _unchecked(), worlds_used() as worlds:
                traced = self._inner.trace(*args, **kwargs)
            world, log = _compare(self._name, traced.jaxpr.jaxpr, worlds)
            if not agreements.replayed:
                self._count_in(log)
        _enclosing.to_compile, _enclosing.handled = True, sys.exc_info()[1]
        if signature is not None:
            agreed[signature] = agreements.made
            if len(agreed) > MOST_SIGNATURES:
                del agreed[next(iter(agreed))]
        return traced, world

    def _contained(
        self, traced: Any, world: World | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[int, Array], Any]:
        effect = None if world is None else world.transport.effect
        if traced.jaxpr.effects != {effect} or not is_transformed():  # not traced: jax.disable_jit, jax_debug_nans
            return {}, self._inner(*args, **kwargs)
        if effect not in self._effects:
            self._effects.append(effect)
        wait_for_program(effect)
        leaves, structure = jax.tree.flatten((args, kwargs))
        dynamic = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
        # What it does not read is no argument of the program, as with jax.jit: it may be gone, or donated.
        unread = {dynamic[i] for i in inputs_unread(traced.jaxpr, len(dynamic))}
        arrays = [leaves[place] for place in dynamic if place not in unread]
        of_result: Any = None  # not that of `out_info`, whose leaves are no arrays: a user's node may ask them for more

        def of_arrays(*arrays: Array) -> list[Array]:
            nonlocal of_result
            given, whole = iter(arrays), list(leaves)
            for place in dynamic:
                like = leaves[place]
                whole[place] = jnp.zeros(like.shape, like.dtype) if place in unread else next(given)
            args, kwargs = jax.tree.unflatten(structure, whole)
            results, of_result = jax.tree.flatten(self._inner(*args, **kwargs))
            return results

        # One equation, the call: to lower it takes no second trace of all that it holds.
        done, results = contained(jax.make_jaxpr(of_arrays)(*arrays), effect, arrays)
        return {self._effects.index(effect): done}, jax.tree.unflatten(of_result, results)

    def clear_cache(self) -> None:
        """As that of `jax.jit`: the function is traced and compiled anew when it is called next."""
        for jitted in (self._jitted, self._alone, self._inner):
            if jitted is not None:
                jitted.clear_cache()

    def _count_in(self, log: CallLog | None) -> None:
        status = worker_status()
        self._counts_in[status] = log if self._counts_in.get(status, log) is log else None

    def __reduce__(self) -> str:
        """Copied and pickled as functions are: a copy is the function itself, a pickle its name."""
        return getattr(self, "__qualname__", self._name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self.__call__, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def __repr__(self) -> str:
        return f"dj.jit({self._name})"


MOST_OF_AN_ERROR = 2000
"""How many characters of a compiler's error the other workers are told."""

MOST_SIGNATURES = 64
"""For how many kinds of arguments a function's agreements are kept."""


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return what a trace depends on: equal for calls that JAX traces once; None where that can't be told."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined, unused-ignore]
        return None  # nothing is traced
    leaves, structure = jax.tree.flatten((args, kwargs))
    try:
        hash(signature := (structure, tuple(jax.typeof(x) if hasattr(x, "dtype") else x for x in leaves)))
    except TypeError:  # of something that is static, and a key for JAX by other means
        return None
    return signature


def _another(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does the same, but is equal to none.

    Equal ones, as layers are, share JAX's traces until one of them is gone, which is sooner on some workers; and a
    worker whose block of a larger tensor has the shape of one before would not trace what the others do.
    """

    @wraps(fun)
    def other(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    return other


_SHAPED_LIKE_THE_RESULT = {"out_shardings"}
"""The options that say something of each part of what the function returns."""


class _Enclosing(threading.local):
    """What `dj.jit` knows of this thread.

    - `compared`: whether an enclosing trace is compared, so that what is nested in it need not be.
    - `to_compile`: whether all have agreed on the plan of its call, and it has yet to compile its program.
    - `handled`: the exception that was being handled when they did.
    """

    compared = False
    to_compile = False
    handled: BaseException | None = None


_enclosing = _Enclosing()


@cache
def _hear_of_compilations() -> None:
    def compiled(event: str, duration_secs: float, **kwargs: str | int) -> None:
        # JAX says so of a compilation that fails, too, while its error passes.
        if event == "/jax/core/compile/backend_compile_duration" and sys.exc_info()[1] is _enclosing.handled:
            _enclosing.to_compile = False

    jax.monitoring.register_event_duration_secs_listener(compiled)


@contextmanager
def _unchecked() -> Iterator[None]:
    """Trace something that is compared as a whole."""
    before, _enclosing.compared = _enclosing.compared, True
    try:
        with compared_as_a_whole():
            yield
    finally:
        _enclosing.compared = before


@dataclass(frozen=True)
class _Told:
    """What a worker tells of its program: whether it has 64-bit numbers, its operations, what calls were before."""

    x64: bool
    program: Program
    earlier: Earlier = field(compare=False)


_SEVERAL_WORLDS = (
    "communicates over several communicators, none of which has all of its workers, so nobody can compare its "
    "programs. Make a partition of MPI.COMM_WORLD first."
)


def _compare(name: str, jaxpr: Any, worlds: list[World]) -> tuple[World | None, CallLog | None]:
    """Raise on all workers where the programs of the function don't complete together. The world that it belongs to,
    if it is one; where all must call it, the log that its calls count in."""
    world, program = _read(jaxpr, worlds)
    if world is None:
        log.warning("%s %s", name, _SEVERAL_WORLDS)
        return None, None
    if not program and not worlds and worker_status().is_beside_the_program:
        return world, None  # a loader's, say: it needs nobody, and comes to it when it likes
    world.check_devices()
    if world.size == 1:
        return world, None
    start, log_of_calls = perf_counter(), world.calls
    earlier = Earlier(0, None) if log_of_calls is None else log_of_calls.earlier()
    mine = _Told(bool(jax.config.jax_enable_x64), program, earlier)  # type: ignore[attr-defined, unused-ignore]

    def decide(told: dict[int, _Told]) -> tuple[str | None, int | None]:
        programs = {worker: theirs.program for worker, theirs in told.items()}
        world.remember(name, programs)
        number = max(theirs.earlier.number for theirs in told.values()) + 1 if takes_all(programs) else None
        wide = {worker for worker, theirs in told.items() if theirs.x64}
        if 0 < len(wide) < len(told):
            narrow = min(set(told) - wide)
            return (
                f"jax_enable_x64 must be the same on all workers, but it is on on {min(wide)} and off on {narrow}.",
                0,
            )
        different = different_earlier_calls(name, {worker: theirs.earlier for worker, theirs in told.items()})
        if different is not None:
            return different[0], 0
        mismatch = find_mismatch(programs)
        return (None if mismatch is None else mismatch_text(name, mismatch)), number

    # Whoever runs its operations one by one does not run what is compared.
    purpose = f"{PLAN_OF}{name}{' (jax_disable_jit)' if jax.config.jax_disable_jit else ''}"  # type: ignore[attr-defined, unused-ignore]
    problem, number = world.agree(tuple(range(world.size)), purpose, mine, decide)
    log.info("the plan of %s was compared in %.1f ms", name, 1e3 * (perf_counter() - start))
    if problem is not None:
        if log_of_calls is not None:
            log_of_calls.cannot_compare()
        raise PlanError(problem + told_of_constants(world, tuple(range(world.size)), f"{PLAN_OF}{name}", jaxpr))
    replayed = (agreements := worker_status().agreements) is not None and agreements.replayed
    if log_of_calls is None or number is None or replayed:
        return world, None
    worker_status().agreed_on(log_of_calls, number, name)
    return world, log_of_calls


def _read(jaxpr: Any, worlds: list[World]) -> tuple[World | None, Program]:
    """The world that a program which uses these belongs to, None where there is none; and what it communicates."""
    for world in (world_of(worlds), world_of(())):
        with suppress(OutsideWorldError):
            if world is not None:
                return world, read_program(world.transport, jaxpr)
    return None, ()


def _report(name: str, programs: dict[int, Program]) -> Report:
    mismatch = find_mismatch(programs)
    return Report(name, programs, None if mismatch is None else mismatch_text(name, mismatch))


def _of_the_inner_jit(options: dict[str, Any]) -> dict[str, Any]:
    """Those that a jitted function within another may have; the outer one has them all."""
    return {key: value for key, value in options.items() if not key.startswith(("donate", "compiler_options"))}


def function_name(fun: Callable[..., Any]) -> str:
    """A function as messages name it, the same on all workers: its name, and where it is defined."""
    fun = inspect.unwrap(fun)
    while isinstance(fun, partial):
        fun = inspect.unwrap(fun.func)
    code = getattr(fun, "__code__", None)
    name = getattr(fun, "__qualname__", type(fun).__name__).replace("<locals>.", "")
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"

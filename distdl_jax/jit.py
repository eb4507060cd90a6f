"""`dj.jit` and `dj.check`: the workers' programs, compared before anything of them runs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper, wraps
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from distdl_jax.backends.jaxpr_reader import read_program
from distdl_jax.backends.opening import first_world
from distdl_jax.errors import PlanError
from distdl_jax.programs.diagnosis import mismatch_text
from distdl_jax.programs.ir import Program
from distdl_jax.programs.matching import find_mismatch
from distdl_jax.programs.report import Report
from distdl_jax.watchdog.log import log
from distdl_jax.watchdog.status import worker_status


def jit(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`jax.jit`, which also compares the workers' programs whenever the function is traced, before anything runs.

    On every new trace each worker reads off what it is about to communicate: which operation, with whom, how many
    elements of which dtype, also inside scans, conditionals, while loops, `jax.checkpoint` and nested jits. Worker 0
    plays the programs against each other; if one of them would wait for ever, or two partners do not mean the same,
    all workers raise the same `PlanError`, which names the workers, the operations and the source lines. After that
    a call costs what a call of `jax.jit` does.

    All workers of the world must call the function, and trace it in the same call: where a shape, dtype or static
    argument changes on some workers only, that is the error that they raise. Functions that some workers call alone
    (a metric on the root, say) go with `jax.jit`.

    **Arguments:**

    - `fun`: what to compile: a function or a method. Without it, a decorator is returned that takes it.
    - `options`: those of `jax.jit`: `static_argnums`, `static_argnames`, `donate_argnums`, ...

    **Returns:** what is called like `fun`. It has `jax.jit`'s attributes too (`lower`, `trace`, `clear_cache`, ...).

    **Raises:** `PlanError`, on all workers, when called.

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
    name = _name_of(fun)
    with worker_status().call(f"check of {name}"):
        worker_status().tracing = True
        traceable = fun if hasattr(fun, "trace") else jax.jit(fun)
        with _unchecked():
            traced = traceable.trace(*args, **kwargs)
        world = first_world()
        program = read_program(world.transport, traced.jaxpr.jaxpr)
        return world.agree(
            tuple(range(world.size)), f"the check of {name}", program, lambda programs: _report(name, programs)
        )


class CheckedFunction:
    """A jitted function whose program is compared between the workers on every trace; made by `jit`."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]) -> None:
        self._name = _name_of(fun)
        self._inner = jax.jit(fun, **_of_the_inner_jit(options))

        @wraps(fun)
        def compared(*args: Any, **kwargs: Any) -> Any:
            if _enclosing.compared:
                return fun(*args, **kwargs)
            # Lowered, or inside a plain jax.jit, it is traced outside any call; what others do says nothing then.
            worker_status().tracing = worker_status().in_call
            try:
                with _unchecked():
                    traced = self._inner.trace(*args, **kwargs)
                _compare(self._name, traced.jaxpr.jaxpr)
            finally:
                worker_status().tracing = False
            return self._inner(*args, **kwargs)

        self._jitted = jax.jit(compared, **options)
        # Not its __dict__, which is ours where `fun` wraps another checked function.
        update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with worker_status().call(self._name):
            return self._jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self.__call__, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def __repr__(self) -> str:
        return f"dj.jit({self._name})"


class _Enclosing(threading.local):
    """Of this thread: whether an enclosing trace is compared, so that what is nested in it need not be."""

    compared = False


_enclosing = _Enclosing()


@contextmanager
def _unchecked() -> Iterator[None]:
    """Trace something that is compared as a whole."""
    before, _enclosing.compared = _enclosing.compared, True
    try:
        yield
    finally:
        _enclosing.compared = before


def _compare(name: str, jaxpr: Any) -> None:
    """Raise on all workers where the programs of the function don't complete together."""
    world = first_world()
    world.check_devices()
    if world.size == 1:
        return
    start = perf_counter()
    mine = (bool(jax.config.jax_enable_x64), read_program(world.transport, jaxpr))  # type: ignore[attr-defined, unused-ignore]

    def decide(told: dict[int, tuple[bool, Program]]) -> str | None:
        programs = {worker: program for worker, (_, program) in told.items()}
        world.remember(name, programs)
        wide = {worker for worker, (x64, _) in told.items() if x64}
        if 0 < len(wide) < len(told):
            narrow = min(set(told) - wide)
            return f"jax_enable_x64 must be the same on all workers, but it is on on {min(wide)} and off on {narrow}."
        mismatch = find_mismatch(programs)
        return None if mismatch is None else mismatch_text(name, mismatch)

    problem = world.agree(tuple(range(world.size)), f"the plan of {name}", mine, decide)
    log.info("the plan of %s was compared in %.1f ms", name, 1e3 * (perf_counter() - start))
    if problem is not None:
        raise PlanError(problem)


def _report(name: str, programs: dict[int, Program]) -> Report:
    mismatch = find_mismatch(programs)
    return Report(name, programs, None if mismatch is None else mismatch_text(name, mismatch))


def _of_the_inner_jit(options: dict[str, Any]) -> dict[str, Any]:
    """Those that a jitted function within another may have; the outer one has them all."""
    return {key: value for key, value in options.items() if not key.startswith(("donate", "compiler_options"))}


def _name_of(fun: Callable[..., Any]) -> str:
    """A function as messages name it, the same on all workers: its name, and where it is defined."""
    fun = inspect.unwrap(fun)
    while isinstance(fun, partial):
        fun = inspect.unwrap(fun.func)
    code = getattr(fun, "__code__", None)
    name = getattr(fun, "__qualname__", type(fun).__name__).replace("<locals>.", "")
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"

"""Tests of private parts of JAX: where one fails, it says what the part is for. And what they share."""

import inspect
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from jax.extend.core import Effect, Primitive
from jax.interpreters import mlir

tested: set[str] = set()
"""The names of those that tests were made for."""


def what_breaks(item: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test of `item`: where it fails, it says what the item is for and what would replace it."""
    tested.add(item.__name__)

    def explained(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                raise AssertionError(f"{item.__module__}.{item.__name__}: {inspect.getdoc(item)}") from error

        return run

    return explained


MOST_LOOKS = 3000
"""How often a thread looks, every 10 ms, before what it waits for counts as not there."""


def while_watched(look: Callable[[], bool], work: Callable[[threading.Event], None]) -> bool:
    """Return whether `look`, from another thread, was ever true while `work` ran; the event ends `work`."""
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


def calls(effect: Effect, called: list[Any]) -> Callable[[Any], Any]:
    """Make an operation that calls Python, in the order that `effect` keeps, and notes its operand and the thread."""
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

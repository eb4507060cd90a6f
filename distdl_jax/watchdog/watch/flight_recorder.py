"""The last operations of this worker, recorded while compiled programs run, if `DISTDL_JAX_DEBUG=1` is set.

A record costs a Python call from the compiled program; without the setting it is not compiled in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

from distdl_jax.settings import current_settings

OPERATIONS_REMEMBERED = 64

_records: deque[tuple[float, str, bool]] = deque(maxlen=2 * OPERATIONS_REMEMBERED)


@contextmanager
def recorded(operation: str, effect: Any) -> Iterator[None]:
    """Record the start and the end of the operation that is traced inside, in the order that `effect` keeps."""
    recording = current_settings().debug
    if recording:
        _record.bind(operation=operation, done=False, effect=effect)
    yield
    if recording:
        _record.bind(operation=operation, done=True, effect=effect)


def last_operations() -> list[str]:
    """Return a line for each recorded operation, the last one last: how long ago it started, and whether it ended."""
    now, lines = monotonic(), []
    records = list(_records)
    for place, (at, operation, done) in enumerate(records):
        if done:
            continue
        # Operations are sequential, so the next record is of this one's end.
        went_on = f"took {1e3 * (records[place + 1][0] - at):.3f} ms" if place + 1 < len(records) else "goes on"
        lines.append(f"{now - at:10.3f} s ago  {operation}: {went_on}")
    return lines


def _lowered(ctx: Any, *, operation: str, done: bool, effect: Any) -> Any:
    def write() -> tuple[()]:
        _records.append((monotonic(), operation, done))
        return ()

    # With the token of the operations themselves: XLA would move a call with another one, or without one, past them.
    results, token, _ = mlir.emit_python_callback(
        ctx, write, ctx.tokens_in.get(effect), [], ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return results


_record = Primitive("record")
_record.multiple_results = True
_record.def_effectful_abstract_eval(lambda *, operation, done, effect: ([], {effect}))
mlir.register_lowering(_record, _lowered, cacheable=False)

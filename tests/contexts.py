"""JAX lowers each program in an MLIR context of its own, and making one costs as much as compiling what is small.

So here each thread has one, which serves many programs. What is lowered is the same.
"""

import functools
import threading
from typing import Any

USES = 50  # what a context has been told of types and locations it keeps: then comes a new one


@functools.cache
def keep() -> None:
    """Keep one context for each thread, from now on.

    By a private function of jax; where it is gone, each program has a context of its own.
    """
    from jax._src.interpreters import mlir

    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    mine = threading.local()

    def shared_context() -> Any:
        uses = getattr(mine, "uses", 0)
        if uses % USES == 0:
            mine.context = make()
        mine.uses = uses + 1
        return mine.context

    mlir.make_ir_context = shared_context

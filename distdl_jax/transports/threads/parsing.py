"""One thread at a time turns text into Python's syntax trees, as `np.load` does with the header of every array.

Before Python 3.13 all threads share one counter of how deep such a tree is (python/cpython#106905). Another thread may
run in the middle of it, when garbage is collected, and `ast.parse` raises a SystemError.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_usual: Any = ast.parse
_one_parses = threading.RLock()
_counting = threading.Lock()
_runs = 0


def _parse_alone(*args: Any, **kwargs: Any) -> Any:
    with _one_parses:
        return _usual(*args, **kwargs)


@contextmanager
def one_parses_at_a_time() -> Iterator[None]:
    """Inside, `ast.parse` and `ast.literal_eval` are safe in all threads. Several runs may overlap."""
    global _runs
    if sys.version_info >= (3, 13):
        yield
        return
    with _counting:
        _runs += 1
        ast.parse = _parse_alone
    try:
        yield
    finally:
        with _counting:
            _runs -= 1
            if _runs == 0:
                ast.parse = _usual

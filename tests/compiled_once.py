"""What the workers of one process compile is compiled once: a third of it was, by another thread or test.

By JAX's persistent cache, in a folder of this process, without MPI. JAX keeps no program with Python callbacks.
"""

import atexit
import functools
import shutil
import tempfile
import threading
from typing import Any


@functools.cache
def begin() -> None:
    """Compile each program once in this process, from now on."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compilation_cache.reset_cache()  # programs that were compiled before have found that there is none
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _wait_for_each_other()


def _wait_for_each_other() -> None:
    """Let one of the threads that come with one program compile it, and the others wait.

    By private functions of jax; where they are gone, each compiles for itself.
    """
    from jax._src import compiler

    get_key, compile_ = (getattr(compiler, name, None) for name in ("_get_cache_key", "compile_or_get_cached"))
    if get_key is None or compile_ is None:
        return
    locks: dict[str, threading.Lock] = {}
    mine = threading.local()

    def get_key_and_turn(*args: Any, **options: Any) -> str | None:
        key: str | None = get_key(*args, **options)
        if key is not None:
            lock = locks.setdefault(key, threading.Lock())
            lock.acquire()
            mine.held.append(lock)
        return key

    def compile_in_turn(*args: Any, **options: Any) -> Any:
        mine.held = []
        try:
            return compile_(*args, **options)
        finally:
            for lock in mine.held:
                lock.release()

    compiler._get_cache_key, compiler.compile_or_get_cached = get_key_and_turn, compile_in_turn

"""A program's file on many workers in one process, each with modules of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType

from distdl_jax.transports.threads.current_world import simulated_world
from distdl_jax.transports.threads.imports import ModuleOfEachWorker, modules_of_each_worker
from distdl_jax.transports.threads.simulate import simulate


def simulate_script(n: int, path: str, arguments: Sequence[str] = ()) -> None:
    """Run the file `path` on `n` workers as `python path *arguments` would on each, with `dj.simulate`.

    Every worker has its own `__main__`, and its own copy of the modules that stand beside the file.
    """
    code = compile(Path(path).read_bytes(), path, "exec")
    main = ModuleOfEachWorker("__main__")
    folder = str(Path(path).resolve().parent)
    with _as_a_script(main, [path, *arguments], folder), modules_of_each_worker(folder):
        try:
            simulate(n, _run, main, code, path)
        except SystemExit as end:
            # Python ends in silence then; who looks at several workers wants to know which of them it was.
            print(f"SystemExit({end.code!r}):", *getattr(end, "__notes__", ()), file=sys.stderr)
            raise


def _run(main: ModuleOfEachWorker, code: CodeType, path: str) -> None:
    """Run the program on this worker."""
    names = {"__name__": "__main__", "__file__": path, "__doc__": None, "__builtins__": __builtins__}
    main.of_worker[simulated_world.value] = names
    exec(code, names)


@contextmanager
def _as_a_script(main: ModuleType, arguments: list[str], folder: str) -> Iterator[None]:
    """Set up the process as a script finds it."""
    before = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv, sys.path, sys.modules["__main__"] = arguments, [folder, *sys.path], main
    try:
        yield
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = before

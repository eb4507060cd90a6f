"""`dj.simulate`, and `python -m distdl_jax --simulate`: a program on many workers in one process."""

from __future__ import annotations

import ctypes
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from html import escape
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

import jax

from distdl_jax.errors import InvalidTypeError, SetupError
from distdl_jax.text import tint
from distdl_jax.transports.threads.current_world import simulated_world, where_none_runs
from distdl_jax.transports.threads.whole_lines import whole_lines
from distdl_jax.transports.threads.workers import Workers
from distdl_jax.validation import checked_integer
from distdl_jax.watchdog.error_text import error_text, show_own_lines

R = TypeVar("R")

_MOST_WORKERS = 2**13
"""Linux limits a process to some 30,000 threads, and each worker has three or more."""


def simulate(n: int, program: Callable[..., R], *args: Any) -> list[R]:
    """Run `program(*args)` on `n` workers in this process, each in a thread, without `mpirun` and without MPI.

    In the program `dj.Partition()` is the partition of the `n` workers, and everything works as over MPI: jit, all
    transformations, agreements, `dj.jit` and `dj.check`, and the errors. Every worker has its own CPU device. A
    function that the workers share is traced and compiled for each of them, and again in every call of `simulate`,
    which frees its programs, and JAX's other caches with them, when it ends.

    An error that would make workers wait for ever is detected when they begin to wait: all of them raise immediately.
    An exception on one worker ends the others. As in the comparison of `dj.jit`, a send waits for its receive: a
    program that completes over MPI only because small messages are buffered raises here.

    The contexts around the call hold on every worker: JAX's settings, such as `jax.enable_x64` and `jax.debug_nans`,
    and Python's and numpy's contexts.

    In a Jupyter notebook, the workers' output is shown side by side, one column for each worker. Ctrl-C, or the button
    that interrupts the kernel, ends all workers.

    **Arguments:**

    - `n`: the number of workers, 1 to 8192.
    - `program`: called on each worker. It must make its partitions itself; its external effects (globals, files,
      `jax.config`) are shared by all workers.
    - `args`: its arguments. All workers get the same objects.

    **Returns:** the list of results of `program` on worker 0, 1, ...

    **Raises:** the first error of any worker, with a note that names it; `PlanError` if workers would wait for
    ever; `SetupError` inside another `simulate`.

    >>> import jax, distdl_jax as dj
    >>> def program(n):
    ...     P = dj.Partition()
    ...     return int(dj.functional.all_sum_reduce(n + jax.numpy.arange(P.rank, P.rank + 1), P, axes_keep=())[0])
    >>> dj.simulate(4, program, 10)
    [46, 46, 46, 46]
    """
    if simulated_world.value is not None:
        raise SetupError("A program that runs in dj.simulate can't call dj.simulate itself.")
    if not callable(program):
        raise InvalidTypeError(f"`program` (={program!r}) must be a function; it is called on every worker.")
    size = checked_integer("n", n, least=1, most=_MOST_WORKERS)
    with whole_lines(), shown_by_worker() as columns:
        workers = Workers(size, each_turn=columns.show if columns else None)
        try:
            return workers.run(program, *args)
        except BaseException as error:
            show_own_lines(error)
            if columns:
                show_as_text(error)
            raise
        finally:
            workers.close()
            where_none_runs(_free_programs)


def _free_programs() -> None:
    """Free programs compiled for former workers: JAX's caches key them by world, and never use them again.

    The caches belong to the process. They are kept if an MPI world is open: a worker that traced again a function that
    the others have cached would wait for them.
    """
    mpi = sys.modules.get("distdl_jax.transports.mpi.world")
    if mpi is not None and mpi.opened:
        return
    jax.clear_caches()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps memory freed by threads
        trim(0)


def simulate_script(n: int, path: str, arguments: Sequence[str] = ()) -> None:
    """Run the file `path` on `n` workers like `python path *arguments` on each, with `dj.simulate`.

    Every worker has its own `__main__`. Imported modules are shared by all workers.
    """
    code, main = compile(Path(path).read_bytes(), path, "exec"), _MainOfEachWorker()
    before = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv, sys.path = [path, *arguments], [str(Path(path).resolve().parent), *sys.path]
    sys.modules["__main__"] = main
    try:
        simulate(n, _run, main, code, path)
    except SystemExit as end:
        # Python ends silently then; with several workers it matters which of them it was.
        print(f"SystemExit({end.code!r}):", *getattr(end, "__notes__", ()), file=sys.stderr)
        raise
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = before


class _MainOfEachWorker(ModuleType):
    """Replace `__main__` in `sys.modules`: a worker's thread sees that worker's names, for pickle and dataclasses."""

    def __init__(self) -> None:
        super().__init__("__main__")
        self.namespaces: dict[Any, dict[str, Any]] = {}

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return self.namespaces.get(simulated_world.value, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module '__main__' has no attribute {name!r}") from None


def _run(main: _MainOfEachWorker, code: CodeType, path: str) -> None:
    """Run the program on this worker."""
    names = {"__name__": "__main__", "__file__": path, "__doc__": None, "__builtins__": __builtins__}
    main.namespaces[simulated_world.value] = names
    exec(code, names)


# --- the workers' output in a notebook ---

MOST = 100_000
"""Characters up to which the table is refreshed while the workers run: a front end always gets all of it."""

CELL = "vertical-align: top; text-align: left; padding: 2px 10px"
TEXT = "margin: 0; background: none; font-family: monospace"


class Columns:
    """Replaces `sys.stdout`: stores the output of each worker separately, and forwards all other output."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual
        self._texts: defaultdict[int, str] = defaultdict(str)
        self._shown: tuple[Any, int] | None = None  # a display handle, and the number of characters that it shows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def write(self, text: str) -> int:
        if simulated_world.value is None:
            return int(self._usual.write(text))
        self._texts[simulated_world.value.rank] += text  # in the worker's own thread
        return len(text)

    def show(self, is_end: bool = False) -> None:
        """Show the output, if there is more than before."""
        size = sum(map(len, list(self._texts.values())))
        if not size or (self._shown and (size == self._shown[1] or (size > MOST and not is_end))):
            return
        from IPython.display import display

        table = Table({rank: self._texts[rank] for rank in sorted(self._texts)})
        if self._shown:
            self._shown[0].update(table)
        self._shown = (self._shown[0] if self._shown else display(table, display_id=True), size)


def show_as_text(error: BaseException) -> None:
    """Have IPython show an error as a program in a file would, in few lines, with the names of its cells."""
    if not isinstance(error, Exception):
        return

    def lines() -> list[str]:
        compiler = getattr(sys.modules["IPython"].get_ipython(), "compile", None)
        name_of = getattr(compiler, "format_code_name", lambda file: None)
        text = re.sub(
            r'^  File "(.*)", line (\d+)',
            lambda found: f"  {' '.join(name)}, line {found[2]}" if (name := name_of(found[1])) else found[0],
            error_text(error),
            flags=re.MULTILINE,
        )
        return text.rstrip("\n").split("\n")

    with suppress(Exception):  # a class without attributes
        vars(error)["_render_traceback_"] = lines


class Table:
    """Texts of workers for a front end: HTML, or text with one worker after another."""

    def __init__(self, texts: dict[int, str]) -> None:
        self._texts = texts

    def _repr_html_(self) -> str:
        heads = (f'<th style="{CELL}; background: {tint(w)}; color: black">worker {w}</th>' for w in self._texts)
        cells = (
            f'<td style="{CELL}"><pre style="{TEXT}">{escape(text.rstrip())}</pre></td>'
            for text in self._texts.values()
        )
        rows = f"<tr>{''.join(heads)}</tr><tr>{''.join(cells)}</tr>"
        return f'<div style="overflow-x: auto"><table>{rows}</table></div>'

    def __repr__(self) -> str:
        return "\n".join(f"worker {w}\n{text.rstrip()}" for w, text in self._texts.items())


@contextmanager
def shown_by_worker() -> Iterator[Columns | None]:
    """Inside, show the workers' output side by side if an IPython kernel runs; otherwise do nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        yield None
        return
    columns = Columns(sys.stdout)
    with redirect_stdout(columns):
        try:
            yield columns
        finally:
            columns.show(is_end=True)

"""The worker of `python -m distdl_jax`: runs a program like `python`, and knows its exit status in time."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder

import atexit
import builtins
import faulthandler
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

if __name__ == "__main__":  # the supervisor's own library, and nothing else from that folder
    sys.path.insert(0, str(Path(__file__).parents[3]))
    import_module("distdl_jax")
    del sys.path[0]

from distdl_jax.watchdog.error_text import error_text, show_own_lines
from distdl_jax.watchdog.launch import supervised
from distdl_jax.watchdog.launch.launcher import job_rank, job_size
from distdl_jax.watchdog.launch.said_once import SaidOnce


def main(arguments: Sequence[str]) -> None:
    """Run `python *arguments` in this process."""
    supervised.connect()
    atexit.register(_leave_if_forked, os.getpid())  # first of all, and therefore called last
    if job_size() > 1:
        _show_stacks()
        _write_whole_lines()
    if arguments[0] in ("-m", "-c"):
        run = run_module if arguments[0] == "-m" else run_code
        run(arguments[1], arguments[2:])
    else:
        run_file(arguments[0], arguments[1:])


def _show_stacks() -> None:
    """Make Python write the stack if SIGTERM or a fatal signal ends this process; a program's handler wins."""
    with suppress(Exception):  # nothing to write to
        faulthandler.enable()
        faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
        # A pool ends its processes by SIGTERM.
        os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))


def _write_whole_lines() -> None:
    """Have Python write whole lines, also after `python -u`: the launcher puts others' lines between two pieces."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def _leave_if_forked(worker: int) -> None:
    """End a process that the worker has forked here: MPI, and XLA's threads, belong to the worker."""
    if os.getpid() != worker:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(supervised.exit_status or 0)


def run_file(path: str, arguments: Sequence[str] = ()) -> None:
    """Run `python path *arguments`: a file, or a folder or zip file with a `__main__.py`.

    **Raises:** `SystemExit`, with a message, if there is no such file.
    """
    folder = os.path.join(os.getcwd(), path)
    spec = PathFinder.find_spec("__main__", [folder])
    if spec is not None and spec.loader is not None:
        _set_first_path(folder)
        _run_spec(spec, [path, *arguments])
        return
    if not Path(path).is_file():
        raise SystemExit(f"{sys.executable}: there is no file {path!r}, nor a folder with a __main__.py.")
    file = str(Path(path).absolute())
    _set_first_path(str(Path(path).resolve().parent))
    loader = SourceFileLoader("__main__", file)
    _run(lambda: compile(Path(file).read_bytes(), file, "exec"), [path, *arguments], file, loader)


def run_code(text: str, arguments: Sequence[str] = ()) -> None:
    """Run `python -c text *arguments`."""
    _set_first_path("")
    _run(lambda: compile(text, "<string>", "exec"), ["-c", *arguments])


def run_module(name: str, arguments: Sequence[str] = ()) -> None:
    """Run `python -m name *arguments`.

    **Raises:** `SystemExit`, with a message, if there is no such module.
    """
    if not name.startswith("distdl_jax."):  # one of the library's commands
        _set_first_path(os.getcwd())
    sys.argv = ["-m", *arguments]
    spec = _find_program(name)
    _run_spec(spec, [str(spec.origin), *arguments])


def _run_spec(spec: ModuleSpec, argv: list[str]) -> None:
    loader: Any = spec.loader
    _run(lambda: loader.get_code(spec.name), argv, spec.origin, loader, spec)


def _set_first_path(folder: str) -> None:
    """Put a folder first in `sys.path`, where Python would."""
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _find_program(name: str) -> ModuleSpec:
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = find_spec(name)
    except (ImportError, ValueError) as error:
        raise SystemExit(f"{sys.executable}: -m {name} can't be imported ({type(error).__name__}: {error}).") from error
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise SystemExit(f"{sys.executable}: there is no module {name} that can be run.")
    return spec


def _run(
    code: Any, argv: list[str], file: str | None = None, loader: Any = None, spec: ModuleSpec | None = None
) -> None:
    """Run the code object from `code` as the main module of this process."""
    main: Any = ModuleType("__main__")
    main.__annotations__, main.__builtins__, main.__loader__, main.__spec__ = {}, builtins, loader, spec
    main.__package__ = None if spec is None else spec.parent
    if file is not None:
        main.__file__, main.__cached__ = file, None if spec is None else spec.cached
    sys.modules["__main__"], sys.argv = main, argv
    try:
        try:
            _execute(code(), main)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            _show(error)
            raise SystemExit(1) from None
    except SystemExit as leaving:
        supervised.program_has_ended(_exit_status(leaving.code))
        raise
    except KeyboardInterrupt:
        supervised.exit_status = 128 + signal.SIGINT
        raise


def _show(error: BaseException) -> None:
    """Print the error that ended the program, as Python does; a hook may leave by `sys.exit`, or fail."""
    error.__traceback__ = trace = _of_the_program(error.__traceback__)
    try:
        if sys.excepthook is sys.__excepthook__:
            _print_once(error)
        else:
            sys.excepthook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as second:
        second.__context__, second.__traceback__ = None, _of_the_program(second.__traceback__)
        with suppress(Exception):  # nothing to write to
            for title, each in (("Error in sys.excepthook:", second), ("\nOriginal exception was:", error)):
                sys.stderr.write(f"{title}\n")
                sys.__excepthook__(type(each), each, each.__traceback__)


def _print_once(error: BaseException) -> None:
    """Print an error of a worker that has no partition with others yet; once for all workers of a host."""
    if job_size() == 1:
        show_own_lines(error)
        sys.__excepthook__(type(error), error, error.__traceback__)
        return
    text = error_text(error)
    said = SaidOnce(text, job_rank() or 0)
    if said.is_first:
        _write(text)
    else:
        supervised.tell(supervised.SAID)
    _write(said.end())


def _write(text: str) -> None:
    with suppress(Exception):  # nothing to write to
        sys.stderr.write(text)
        sys.stderr.flush()


def _execute(code: CodeType, main: ModuleType) -> None:
    exec(code, main.__dict__)


def _exit_status(code: object) -> int:
    """Return Python's exit status for an argument of `SystemExit`; not 0 if it would be truncated to 0 (256)."""
    if isinstance(code, int):
        return int(code) and (code & 0xFF or 1)
    return int(code is not None)


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback outside this file; all of it if that is empty (a syntax error)."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])

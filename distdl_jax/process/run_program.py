"""`python -m distdl_jax program.py`: a program run as `python` runs it, but that whatever ends it is seen."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from distdl_jax.watchdog.abort import end_the_job, is_forked
from distdl_jax.watchdog.exit_hooks import exit_status
from distdl_jax.watchdog.status import worker_status


def run_file(path: str, arguments: Sequence[str] = ()) -> None:
    """As `python path *arguments`."""
    file = str(Path(path).absolute())
    _set_first_path(str(Path(path).resolve().parent))
    loader = SourceFileLoader("__main__", file)
    _run(lambda: compile(Path(file).read_bytes(), file, "exec"), [path, *arguments], file, loader)


def run_code(text: str, arguments: Sequence[str] = ()) -> None:
    """As `python -c text *arguments`."""
    _set_first_path("")
    _run(lambda: compile(text, "<string>", "exec"), ["-c", *arguments])


def run_module(name: str, arguments: Sequence[str] = ()) -> None:
    """As `python -m name *arguments`.

    **Raises:** `SystemExit`, with a sentence, where there is no such module.
    """
    _set_first_path(os.getcwd())
    sys.argv = ["-m", *arguments]
    spec = _find_program(name)
    loader: Any = spec.loader
    _run(lambda: loader.get_code(spec.name), [str(spec.origin), *arguments], spec.origin, loader, spec)


def _set_first_path(folder: str) -> None:
    """What Python has put there is the current folder, for -m; nothing where it was told to put nothing there."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


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
    """Run what `code` returns as the main module of this process."""
    main: Any = ModuleType("__main__")
    main.__annotations__, main.__loader__, main.__spec__ = {}, loader, spec
    main.__package__ = None if spec is None else spec.parent
    if file is not None:
        main.__file__, main.__cached__ = file, None if spec is None else spec.cached
    sys.modules["__main__"], sys.argv = main, argv
    try:
        _execute(code(), main)
    except SystemExit as leaving:
        if not is_forked():
            worker_status().exit_status = exit_status(leaving.code)
        raise
    except BaseException as error:
        if is_forked() or (isinstance(error, KeyboardInterrupt) and worker_status().size == 1):
            raise
        _end(error)


def _execute(code: CodeType, main: ModuleType) -> None:
    exec(code, main.__dict__)


def _end(error: BaseException) -> None:
    """Say what has ended the program, by the hook that is there now, and end the job, whatever hook that is."""
    error.__traceback__ = trace = _of_the_program(error.__traceback__)
    sys.excepthook(type(error), error, trace)
    if (status := worker_status()).size > 1:
        end_the_job(f"Worker {status.rank} of {status.size} raised {type(error).__name__}: {error}; the job ends.\n")
    raise SystemExit(1)


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback outside this file; all of it where that is nothing (a syntax error)."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace

"""A program's file on many workers in one process, each with modules of its own.

A module that makes its partitions when it is imported is one module a process over MPI. Threads would share it, and
all workers would be the one that imported it first.
"""

from __future__ import annotations

import builtins
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

from distdl_jax.transports.threads.current_world import simulated_world
from distdl_jax.transports.threads.simulate import simulate


@contextmanager
def modules_of_each_worker(folder: str) -> Iterator[None]:
    """Inside, `import` statements give each worker its own copies of the modules and packages in `folder`."""
    usual: Any = builtins.__import__
    modules = _Modules(folder, usual)
    builtins.__import__ = cast(Any, modules.import_statement)
    try:
        yield
    finally:
        builtins.__import__ = usual
        for name in modules.shown:
            sys.modules.pop(name, None)


class ModuleOfEachWorker(ModuleType):
    """What a name in `sys.modules` stands for: in each worker's thread its own module, for pickle and dataclasses."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.of_worker: dict[Any, dict[str, Any]] = {}

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return self.of_worker.get(simulated_world.value, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None


class _Modules:
    """The modules in one folder, by worker and name."""

    def __init__(self, folder: str, usual: Any) -> None:
        self._folder = folder
        self._usual = usual
        self._of_worker: dict[Any, dict[str, ModuleType]] = {}
        self.shown: dict[str, ModuleOfEachWorker] = {}

    def import_statement(
        self,
        name: str,
        globals: dict[str, Any] | None = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import as an `import` statement does."""
        full = name if level == 0 else importlib.util.resolve_name("." * level + name, (globals or {})["__package__"])
        if simulated_world.value is None or not self._is_local(full.partition(".")[0]):
            module: ModuleType = self._usual(name, globals, locals, fromlist, level)
            return module
        found = self._module(full)
        if not fromlist:
            return found if level else self._module(full.partition(".")[0])
        if hasattr(found, "__path__"):
            for item in fromlist:
                if item != "*" and not hasattr(found, item):
                    self._module(f"{full}.{item}")
        return found

    def _is_local(self, top: str) -> bool:
        if top in self.shown:
            return True
        # What was imported before the workers began, they share.
        return top not in sys.modules and PathFinder.find_spec(top, [self._folder]) is not None

    def _module(self, name: str) -> ModuleType:
        """Return this worker's module of the name, executed when it is first asked for."""
        mine = self._of_worker.setdefault(simulated_world.value, {})
        if name in mine:
            return mine[name]
        package, _, last = name.rpartition(".")
        parent = self._module(package) if package else None
        if name in mine:  # the package itself has imported it
            return mine[name]
        spec = PathFinder.find_spec(name, [self._folder] if parent is None else list(parent.__path__))
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        mine[name] = module = importlib.util.module_from_spec(spec)
        shown = self.shown.setdefault(name, ModuleOfEachWorker(name))
        shown.of_worker[simulated_world.value] = vars(module)
        sys.modules[name] = shown
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del mine[name]
            raise
        if parent is not None:
            setattr(parent, last, module)
        return module


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

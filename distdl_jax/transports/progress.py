"""The progress of long work, on worker 0 only: by tqdm where it is installed, otherwise a line at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import length_hint
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from distdl_jax.errors import InvalidTypeError
from distdl_jax.settings import shows_progress
from distdl_jax.validation import checked_integer
from distdl_jax.watchdog.launch.launcher import job_rank

if TYPE_CHECKING:
    from distdl_jax.transports.world import World

T = TypeVar("T")

LONG = 10.0
"""Seconds of work after which a line is printed at its end, and between two lines of tqdm in a log."""

BAR_AFTER = 1.0
"""Seconds before a bar appears."""


@overload
def progress(
    iterable: Iterable[T], *, total: int | None = None, label: str = "", unit: str = "step"
) -> Progress[T]: ...


@overload
def progress(*, total: int | None = None, label: str = "", unit: str = "step") -> Progress[Any]: ...


def progress(
    iterable: Iterable[Any] | None = None, *, total: int | None = None, label: str = "", unit: str = "step"
) -> Progress[Any]:
    """Return an iterable of the same items, which shows on worker 0 of the job how far its loop is.

    It is a bar of [tqdm](https://tqdm.github.io) on stderr, if tqdm is installed (`pip install
    'distdl_jax[progress]'`); otherwise a line at the end of work that takes 10 seconds or more. Other workers write
    nothing. `DISTDL_JAX_PROGRESS=0` turns it off.

    It sends no messages, so it may be used on some workers only, inside and outside of `dj.simulate`.

    **Arguments:**

    - `iterable`: the items. Omit it for work that is not a loop, and call `advance` of the result inside a `with`.
    - `total`: the number of units. Default: the length of `iterable`, if it has one.
    - `label`: a description of the work.
    - `unit`: the name of one unit; "B" for bytes.

    **Returns:** a `Progress`.

    **Raises:** `InvalidArgumentError`, `InvalidTypeError` for invalid arguments.

    >>> import distdl_jax as dj
    >>> sum(dj.progress(range(5), label="training"))
    10
    >>> with dj.progress(total=2**30, label="download", unit="B") as shown:
    ...     shown.advance(2**29)
    """
    if total is not None:
        total = checked_integer("total", total, 0)
    elif iterable is not None and (length := length_hint(iterable, -1)) >= 0:
        total = length
    for name, value in (("label", label), ("unit", unit)):
        if not isinstance(value, str):
            raise InvalidTypeError(f"`{name}` (={value!r}) must be a string.")
    return Progress(() if iterable is None else iterable, total, label, unit, _is_worker_0())


class Progress(Generic[T]):
    """The result of `dj.progress`: items to iterate over, or work whose progress `advance` reports.

    >>> import distdl_jax as dj
    >>> [item for item in dj.progress("ab")]
    ['a', 'b']
    """

    def __init__(self, items: Iterable[T], total: int | None, label: str, unit: str, shows: bool) -> None:
        """`shows`: whether this worker shows it."""
        self._items, self._total, self._label, self._unit = items, total, label, unit
        self._shows = shows and shows_progress()
        self._done, self._began = 0, time.monotonic()
        self._bar: Any = None

    def __iter__(self) -> Iterator[T]:
        with self:
            for item in self._items:
                yield item
                self.advance()

    def __enter__(self) -> Progress[T]:
        self._began = time.monotonic()
        self._bar = _bar(self._total, self._label, self._unit) if self._shows else None
        return self

    def advance(self, count: int = 1) -> None:
        """Report that `count` more units are done. Not collective."""
        self._done += count
        if self._bar is not None:
            with suppress(Exception):  # whatever stderr is, a closed one, too: it must not end the work
                self._bar.update(count)

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            seconds = time.monotonic() - self._began
            if self._bar is not None:
                self._bar.close()
            elif self._shows and seconds >= LONG and sys.stderr is not None:  # `print` would write to stdout
                print(self._line(seconds), file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        """Return the line at the end.

        >>> Progress((), None, "checkpoint", "B", False)._line(20.0)
        'checkpoint: 0 MiB in 20 s'
        """
        size, unit = (2**20, "MiB") if self._unit == "B" else (1, self._unit + "s" * (self._done != 1))
        return f"{self._label}{': ' * bool(self._label)}{self._done / size:.0f} {unit} in {seconds:.0f} s"


def bytes_shown(world: World, label: str, total: int) -> Progress[Any]:
    """Return the progress of a worker's bytes, including for a thread that belongs to a worker of `dj.simulate`."""
    return Progress((), total, label, "B", world.rank == 0)


def _is_worker_0() -> bool:
    """Return whether this is worker 0 of the job, or of the simulation, without opening a world."""
    if current := sys.modules.get("distdl_jax.transports.threads.current_world"):
        if (world := current.simulated_world.value) is not None:
            return bool(world.rank == 0)
        if current.simulations_run() and threading.current_thread() is not threading.main_thread():
            return False  # a thread of one of its workers, but it is unknown which
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized() and not mpi.Is_finalized():
        return bool(mpi.COMM_WORLD.rank == 0)
    return not job_rank()


def _bar(total: int | None, label: str, unit: str) -> Any:
    """Return a tqdm bar; None without tqdm, or where it can't write."""
    size: dict[str, Any] = {"unit": f" {unit}"}
    if unit == "B":
        size = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    try:
        from tqdm import tqdm

        every = 0.1 if sys.stderr.isatty() else LONG  # a bar in a log is a line each time
        kind: Any = type("Bar", (tqdm,), {"monitor_interval": 0})  # without its thread
        kind.set_lock(threading.RLock())  # nor its lock between processes
        options = {"delay": BAR_AFTER, "mininterval": every, "dynamic_ncols": True, **size}
        return kind(total=total, desc=label or None, **options)
    except Exception:  # no tqdm, or a program's own object in place of stderr
        return None

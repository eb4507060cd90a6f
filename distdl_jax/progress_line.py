"""How far long work is, on worker 0 alone: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from operator import length_hint
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from distdl_jax.errors import InvalidTypeError
from distdl_jax.launch.launcher import job_rank
from distdl_jax.settings import shows_progress
from distdl_jax.validation import checked_integer

if TYPE_CHECKING:
    from distdl_jax.world import World

T = TypeVar("T")

EVERY = 10.0
"""Seconds between two plain lines, and before the first."""

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

    On a terminal it is a bar of [tqdm](https://tqdm.github.io), where tqdm is installed (`pip install
    'distdl_jax[progress]'`). Elsewhere, in a job's log say, it is a plain line on stderr, at most every 10 seconds;
    work that ends before writes nothing. Other workers write nothing. `DISTDL_JAX_PROGRESS=0` turns it off.

    No worker sends a message for it, so it may be used on some workers only, inside and outside of `dj.simulate`.

    **Arguments:**

    - `iterable`: the items. Leave it out for work that is no loop, and call `advance` of the result inside a `with`.
    - `total`: how many units there are. Default: the length of `iterable`, where it has one.
    - `label`: what the work is.
    - `unit`: the name of one unit; "B" for bytes.

    **Returns:** a `Progress`.

    **Raises:** `InvalidArgumentError`, `InvalidTypeError` for what these can't be.

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
            raise InvalidTypeError(f"`{name}` (={value!r}) must be a text.")
    return Progress(() if iterable is None else iterable, total, label, unit, _is_worker_0())


class Progress(Generic[T]):
    """What `dj.progress` returns: items to go through, or work of which `advance` says how much is done.

    >>> import distdl_jax as dj
    >>> [item for item in dj.progress("ab")]
    ['a', 'b']
    """

    def __init__(self, items: Iterable[T], total: int | None, label: str, unit: str, shows: bool) -> None:
        """`shows`: whether this worker is the one that shows it."""
        self._items, self._total, self._label, self._unit = items, total, label, unit
        self._shows = shows and shows_progress()
        self._done = 0
        self._bar: Any = None
        self._begin()

    def _begin(self) -> None:
        self._began = self._last = time.monotonic()
        self._has_written = False

    def __iter__(self) -> Iterator[T]:
        return self._shown_items() if self._shows else iter(self._items)

    def _shown_items(self) -> Iterator[T]:
        with self:
            for item in self._items:
                yield item
                self.advance()

    def __enter__(self) -> Progress[T]:
        self._begin()
        if self._shows and (kind := _bar_of_terminals()) and _is_terminal():
            is_bytes = self._unit == "B"
            self._bar = kind(
                total=self._total,
                desc=self._label or None,
                unit=self._unit if is_bytes else f" {self._unit}",
                unit_scale=is_bytes,
                unit_divisor=1024 if is_bytes else 1000,
                delay=BAR_AFTER,
                dynamic_ncols=True,
            )
        return self

    def advance(self, count: int = 1) -> None:
        """Say that `count` more units are done. Not collective."""
        if not self._shows:
            return
        self._done += count
        if self._bar is not None:
            with _stderr_may_be_gone():
                self._bar.update(count)
        elif (now := time.monotonic()) - self._last >= EVERY:
            self._write(now)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with _stderr_may_be_gone():
                self._bar.close()
            self._bar = None
        elif self._has_written:
            self._write(time.monotonic())

    def _write(self, now: float) -> None:
        """Write a plain line."""
        self._last, self._has_written = now, True
        if sys.stderr is None:  # `print` would then write to stdout
            return
        with _stderr_may_be_gone():
            print(self._line(now - self._began), file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        """Return what a plain line says after so many seconds.

        >>> Progress((), 400, "training", "step", False)._line(20.0)
        'training: 0 of 400 steps, 20 s'
        """
        rate = self._done / seconds if seconds > 0 else 0.0
        parts = [self._amount(self._done, self._total), _duration(seconds)]
        if rate:
            parts.append(f"{self._amount(rate)}/s" if self._unit == "B" else f"{rate:.3g}/s")
        if rate and self._total is not None and self._done < self._total:
            parts.append(f"{_duration((self._total - self._done) / rate)} left")
        return ": ".join(filter(None, (self._label, ", ".join(parts))))

    def _amount(self, done: float, total: int | None = None) -> str:
        """Return an amount in its unit, as a part of the total where there is one."""
        if self._unit == "B":
            name, factor = next(
                (unit, factor)
                for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
                if max(done, total or 0) >= factor or factor == 1
            )
            return f"{done / factor:.1f}{'' if total is None else f' of {total / factor:.1f}'} {name}"
        number = done if total is None else total
        return f"{done}{'' if total is None else f' of {total}'} {self._unit}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    """Return a number of seconds as text.

    >>> _duration(59), _duration(61), _duration(7260)
    ('59 s', '1 min 1 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def bytes_shown(world: World, label: str, total: int) -> Progress[Any]:
    """Return the progress of a worker's bytes, also for a thread that belongs to a worker of `dj.simulate`."""
    return Progress((), total, label, "B", world.rank == 0)


def _is_worker_0() -> bool:
    """Return whether this is worker 0 of the job, or of the simulation, without opening a world."""
    if current := sys.modules.get("distdl_jax.transports.threads.current_world"):
        if (world := current.simulated_world.value) is not None:
            return bool(world.rank == 0)
        if current.simulations_run() and threading.current_thread() is not threading.main_thread():
            return False  # a thread of one of its workers, which one is not known
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized() and not mpi.Is_finalized():
        return bool(mpi.COMM_WORLD.rank == 0)
    return not job_rank()


@cache
def _bar_of_terminals() -> Any:
    """Return tqdm's bar, without its thread and its lock between processes; None without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Bar(tqdm):  # type: ignore[misc, unused-ignore, type-arg]
        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar


def _is_terminal() -> bool:
    """Return whether stderr is a terminal of known width: tqdm writes nothing to others."""
    with _stderr_may_be_gone():
        return sys.stderr is not None and sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno())[0] > 0
    return False


def _stderr_may_be_gone() -> suppress:
    """Return a context in which stderr may be closed, its reader gone, or a program's own object in its place, without
    `isatty` or `flush`: no work ends for that."""
    return suppress(Exception)

"""The thread that runs the turns of every agent of this process, and the actions at the end of the program.

All effects of a world of several workers on the process are here: a thread, an `atexit` handler, `sys.excepthook`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

import jax

from distdl_jax.errors import ONE_PROGRAM
from distdl_jax.watchdog.error_text import error_text
from distdl_jax.watchdog.launch import run_program, supervised
from distdl_jax.watchdog.launch.said_once import SaidOnce
from distdl_jax.watchdog.watch.abort import end_the_job, is_forked, mpi_has_ended, mpi_lock, say, say_elsewhere
from distdl_jax.watchdog.watch.agent import Agent
from distdl_jax.watchdog.watch.clock import COMPILATION, FIRST_LINE, AwakeClock, last_line, lines_within, seconds_text
from distdl_jax.watchdog.watch.log import log
from distdl_jax.watchdog.watch.status import WorkerStatus, worker_status
from distdl_jax.watchdog.watch.thread_sampler import Sample, Sampler, main_line, prepare_to_write_stacks

PAUSE = 0.05
"""Seconds between two turns."""

LONG_COMPILATION = 300.0
"""Seconds after which a line tells that a worker compiles; the next one comes after twice as many, and so on."""


class WatchdogThread:
    """Watches the program of one worker, from the first world that is opened to the end, or to `dj.close()`."""

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._limit = 0.0
        self._forget()

    def _forget(self) -> None:
        self._agents: list[Agent] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._waits_since: tuple[int, float] = (0, 0.0)
        self._told = 0.0
        self._speaks_after = 0.0

    def add(self, agent: Agent) -> None:
        """Run the turns of one more agent, from now on."""
        for other in self._agents:  # of equal worlds the first covers the others
            agent.is_covered = agent.is_covered or set(agent.members) <= set(other.members)
            other.is_covered = other.is_covered or set(other.members) < set(agent.members)
        self._agents = [*self._agents, agent]
        say_elsewhere.append(agent.say_elsewhere)

    def begin(self, limit: float) -> None:
        """Start; `limit` is the clock's, in seconds, as long as there is no reporter that keeps it."""
        self._limit = limit
        if self._thread is not None:
            return
        status = worker_status()
        status.is_called_here()
        prepare_to_write_stacks()
        _install_hook()
        self._thread = threading.Thread(
            target=self._run, args=(status, self._stop), name="distdl_jax watchdog", daemon=True
        )
        self._thread.start()
        # After everything registered later by others, before MPI is finalised.
        atexit.register(self.leave)
        supervised.tell(supervised.IN_WORLD)

    def close(self) -> None:
        """Undo `begin`, once the workers of all worlds have called this."""
        if self._end():
            atexit.unregister(self.leave)
            _remove_hook()
            say_elsewhere.clear()
            self._forget()

    def _run(self, status: WorkerStatus, stop: threading.Event) -> None:
        sampler, clock = Sampler(status), AwakeClock(time.monotonic())
        while not stop.wait(PAUSE) and not mpi_has_ended():
            self._turn(sampler, clock, status)

    def _turn(self, sampler: Sampler, clock: AwakeClock, status: WorkerStatus) -> None:
        now = clock.turn(time.monotonic())
        with self._surviving():
            self._look_at_the_clock(status, now)
        sample = Sample()
        with self._surviving():
            sample = sampler.look(now)
            self._speak_of_compilation(status, sample.compiles)
        with mpi_lock:
            for agent in self._agents:
                with self._surviving():
                    agent.turn(sample, now)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Log exceptions inside, once, and continue: without its watchdog a worker is silent."""
        try:
            yield
        except Exception as error:
            if repr(error) not in self._failed:
                self._failed.add(repr(error))
                with suppress(Exception):  # the log's file may be closed
                    log.exception("The watchdog failed; it goes on.")

    def _speak_of_compilation(self, status: WorkerStatus, seconds: float) -> None:
        if not seconds or not self._speaks_after:
            self._speaks_after = min(LONG_COMPILATION, self._limit or LONG_COMPILATION)
        if seconds > self._speaks_after:
            self._speaks_after = 2 * seconds
            counts = f" Who has waited for {COMPILATION * self._limit:g} s by then ends the job." if self._limit else ""
            say(
                f"distdl_jax: worker {status.rank} has compiled for {seconds_text(seconds)}, at {main_line()}; one XLA "
                f"program, or many without a pause.{counts}\n"
            )

    def _look_at_the_clock(self, status: WorkerStatus, now: float) -> None:
        """End the job if the worker waits for too long to open a world that no other one covers."""
        waiting = status.waiting
        if waiting is None or waiting.channel is not None:
            return
        if any(agent.watches(waiting.waits_for) for agent in self._agents):
            return
        if self._waits_since[0] != waiting.number:
            self._waits_since, self._told = (waiting.number, now), 0.0
        seconds = now - self._waits_since[1]
        # The others' states are not known yet; two may report, since the others may wait for one of them.
        speaks = status.rank in sorted({status.rank, *waiting.waits_for})[:2]
        if speaks and (line := last_line(lines_within(self._limit), seconds)) > self._told:
            self._told = line
            say(
                f"distdl_jax: Worker {status.rank} has waited for {seconds_text(seconds)}, at {waiting.where}, for "
                f"others to come to {waiting.label}. The job goes on.\n"
            )
        if self._limit and seconds > self._limit:
            end_the_job(
                f"A worker has waited for {self._limit:g} s (DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off), at "
                f"{waiting.where}, for others to come to {waiting.label}. {ONE_PROGRAM}\n"
            )

    def leave(self) -> None:
        """Tell the others that this worker's program has ended, and wait until theirs have, too."""
        if self._end():
            with suppress(RuntimeError):
                arguments = (worker_status(), self._limit)
                threading.Thread(target=_look_at_what_remains, args=arguments, daemon=True).start()

    def _end(self) -> bool:
        """Wait for the ends of all programs, and stop; return False if there is nothing to stop."""
        if is_forked() or mpi_has_ended() or self._stop.is_set() or self._thread is None:
            return False
        try:
            jax.effects_barrier()  # programs that still run may need the others
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        for agent in self._agents:
            agent.leave(supervised.exit_status or int(_has_raised()))
        while not all(agent.all_have_left() for agent in self._agents):
            time.sleep(0.005)
        supervised.tell(supervised.ENDS)
        self._stop.set()
        self._thread.join()
        return True


def _look_at_what_remains(status: WorkerStatus, limit: float) -> None:
    """Watch a process after the programs of all workers have ended: exit handlers registered before the first world may
    wait for another worker that is past its own. The clock ends only agreements."""
    clock, pause = AwakeClock(time.monotonic()), min(FIRST_LINE, limit or FIRST_LINE)
    says_at, agreement, began = pause, 0, 0.0
    while not mpi_has_ended():
        time.sleep(PAUSE)
        now, waiting = clock.turn(time.monotonic()), status.waiting
        number = 0 if waiting is None else waiting.number
        if number != agreement:
            agreement, began = number, now
        is_over = bool(limit and agreement) and now - began > limit
        if not is_over and now < says_at:
            continue
        text = (
            f"the programs of all workers have ended, but {seconds_text(now)} later worker {status.rank} (process "
            f"{os.getpid()}) is still at {main_line()}."
        )
        if is_over:
            end_the_job(f"distdl_jax ends the job: {text} {ONE_PROGRAM}\n")
        say(f"distdl_jax: {text}\n")
        says_at, pause = now + 2 * pause, 2 * pause


# --- the exception hook ---

_ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Hook:
    """Prints an exception with the previous hook, and ends the job: the others would wait for ever."""

    def __init__(self, previous: _ExceptionHook) -> None:
        self.previous = previous
        self.is_on = True

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A process that a worker has forked inherits the hook, and must not end the job.
        if not self.is_on or is_forked() or _main_program_goes_on() or _is_of_a_prompt(trace):
            self.previous(kind, error, trace)
            return
        text = ""
        last: Callable[[], str] = str
        try:
            if self.previous is sys.__excepthook__:
                status = worker_status()
                text = error_text(error)
                said = SaidOnce(text, status.rank)
                text = f"Worker {status.rank} of {status.size} raised; the job ends.\n{text}" if said.is_first else ""
                last = said.end
            else:
                self.previous(kind, error, trace)
        finally:
            end_the_job(text, last=last)


def _install_hook() -> None:
    """Install the hook in front of the current one."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


def _remove_hook() -> None:
    """Remove the hook; if another one was installed in front of it, it only forwards from now on."""
    if isinstance(hook := sys.excepthook, _Hook):
        hook.is_on = False
        sys.excepthook = hook.previous


def _main_program_goes_on() -> bool:
    """Return whether the main program itself shows an exception (as consoles do), without ending.

    Python calls the hook, or one that calls it, when no line of the program is left to run.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code, name = frame.f_code, frame.f_globals.get("__name__")
        if code.co_name == "<module>" and name == "__main__" and code.co_filename != run_program.__file__:
            return True
        frame = frame.f_back
    return False


def _is_of_a_prompt(trace: TracebackType | None) -> bool:
    """Return whether a line at Python's own prompt has raised, after which the prompt continues."""
    return hasattr(sys, "ps1") and (trace is None or trace.tb_frame.f_code.co_filename.startswith("<"))


def _has_raised() -> bool:
    """Return whether an exception has ended the main program, which has replaced this hook by its own.

    Python stores such an exception for debuggers. An interactive Python does so for each that it survives.
    """
    trace: TracebackType | None = getattr(sys, "last_traceback", None)
    is_interactive = sys.flags.interactive or hasattr(sys, "ps1")
    return trace is not None and not is_interactive and trace.tb_frame.f_back is None


watchdog_thread = WatchdogThread()
"""The one of this process."""

"""The supervisor: starts one worker as its child, stays outside MPI, and ends the job if the worker fails.

It sees what no code inside the worker can: a segmentation fault, the system's out-of-memory killer, `os._exit`, an end
before MPI has started. Launchers differ in their reaction; here each of these ends the whole job, with a message.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from distdl_jax.settings import current_settings
from distdl_jax.watchdog.launch.environment import MALLOC, UCX
from distdl_jax.watchdog.launch.gpus import choose_gpu, computes_on_gpu, visible_gpus
from distdl_jax.watchdog.launch.launcher import (
    abort_job,
    job_size,
    leave_job_around,
    local_rank,
    local_size,
    report_normal_end,
    worker_text,
)
from distdl_jax.watchdog.launch.supervised import (
    CHANNEL,
    ENDS,
    FAILED,
    IN_WORLD,
    SAID,
    STARTS_MPI,
    get_signal_at_end_of_parent,
)

LONGEST_TURN = 1.0
"""Seconds between two looks at the clock; a longer pause (of a suspended job) counts as this many."""

LONGEST_END = 5.0
"""Seconds between the failure of a program before the first partition and the end of its process. MPI's own end, an
exit handler, may wait for the others for ever."""

GRACE = 1.0
"""Seconds in which other workers can end like one that ended with status 0 without telling them."""

SI_KERNEL = 0x80
"""How Linux marks signals from a terminal; they have no sender, like signals from outside a container."""

HUGE_PAGES = ":".join(
    f"glibc.malloc.{name}"
    # Huge pages; no large buffer outside the heap; a heap that returns nothing; and no second heap for threads, whose
    # blocks above 64 MiB are fresh pages at each call.
    for name in ("hugetlb=1", "mmap_max=0", f"trim_threshold={2**62}", "arena_max=1")
)
"""glibc's malloc allocates each large buffer as fresh 4-KiB pages, and returns them when the buffer is freed: a step
that makes a 16 MiB buffer pays 4,096 page faults each time. With these settings it keeps them."""

_FROM_A_TERMINAL = {signal.SIGINT, signal.SIGQUIT}
_PASSED_ON = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGWINCH}
_WATCHED = {signal.SIGCHLD, *_FROM_A_TERMINAL, *_PASSED_ON}


def supervise(command: Sequence[str], start_limit: float | None = None) -> NoReturn:
    """Run `command` as one worker, and end as it ends.

    `start_limit`: seconds within which MPI must have started; None for the default, DISTDL_JAX_TIMEOUT.
    """
    leave_job_around()
    hears, tells = os.pipe()
    os.set_blocking(hears, False)
    os.set_inheritable(tells, True)
    workers_here = local_size()
    added = worker_environment(os.environ, workers_here, *usable_cores(workers_here))
    environment = {**os.environ, **added, **_gpu()}
    signal.signal(signal.SIGCHLD, lambda *_: None)  # ignored signals never wake a process that waits for signals
    launcher = os.getppid()
    get_signal_at_end_of_parent(signal.SIGCHLD)
    # The worker inherits descriptors of the launcher's (PMI's).
    numbers, names = (os.getpid(), tells, hears, launcher), {MALLOC, UCX} & added.keys()
    environment[CHANNEL] = ":".join(map(str, (*numbers, *names)))
    worker = subprocess.Popen(command, env=environment, close_fds=False)
    os.close(tells)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _end_as(worker, _watch(worker, launcher, hears, start_limit))


def worker_environment(environment: Mapping[str, str], local_workers: int, cores: int, bound: bool) -> dict[str, str]:
    """Return additions to a worker's environment; settings of the user are kept.

    **Arguments:**

    - `environment`: the supervisor's.
    - `local_workers`: the number of workers on this host.
    - `cores`: the number of cores that this process may use; `bound`: whether they are for this worker alone.
    """
    added = {UCX: "0"}  # to UCX, below MPI, SIGHUP requests debugging, and ends nothing
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in environment:
        added[MALLOC] = HUGE_PAGES
    if local_workers > 1:
        threads = str(cores if bound else max(1, cores // local_workers))
        added |= {"NPROC": threads, "OMP_NUM_THREADS": threads}  # the pools of XLA and of oneDNN
    return {name: value for name, value in added.items() if name not in environment}


def usable_cores(local_workers: int) -> tuple[int, bool]:
    """Return how many cores this process may use, and whether the launcher has bound it to them alone."""
    count = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
    return mine, mine < count and mine * local_workers <= count


def _gpu() -> dict[str, str]:
    """Return the worker's settings for its GPU; end the job if there is none for it."""
    if not computes_on_gpu(os.environ.get("JAX_PLATFORMS", "")):
        return {}
    gpus, use = visible_gpus(os.environ), current_settings().gpus
    choice = choose_gpu(os.environ, gpus, local_size(), local_rank(), use, socket.gethostname())
    if choice.problem:
        if local_rank() == 0:
            _say(f"{choice.problem}\n")
        abort_job(1)
        os._exit(1)
    if choice.line:
        _say(f"{choice.line}\n")
    return choice.added


def _watch(worker: subprocess.Popen[bytes], launcher: int, hears: int, start_limit: float | None) -> list[str]:
    """Wait until the worker has ended; return its events."""
    events: list[str] = []
    limit, waited = start_limit or current_settings().timeout.waiting, 0.0
    while worker.poll() is None:
        began, in_world = time.monotonic(), IN_WORLD in events
        _pass_on(_next_signal(None if in_world else LONGEST_TURN), worker)  # in a world it has its own watchdog
        events += _read(hears)
        if job_size() > 1 and os.getppid() != launcher:
            _abort(worker, f"{worker_text(worker.pid)} ends, as its launcher has.\n", 1)
        if in_world:
            continue
        if job_size() > 1 and (status := _failed(events)) and not _is_over(worker, LONGEST_END):
            _abort(worker, f"{worker_text(worker.pid)} {_ended_before(status)}; the job ends.\n", status)
        if limit and events[-1:] == [STARTS_MPI]:
            waited += min(time.monotonic() - began, LONGEST_TURN)
            if waited > limit:
                clock = "" if start_limit else " (DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off)"
                _abort(worker, _never_started(worker.pid, f"{limit:g} s{clock}"), 1)
    return events + _read(hears)


def _read(hears: int) -> list[str]:
    with contextlib.suppress(BlockingIOError):
        return os.read(hears, 4096).decode().split()
    return []


def _failed(events: list[str]) -> int:
    return next((int(event.removeprefix(FAILED)) for event in events if event.startswith(FAILED)), 0)


def _is_over(worker: subprocess.Popen[bytes], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(seconds)
        return True
    return False


def _abort(worker: subprocess.Popen[bytes], text: str, status: int) -> NoReturn:
    """End a job whose worker still runs."""
    _say(text)
    abort_job(status)
    worker.kill()
    worker.wait()
    os._exit(status)


def _next_signal(seconds: float | None) -> signal.struct_siginfo | int | None:
    """Wait for the next signal, for at most `seconds`."""
    if hasattr(signal, "sigtimedwait"):
        return signal.sigwaitinfo(_WATCHED) if seconds is None else signal.sigtimedwait(_WATCHED, seconds)
    time.sleep(0.1)  # macOS
    return int(signal.sigwait(_WATCHED)) if signal.sigpending() & _WATCHED else None


def _pass_on(came: signal.struct_siginfo | int | None, worker: subprocess.Popen[bytes]) -> None:
    """Pass a signal on to the worker, whoever sent it, unless the worker got it with its process group."""
    number = came if isinstance(came, int) or came is None else came.si_signo
    if came is None or number is None or number == signal.SIGCHLD:
        return
    with contextlib.suppress(ProcessLookupError):
        if not _is_for_the_group(came) or os.getpgid(worker.pid) != os.getpgrp():
            worker.send_signal(number)


def _is_for_the_group(came: signal.struct_siginfo | int) -> bool:
    """Return whether a signal goes to a whole process group.

    A terminal sends its signals to all processes in the foreground, and launchers send theirs to the process group that
    they have made for the worker, which this process leads. Other senders (`docker stop` has no number in here) may
    mean this process only: a signal that arrives twice does less harm than a lost one.
    """
    if isinstance(came, int):
        return came in _FROM_A_TERMINAL
    by_launcher = 0 < came.si_pid == os.getppid() and os.getpgrp() == os.getpid() and job_size() > 1
    return came.si_code == SI_KERNEL or by_launcher


def _end_as(worker: subprocess.Popen[bytes], events: list[str]) -> NoReturn:
    """End with the worker's exit status, or signal; end the whole job if the others may wait for the worker."""
    status, in_world = worker.returncode, IN_WORLD in events
    if job_size() > 1 and ENDS not in events and (status or in_world):
        if not status:
            time.sleep(GRACE)
        if SAID in events:
            time.sleep(GRACE)  # in which the supervisor of the worker that has said it ends the job
        else:
            _say(f"{worker_text(worker.pid)} {_how_it_ended(status, in_world)}; the job ends.\n")
        _remove_files()
        status = status or 1
        abort_job(status if status > 0 else 128 - status)
    elif not status and in_world:
        report_normal_end()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError):  # SIGKILL can't be set
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        os.kill(os.getpid(), -status)
        time.sleep(1)
    os._exit(status if status >= 0 else 128 - status)


def _remove_files() -> None:
    from distdl_jax.watchdog.launch.said_once import remove_files  # which few supervisors need

    remove_files()


def _how_it_ended(status: int, in_world: bool) -> str:
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return f"was ended by {name}{': most often the system was out of memory' if status == -signal.SIGKILL else ''}"
    if not in_world:
        return _ended_before(status)
    cure = "" if status else " (dj.close() and MPI.Finalize() come before such an end)"
    return f"ended with exit status {status}, by os._exit, os.exec... or exit() in C{cure}"


def _ended_before(status: int) -> str:
    return f"ended with exit status {status}, before it had a partition with others"


def _never_started(process: int, limit: str) -> str:
    return (
        f"distdl_jax ends the job. {worker_text(process)} has waited for {limit} for MPI to start, which takes all "
        "workers: one of them has not come to it. Look above for what another worker says, and on its host for a "
        "process that hangs; all need the same Python, the same packages and environment. `python -m distdl_jax "
        "doctor` on each host looks at these.\n"
    )


def _say(text: str) -> None:
    """Write to stderr in one piece, and give the launcher time to forward it: unread output is lost when a job ends."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
        time.sleep(0.2)


def worker_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a worker's program like `python *arguments`, with this Python's options.

    It names a file, not a module, which Python would look for in the working folder first.
    """
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    name = options.pop()
    letters = name.removesuffix("distdl_jax")  # "-BOmdistdl_jax", or two words, "-BOm" and the name
    if letters in ("", name):
        letters = options.pop() if options else ""
    if len(letters) > 2:
        options.append(letters[:-1])
    return [sys.executable, *options, str(Path(__file__).with_name("run_program.py")), *arguments]

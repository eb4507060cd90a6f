"""What the import does to the process, and that it can be told to leave it alone."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from launcher import mpiexec
from launcher.settings import long_run
from programs import run

from distdl_jax.watchdog import abort

PROGRAM = """
import ctypes, gc, signal, sys

def here():
    hooks = sys.excepthook, sys.exit, signal.signal, signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd
    return *hooks, gc.get_freeze_count()

before = here()
import distdl_jax as dj
assert gc.isenabled()

def changed():
    return [a is not b and a != b for a, b in zip(here(), before)]

mpi = sys.modules.get("mpi4py.MPI")
sys.stdout.write(f"after the import {changed()} {mpi is not None and mpi.Is_initialized()}\\n")  # in one piece
P = dj.Partition()
from distdl_jax.process import huge_pages
sys.stdout.write(f"with a partition {changed()} {huge_pages._done}\\n")
assert P.allgather_data(P.rank) == list(range(P.size))
"""


ABORTS = """
import re
from pathlib import Path
import distdl_jax
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    for file in set(re.findall(r"/dev/shm/mpich_shm_\\w+", Path("/proc/self/maps").read_text())):
        print("shares", file, flush=True)
    raise ValueError
MPI.COMM_WORLD.Barrier()
"""


def lines(workers: int, settings: dict[str, str]) -> Counter[str]:
    status, output = run(workers, "-c", PROGRAM, settings=settings, anew=True)
    assert status == 0, output
    return Counter(line for line in output.splitlines() if line.startswith(("after", "with")))


@pytest.mark.parametrize("workers", [1, 2] if long_run() else [2])
def test_left_alone(workers):
    """Not even MPI is started before it is needed."""
    nothing = [False] * 6
    assert lines(workers, {"DISTDL_JAX_PROCESS": "0"}) == {
        f"after the import {nothing} False": workers,
        f"with a partition {nothing} False": workers,
    }


def test_several_workers_get_every_hook():
    found = lines(2, {"DISTDL_JAX_HUGE_PAGES": "0"})
    assert found == {f"after the import {[True] * 6} True": 2, f"with a partition {[True] * 6} False": 2}


def test_one_worker_gets_none():
    """One worker alone makes nobody wait: MPI is started, no more."""
    nothing = [False] * 6
    found = lines(1, {"DISTDL_JAX_HUGE_PAGES": "0"})
    assert found == {f"after the import {nothing} True": 1, f"with a partition {nothing} False": 1}


def test_what_mpich_leaves_behind_is_removed():
    """It keeps the file that the workers of a host share until it is finalised, and an abort does not do that."""
    status, output = run(2, "-c", ABORTS)
    assert status != 0
    files = re.findall(r"^shares (/dev/shm/mpich_shm_\w+)$", output, re.MULTILINE)
    assert files or mpiexec.flavour() != "hydra", output
    assert not any(Path(file).exists() for file in files)


def test_no_job_that_is_ended_has_status_0(monkeypatch):
    """A shell sees eight bits of it: of 256, which os.system returns of a program that failed, none."""
    statuses = []
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setattr(abort, "leave_at_once", statuses.append)
    for status in (1, 256, 259, -15):
        abort._abort(status)
    assert statuses == [1, 1, 3, 241]

"""What the import, the first partition and `dj.close()` do to the process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import run
from launcher import mpiexec

import distdl_jax as dj
from distdl_jax.watchdog.watch import abort

# All of a process that a library could change and another one rely on.
LOOKS = """
import ctypes, gc, os, signal, sys, threading

def handlers():
    return {number: signal.getsignal(number) for number in signal.valid_signals()}

def heap():  # whether malloc takes large buffers from the heap, which it does where it was told so
    block = libc.malloc(2**26)
    libc.free(ctypes.c_void_p(block))
    return 0 < block - top < 2**40 if (top := libc.sbrk(0)) else None

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_ssize_t]

def look():
    from jax._src.dispatch import RuntimeTokenSet
    from jax._src.interpreters.partial_eval import JaxprTrace
    from jax._src.interpreters.pxla import MeshExecutable
    mpi = sys.modules.get("mpi4py.MPI")
    monitoring = getattr(sys, "monitoring", None)
    return {
        "sys": (sys.excepthook, sys.exit, sys.unraisablehook, sys.displayhook),
        "finders": (sys.meta_path[:], sys.path_hooks[:]),
        "os": (os._exit, os.fork, os.execv, os.environ.copy(), os.getcwd()),
        "signals": (signal.signal, signal.set_wakeup_fd, handlers()),
        "threads": (threading.excepthook, [thread.name for thread in threading.enumerate()]),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "tracing": (sys.gettrace(), monitoring and [monitoring.get_tool(tool) for tool in range(6)]),
        "JAX": (
            RuntimeTokenSet.get_token_input,
            JaxprTrace.process_custom_vjp_call,
            MeshExecutable.create_cpp_call,
        ),
        "malloc": heap(),
        "MPI": mpi is not None and mpi.Is_initialized(),
    }

def changed(before):
    return sorted(name for name, found in look().items() if found != before[name])

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece
    sys.stdout.flush()

import jax.numpy
before = look()
"""

IMPORTS = """
import distdl_jax as dj
for name in dj.__all__:  # all of it, which is imported when it is first used
    getattr(dj, name)
"""

PROGRAM = f"""
{LOOKS}{IMPORTS}
say("import:", changed(before))
P = dj.Partition()
assert P.allgather_data(P.rank) == list(range(P.size))
say("partition:", changed(before))
dj.close()
say("close:", changed(before))
try:
    P.allgather_data(0)
except dj.SetupError as error:
    say("then:", error)
Q = dj.Partition()
assert Q != P and Q.allgather_data(Q.rank) == list(range(P.size))
say("again:", changed(before))
"""

WITHOUT_MPI = f"""
{LOOKS}
sys.modules["mpi4py"] = sys.modules["mpi4jax"] = None  # as if they were not installed
{IMPORTS}
say("import:", changed(before))
say("simulated:", dj.simulate(2, lambda: dj.Partition().size))
try:
    dj.Partition()
except dj.SetupError as error:
    say("refuses:", str(error).split(",")[0])
"""

IMPORT_TIME = f"""
import time
began = time.process_time()
import jax, jax.numpy
imported = time.process_time()
{IMPORTS}
print((time.process_time() - imported) / (imported - began))
"""

ABORTS = """
import re
from pathlib import Path
import distdl_jax as dj
from mpi4py import MPI
dj.Partition()
if MPI.COMM_WORLD.rank == 1:
    for file in set(re.findall(r"/dev/shm/mpich_shm_\\w+", Path("/proc/self/maps").read_text())):
        print("shares", file, flush=True)
    raise ValueError
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize(
    ("workers", "by"), [(2, ()), (2, ("-m", "distdl_jax")), (1, ())], ids=["python", "supervised", "one worker"]
)
def test_what_a_partition_changes(workers, by):
    """An excepthook and a thread, where somebody may wait, what is mended in JAX, and MPI with its finder;
    `dj.close()` leaves only these two."""
    opened = ["JAX", "MPI", "finders", *["sys", "threads"] * (workers > 1)]
    said = ["import: []", f"partition: {opened}", "close: ['MPI', 'finders']", f"again: {opened}"]
    if workers > 1:
        said.append("then: This partition was made before dj.close(), which has closed its world. Make a new one.")
    status, output = run(workers, *by, "-c", PROGRAM, anew=True)
    lines = re.findall(r"^(?:import|partition|close|then|again): .*", output, re.M)
    assert (status, sorted(lines)) == (0, sorted(said * workers)), output


def test_without_mpi():
    command, env = [sys.executable, "-c", WITHOUT_MPI], mpiexec.clean(os.environ)
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    said = ["import: []", "simulated: [2, 2]", "refuses: A partition needs MPI"]
    assert done.stdout.splitlines() == said, done.stderr


def test_import_time(tmp_path):
    """All public names together take less processor time than jax does in the same process; the best of three.

    Compiled files are kept, as they are wherever the library is installed.
    """
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    settings["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    command = [sys.executable, "-c", IMPORT_TIME]
    found = [subprocess.run(command, capture_output=True, text=True, env=settings) for _ in range(4)]
    assert min(float(done.stdout) for done in found[1:]) < 0.8, found


def test_the_supervisor_does_not_import_jax():
    program = "import sys, distdl_jax.__main__; print('jax' in sys.modules, 'mpi4py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


def test_every_public_name_is_listed_once():
    for name in dj.__all__:
        assert getattr(dj, name) is not None
    assert dir(dj) == sorted(dj.__all__) and dir(dj.nn) == sorted(dj.nn.__all__)
    assert sorted(dj._MODULE_OF) == sorted(dj.__all__)
    with pytest.raises(AttributeError, match="module 'distdl_jax' has no attribute 'no_such_name'"):
        _ = dj.no_such_name


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
    monkeypatch.setattr(os, "_exit", statuses.append)
    for status in (1, 256, 259, -15):
        abort._abort(status)
    assert statuses == [1, 1, 3, 241]


def test_where_mpi_cannot_start(tmp_path):
    """As on a login node, with a launcher's environment: the import and `--simulate` start no MPI."""
    # One write a line: two threads' prints may mix a line's text and its end.
    (tmp_path / "program.py").write_text("import distdl_jax as dj\nprint(f'{dj.Partition().size}\\n', end='')\n")
    environment = {**mpiexec.clean(os.environ), "PMI_FD": "99", "PMI_RANK": "0", "PMI_SIZE": "2"}
    for command, expected in (
        (["-c", "import distdl_jax as dj; print(len([getattr(dj, name) for name in dj.__all__]) > 30)"], ["True"]),
        (["-m", "distdl_jax", "--simulate", "2", str(tmp_path / "program.py")], ["2", "2"]),
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stdout.split()) == (0, expected), done.stderr

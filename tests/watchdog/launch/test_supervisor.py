"""`python -m distdl_jax`: a program under a supervisor finds, and does, what it does under `python`."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import patience, run
from launcher import mpiexec

from distdl_jax.watchdog.launch.supervisor import HUGE_PAGES, worker_environment

SUPERVISED = [sys.executable, "-m", "distdl_jax"]
# becomes the command that follows, with its standard input as the terminal that Ctrl-C comes from
TAKES_ITS_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def environment(**more: str) -> dict[str, str]:
    known = mpiexec.clean(os.environ)
    return {name: value for name, value in known.items() if name not in ("NPROC", "GLIBC_TUNABLES")} | more


JOB = {"PMI_SIZE": "2", "PMI_RANK": "0"}  # as a launcher of two workers gives the first


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*SUPERVISED, "-c", program], text=True, stdout=subprocess.PIPE, env=environment())


def ended(program: str, *options: str, typed: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(options or ["-m", "distdl_jax"]), "-c", program, "-x"]  # an argument of the program's
    env, limit = environment(**more), patience(60)
    return subprocess.run(command, capture_output=True, text=True, input=typed, timeout=limit, env=env)


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None and process.stdout.readline().strip() == word


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('words')", 1),
        ("raise SystemExit(True)", 1),
        ("import os; os._exit(4)", 4),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT); input()", -signal.SIGINT),
    ],
)
def test_it_ends_as_python_does(program, status):
    """Where there is only one worker, without a word."""
    plain = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    done = ended(program)
    assert (done.returncode, done.stdout) == (plain.returncode, "") == (status, "")
    assert "Worker" not in done.stderr and done.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_input_options_and_group():
    program = "import os, sys; print(sys.stdin.read(), sys.flags.optimize, os.getpgrp(), os.environ['PATH'] != '')"
    done = ended(program, "-O", "-m", "distdl_jax", typed="as it came")
    assert done.stdout.split() == ["as", "it", "came", "1", str(os.getpgrp()), "True"], done.stderr


@pytest.mark.parametrize("words", [["-BOm", "distdl_jax"], ["-BOmdistdl_jax"], ["-B", "-O", "-mdistdl_jax"]])
def test_options_in_one_word(words):
    program = "import sys; print(sys.flags.dont_write_bytecode, sys.flags.optimize, *sys.argv)"
    done = ended(program, *words, PYTHONDONTWRITEBYTECODE="")
    assert done.stdout.split() == ["1", "1", "-c", "-x"], done.stderr


def test_what_it_sets_before_the_worker_starts():
    settings = ("GLIBC_TUNABLES", "NPROC", "OMP_NUM_THREADS", "DISTDL_JAX_SUPERVISOR")
    program = f"import os; print(*(os.environ.get(name) for name in {settings}))"
    assert ended(program).stdout.split()[1:] == ["None", "None", "None"]
    assert worker_environment({}, 4, 10, bound=False).items() >= {"NPROC": "2", "OMP_NUM_THREADS": "2"}.items()
    assert worker_environment({}, 4, 2, bound=False)["NPROC"] == "1"
    assert worker_environment({}, 4, 3, bound=True)["NPROC"] == "3"
    assert "NPROC" not in worker_environment({}, 1, 8, bound=False)
    assert "NPROC" not in worker_environment({"NPROC": "5"}, 4, 8, bound=False)
    assert "GLIBC_TUNABLES" not in worker_environment({"GLIBC_TUNABLES": ""}, 1, 8, bound=False)


CHILDREN = """
import multiprocessing, os, subprocess, sys
NAMES = "GLIBC_TUNABLES", "UCX_DEBUG_SIGNO", "NPROC"
def seen(*_):
    return [os.environ.get(name, "-") for name in NAMES]
if __name__ == "__main__":
    show = f"import os; print(*(os.environ.get(name, '-') for name in {NAMES}))"
    def child():
        return subprocess.check_output([sys.executable, "-c", show], text=True).split()
    first = child()
    import distdl_jax as dj
    rank = dj.Partition().rank
    pools = [multiprocessing.get_context(way).Pool(1) for way in ("fork", "spawn")]
    found = [seen(), first, child(), *(pool.map(seen, [0])[0] for pool in pools)]
    for pool in pools:
        pool.terminate()
    tunables = [line for line in open("/proc/self/environ").read().split("\\0") if line.startswith(NAMES[0])]
    if rank == 0:
        print(*found, *tunables, sep="\\n", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("users", [{}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=3", "UCX_DEBUG_SIGNO": "SIGUSR2"}])
def test_what_is_for_a_worker_alone_is_not_for_what_it_starts(tmp_path, monkeypatch, workers, users):
    """Before and after MPI starts, and by any way of starting. What the user set is, and what all are to share."""
    for name in ("GLIBC_TUNABLES", "UCX_DEBUG_SIGNO", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    (program := tmp_path / "program.py").write_text(CHILDREN)
    if workers == 1:
        done = subprocess.run([*SUPERVISED, program], capture_output=True, text=True, env=environment(**users))
        status, output = done.returncode, done.stdout
    else:
        status, output = run(workers, "-m", "distdl_jax", program, settings=users, anew=True)
    shared = "-" if workers == 1 else str(max(1, len(os.sched_getaffinity(0)) // workers))
    expected = str([users.get("GLIBC_TUNABLES", "-"), users.get("UCX_DEBUG_SIGNO", "-"), shared])
    # Between them others may write: a slow start of a pool, for instance, is worth a warning to Python.
    *found, tunables = [line for line in output.splitlines() if line.startswith(("[", "GLIBC_TUNABLES="))]
    assert (status, found) == (0, [expected] * 5), output
    # As the process started; glibc cuts what it reads at the first colon.
    assert tunables == f"GLIBC_TUNABLES={users.get('GLIBC_TUNABLES', HUGE_PAGES.split(':')[0])}"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_malloc_keeps_large_buffers():
    """Where they are given back, each new one is fresh pages: 16,384 faults for 64 MiB."""
    program = """
import resource
import numpy as np
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(2**23)
before = faults()
for _ in range(10):
    np.ones(2**23)
print(faults() - before)
"""
    assert HUGE_PAGES and int(ended(program).stdout) < 1000


HANDLES = """
import signal, sys, time
came = []
signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
print("ready", flush=True)
while not came:
    time.sleep(0.01)
time.sleep(0.5)
print(len(came))
"""


SENDS_TO_THE_GROUP = """
import os, signal, subprocess, sys
command = [sys.executable, "-m", "distdl_jax", "-c", {program!r}]
job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
assert job.stdout.readline() == "ready\\n"
os.killpg(job.pid, signal.SIGTERM)
print(job.communicate()[0], job.returncode)
"""


def test_a_signal_to_the_supervisor_is_passed_on():
    process = start(HANDLES)
    wait_for(process, "ready")
    process.terminate()
    assert process.communicate(timeout=patience(60))[0].strip() == "1" and process.returncode == 0


@pytest.mark.parametrize("leaves", ["getpid", "setsid", "setpgrp"])
def test_a_signal_to_the_launchers_group_comes_once(leaves):
    """The supervisor leads the group; the worker is in it, or has left it."""
    program = HANDLES.replace("import signal", f"import os; os.{leaves}()\nimport signal")
    sends = [sys.executable, "-c", SENDS_TO_THE_GROUP.format(program=program)]
    done = subprocess.run(sends, capture_output=True, text=True, env=environment(**JOB))
    assert done.stdout.split() == ["1", "0"], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces")
@pytest.mark.parametrize("job", ["1", "2"])
@pytest.mark.parametrize("below", [[], ["sh", "-c", '"$@"; exit $?', "sh"]], ids=["process 1", "below a shell"])
def test_a_signal_from_outside_of_its_container_is_passed_on(below, job):
    """As of `docker stop`, or Slurm, which have no process number in there."""
    own = ["unshare", "--pid", "--fork", "--user", "--map-root-user"]
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("namespaces can't be made here")
    command = [*own, *below, *SUPERVISED, "-c", HANDLES]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=environment(PMI_SIZE=job, PMI_RANK="0"))
    wait_for(process, "ready")
    supervisor = process.pid
    for _ in range(2 if below else 1):
        supervisor = int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text())
    os.kill(supervisor, signal.SIGTERM)
    assert process.communicate(timeout=patience(60))[0].strip() == "1" and process.returncode == 0


def has_ended(process: int) -> bool:
    path = Path(f"/proc/{process}/stat")
    return not path.exists() or "Z" in path.read_text().split()[2]


def killed(process: subprocess.Popen[str]) -> None:
    """Kill it, and wait for the end of those whose numbers it has printed."""
    assert process.stdout is not None
    processes = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait()
    until = time.monotonic() + patience(20)
    while not all(map(has_ended, processes)):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_no_supervisor_outlives_its_launcher():
    """As where hydra's proxy is killed; the worker has a session of its own."""
    program = "import os, time; os.setsid(); print(os.getppid(), os.getpid(), flush=True); time.sleep(10_000)"
    launcher = f"import subprocess; subprocess.run({[*SUPERVISED, '-c', program]!r})"
    command = [sys.executable, "-c", launcher]
    killed(subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=environment(**JOB)))


def test_no_worker_outlives_its_supervisor():
    killed(start("import os, time; print(os.getpid(), flush=True); time.sleep(10_000)"))


def test_on_a_terminal():
    """It is read from, and Ctrl-C interrupts once."""
    program = """
import sys, time
print("told", input(), sys.stdin.isatty(), flush=True)
caught = 0
while caught < 1:
    try:
        print("sleeps", flush=True)
        time.sleep(10_000)
    except KeyboardInterrupt:
        caught += 1
time.sleep(0.5)
print("caught", caught, flush=True)
"""
    terminal, of_the_job = pty.openpty()
    # a fork of this process, which has threads, could stop before it becomes another program
    job = subprocess.Popen(
        [sys.executable, "-c", TAKES_ITS_TERMINAL, *SUPERVISED, "-c", program],
        stdin=of_the_job,
        stdout=of_the_job,
        stderr=of_the_job,
        env=environment(),
        start_new_session=True,
    )
    os.close(of_the_job)
    seen = ""

    def read_until(word: str) -> None:
        nonlocal seen
        while word not in seen:
            seen += os.read(terminal, 1000).decode()

    os.write(terminal, b"words\n")
    read_until("told words True")
    read_until("sleeps")
    os.write(terminal, b"\x03")
    read_until("caught 1")
    assert job.wait() == 0
    os.close(terminal)


def test_workers_of_a_job_share_the_cores():
    program = "import os; print(os.environ['NPROC'], os.environ['OMP_NUM_THREADS'], flush=True)"
    cores = str(max(1, len(os.sched_getaffinity(0)) // 3)) if hasattr(os, "sched_getaffinity") else None
    status, output = run(3, "-m", "distdl_jax", "-c", program, settings={}, anew=True)
    assert status == 0 and cores in (None, *output.split()), output


def test_exit_handlers_of_a_worker_that_is_alone_take_their_time():
    done = ended("import atexit, time; atexit.register(lambda: (time.sleep(7), print('done'))); raise SystemExit(3)")
    assert (done.stdout, done.returncode) == ("done\n", 3), done.stderr


def test_a_program_that_closes_all_descriptors(tmp_path):
    """As daemons do; its own files then have the pipe's number, and get nothing. The supervisor hears of its end."""
    program = (
        "import os, sys, time\n"
        "os.closerange(3, 256)\n"
        f"files = [os.open(os.path.join({str(tmp_path)!r}, str(i)), os.O_CREAT | os.O_RDWR) for i in range(60)]\n"
        "import atexit, signal\n"
        "atexit.register(time.sleep, 1000)\n"
        "sys.exit(True)\n"
    )
    done = ended(program, **JOB)
    assert done.returncode == 1 and "ended with exit status 1, before it had a partition" in done.stderr, done.stderr
    assert len(list(tmp_path.iterdir())) == 60 and not any(file.read_bytes() for file in tmp_path.iterdir())


def test_a_hangup_ends_a_worker_with_mpi():
    """Which UCX, below MPI, would keep from it."""
    program = "import os, signal, time\nfrom mpi4py import MPI\nos.kill(os.getpid(), signal.SIGHUP)\ntime.sleep(9)"
    assert ended(program).returncode == -signal.SIGHUP


INSIDE = """
import os, shlex, subprocess, sys
import distdl_jax as dj
P = dj.Partition()
tool = "import distdl_jax as dj; raise SystemExit(3 + dj.Partition().size)"
command = [sys.executable, "-m", "distdl_jax", "-c", tool]
in_a_shell = lambda: os.waitstatus_to_exitcode(os.system(shlex.join(command)))
assert in_a_shell() == 4
if P.rank == P.size - 1:
    assert in_a_shell() == subprocess.run(command, close_fds=True).returncode == 4
assert dj.functional.all_sum_reduce(dj.zero_volume_tensor(1), P, axes_keep=()).size == 0
os.write(1, b"done\\n")
"""


@pytest.mark.parametrize("size", [1, 2])
def test_a_tool_that_a_worker_runs_is_a_job_of_one(size):
    """It has the environment of a worker, and by a shell its connection to the launcher; and it starts MPI."""
    status, output = run(size, "-m", "distdl_jax", "-c", INSIDE, anew=True)
    assert (status, output.split()) == (0, ["done"] * size), output


def test_a_program_that_a_worker_becomes_is_a_worker():
    program = "import distdl_jax as dj; assert dj.Partition().size == 2"
    becomes = f"import os, sys; os.execv(sys.executable, [sys.executable, '-m', 'distdl_jax', '-c', {program!r}])"
    status, output = run(2, "-m", "distdl_jax", "-c", becomes, anew=True)
    assert status == 0, output

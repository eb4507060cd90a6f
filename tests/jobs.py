"""Runs programs under mpiexec with a time limit: the examples, and the code of the documentation."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from launcher import forkserver, mpiexec
from launcher.settings import FAST_TO_COMPILE, ON_GPU, long_run

from distdl_jax.watchdog.launch.gpus import XLA_FLAG

ROOT = Path(__file__).parents[1]

GPU_SETTINGS = {
    "JAX_PLATFORMS": "cuda",
    "DISTDL_JAX_GPUS": "share",
    "MPI4JAX_USE_CUDA_MPI": "0",
    "XLA_CLIENT_MEM_FRACTION": "0.2",
}
USUAL_START = 3.0  # seconds that `start_up` takes where nothing else runs

STARTS = """
import jax
import distdl_jax as dj
P = dj.Partition()
jax.jit(lambda x: x + 1)(1.0)
P.allgather_data(0)
"""

# As in the processes of tests (conftest.py): where several programs share one, what they cost is compiling.
CHEAPER = f"""
import sys
sys.path.append({str(ROOT / "tests")!r})
import contexts, compiled_once
sys.path.pop()
contexts.keep()
"""
WITHOUT_MPI = "compiled_once.begin()\n"
if long_run():
    CHEAPER = WITHOUT_MPI = ""

# Several programs, one after the other, each with modules of its own: importing jax is what takes time.
IN_TURN = """
import json, runpy, sys
from pathlib import Path
import distdl_jax
from mpi4py import MPI
def say(text):
    if MPI.COMM_WORLD.rank == 0:
        print("=====>", text, flush=True)
for line in sys.argv[1:]:
    status, sys.argv = 0, json.loads(line)
    module = sys.argv.pop(1) if sys.argv[0] == "-m" else None
    folder = str(Path(sys.argv[0]).parent)
    sys.path.insert(0, folder)
    say("starts")
    try:
        if module is None:
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, flush=True)
            status = 1
    say(status)
    sys.path.remove(folder)
    if "jax" in sys.modules:  # a program in float64 is none of the next one's
        sys.modules["jax"].config.update("jax_enable_x64", False)
    for name, module in list(sys.modules.items()):
        if folder == str(Path(getattr(module, "__file__", None) or "/").parent):
            del sys.modules[name]
"""


# What programs share of what they import: nothing that looks at the library's settings, or starts MPI.
IMPORTED = ("jax", "jax.numpy", "jax.extend.core")


def _python(environment: dict[str, str]) -> list[str]:
    """Return the words for `python`. In a long run each program starts as users start it."""
    if long_run():
        return [sys.executable]
    return forkserver.python(IMPORTED, environment, program_alone=("DISTDL_JAX_", "PYTEST_"))


def _environment(flags: Sequence[str]) -> dict[str, str]:
    """Return the environment of a user's program, with these flags for XLA."""
    environment = mpiexec.clean(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    environment |= GPU_SETTINGS if ON_GPU else {"JAX_PLATFORMS": "cpu"}
    for name in ("JAX_ENABLE_X64", "JAX_TRACEBACK_FILTERING"):  # programs say themselves what they need
        environment.pop(name, None)
    given = environment.pop("XLA_FLAGS", "").split()
    other = [flag for flag in given if flag not in FAST_TO_COMPILE]
    if ON_GPU:
        other.append(XLA_FLAG)
    if flags:
        other += ["--xla_cpu_multi_thread_eigen=false", *flags]
    return environment | ({"XLA_FLAGS": " ".join(other)} if other else {})


def start(
    size: int,
    *arguments: object,
    cwd: Path = ROOT,
    settings: dict[str, str] | None = None,
    flags: Sequence[str] = (),
    anew: bool = False,
) -> subprocess.Popen[str]:
    """Start `python *arguments` on `size` workers, with output and errors in one pipe.

    `anew`: the programs import everything themselves, as users start them.
    """
    environment = _environment(flags) | (settings or {})
    python = [sys.executable] if anew else _python(environment)
    return subprocess.Popen(
        [*mpiexec.command(size), *python, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], limit: float) -> tuple[int, str]:
    """Return the exit status and the output; past the limit end the program, and say so in the output."""
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec takes its workers along
        output, _ = process.communicate(timeout=patience(20))
        return -1, f"{output}\n(ended after its limit of {limit:g} s)"
    return process.returncode, output


@cache
def start_up() -> float:
    """Measure, once in a run, the seconds in which two workers start, compile something and end."""
    began = time.monotonic()
    status, output = finish(start(2, "-c", STARTS, anew=True), 1800)
    assert status == 0, output
    return time.monotonic() - began


def patience(seconds: float) -> float:
    """Return `seconds`, or more where starting takes longer than usual."""
    return seconds * max(1.0, start_up() / USUAL_START)


def run(
    size: int,
    *arguments: object,
    limit: float = 120,
    cwd: Path = ROOT,
    settings: dict[str, str] | None = None,
    flags: Sequence[str] = (),
    anew: bool = False,
) -> tuple[int, str]:
    """Start and finish in one; `settings` go into the environment, and `limit` grows on a slow machine."""
    return finish(start(size, *arguments, cwd=cwd, settings=settings, flags=flags, anew=anew), patience(limit))


def run_alone(*arguments: object, limit: float = 120, cwd: Path = ROOT, flags: Sequence[str] = ()) -> tuple[int, str]:
    """Return exit status and output of `python *arguments` without a launcher; `limit` grows on a slow machine."""
    most, environment = patience(limit), _environment(flags)
    command = [*_python(environment), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=most, cwd=cwd, env=environment)
    return done.returncode, done.stdout + done.stderr


def run_all(
    commands: Sequence[Sequence[object]], size: int | None = None, limit: float = 120, cwd: Path = ROOT
) -> list[tuple[int, str]]:
    """Return the status and the output of several programs, which run one after the other.

    Each is a file (or "-m" and a module) and its arguments. They run in one world of `size` workers, or without a
    launcher, where they take `--simulate`.
    """
    lines = [json.dumps([str(word) for word in command]) for command in commands]
    options: dict[str, Any] = {"limit": limit, "cwd": cwd, "flags": FAST_TO_COMPILE}
    if size is None:
        status, output = run_alone("-c", CHEAPER + WITHOUT_MPI + IN_TURN, *lines, **options)
    else:
        status, output = run(size, "-c", CHEAPER + IN_TURN, *lines, **options)
    assert status == 0, output
    ended = re.findall(r"^=====> starts\n(.*?)^=====> (\d+)$", output, re.MULTILINE | re.DOTALL)
    assert len(ended) == len(commands), output
    return [(int(status), text) for text, status in ended]

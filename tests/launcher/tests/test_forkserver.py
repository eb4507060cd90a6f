"""What is forked is what Python would have started: its words, its files, its environment, its end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import forkserver

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux alone")

SAYS_ALL = """
import os, sys
print(sys.argv, sys.orig_argv[1:], __name__, __builtins__ is not None, vars().get("__file__"))
print(os.getcwd(), dict(os.environ), sorted(os.sched_getaffinity(0)), sys.stdin.read())
print(sys.path[0], sorted(os.listdir("/proc/self/fd"))[:3], "colorsys" in sys.modules)
"""
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"


@pytest.fixture(scope="module")
def server() -> list[str]:
    return forkserver.python(("colorsys",), dict(os.environ))


def ended(command: list[str], words: list[str], **how: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=60, **how)  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_it_finds_what_python_gives_a_program(kind: str, server: list[str], tmp_path: Path) -> None:
    (tmp_path / "says_all.py").write_text(SAYS_ALL)
    words = {"-c": ["-c", SAYS_ALL], "-m": ["-m", "says_all"], "file": ["says_all.py"]}[kind]
    how = {"cwd": tmp_path, "env": {"LC_CTYPE": "C.UTF-8", "ONLY": "this"}, "input": "typed in"}
    forked, started = (ended(python, [*words, "-x", "y"], **how) for python in (server, [sys.executable]))
    assert started.returncode == forked.returncode == 0, forked
    assert forked.stdout.replace("True\n", "False\n") == started.stdout  # what the server has imported
    assert forked.stdout.endswith("True\n")
    assert forked.stderr == started.stderr == ""


@pytest.mark.parametrize(
    "program",
    [
        "pass",
        "raise SystemExit(7)",
        "raise SystemExit('a sentence')",
        "import os; os._exit(3)",
        "import os; os.kill(os.getpid(), 9)",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'last words')",
    ],
)
def test_it_ends_as_a_program_of_python(program: str, server: list[str]) -> None:
    forked, started = (ended(python, ["-c", program]) for python in (server, [sys.executable]))
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert bool(forked.stderr) == bool(started.stderr)


def test_an_exception_is_shown(server: list[str]) -> None:
    forked = ended(server, ["-c", "def f():\n  raise ValueError(3)\nf()"])
    assert forked.returncode == 1
    assert forked.stderr.endswith(
        'File "<string>", line 3, in <module>\n  File "<string>", line 2, in f\nValueError: 3\n'
    )


def test_each_has_a_state_of_its_own(server: list[str]) -> None:
    program = "import colorsys, random; print(random.random(), vars(colorsys).get('mark')); colorsys.mark = 1"
    outputs = {ended(server, ["-c", program]).stdout for _ in range(2)}
    assert len(outputs) == 2 and all(line.endswith(" None\n") for line in outputs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_reaches_the_program(number: signal.Signals, server: list[str]) -> None:
    client = subprocess.Popen([*server, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert client.stdout is not None
    program = int(client.stdout.readline())
    client.send_signal(number)
    assert client.stdout.read() == ""  # closed by its end
    assert client.wait(60) == -number
    assert soon_gone(program)


def soon_gone(pid: int) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False

"""`python -m distdl_jax` runs a program as `python` does."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from jobs import run_alone
from launcher import mpiexec

SHOWS = """
import sys
names = {name for name in globals() if not name.startswith("sh")}
print(sys.argv, repr(sys.path[0]), sorted(names), globals().get("__file__"), __name__, __package__)
print(type(__builtins__), __spec__ and __spec__.name, sys.modules["__main__"].__dict__ is globals(), end=" ")
print(__loader__.__class__.__name__[:6])
"""

# Both ways in one process: importing jax is what takes time.
RUNS = """
import os, sys
from distdl_jax.__main__ import main
files = ["shown.py"], ["folder"], ["shown.zip"]
for command in (*files, ["-m", "shown"], ["-m", "folder"], ["-c", open("shown.py").read()]):
    if not (child := os.fork()):
        main([*command, "a", "-b"])
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""

FAILS = """
def fails():
    raise ValueError("as it says")
fails()
"""


def as_python_does(arguments: list[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, timeout=60)
    return done.stdout + done.stderr


def test_a_program_finds_what_python_gives_it(tmp_path):
    (tmp_path / "shown.py").write_text(SHOWS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(SHOWS)
    with zipfile.ZipFile(tmp_path / "shown.zip", "w") as archive:
        archive.writestr("__main__.py", SHOWS)
    commands = (["shown.py"], ["folder"], ["shown.zip"], ["-m", "shown"], ["-m", "folder"], ["-c", SHOWS])
    plain = [as_python_does([*command, "a", "-b"], tmp_path) for command in commands]
    status, output = run_alone("-c", RUNS, cwd=tmp_path)
    assert status == 0, output
    given = [line for line in output.splitlines(keepends=True) if line.startswith(("[", "<class"))]
    assert "".join(given).replace("NoneTy", "type") == "".join(plain)


def test_the_traceback_is_the_programs_own(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    status, output = run_alone("-m", "distdl_jax", "fails.py", cwd=tmp_path)
    assert status == 1
    assert output == as_python_does(["fails.py"], tmp_path)


HOOK = """
import atexit, os, sys, time
if "PMI_SIZE" in os.environ:
    atexit.register(time.sleep, 1000)  # as MPI's own end, which may wait for the others
def hook(*_):
    print("hook", file=sys.stderr)
    if sys.argv[1:] == ["exit"]:
        sys.exit(4)
    raise KeyError("of the hook")
sys.excepthook = hook
raise ValueError("of the program")
"""


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_hook_that_fails_itself_ends_the_job(tmp_path, how):
    """Before the first partition, where the others would wait for ever."""
    (tmp_path / "hook.py").write_text(HOOK)
    plain = subprocess.run([sys.executable, "hook.py", how], capture_output=True, text=True, cwd=tmp_path)
    job = {**mpiexec.clean(os.environ), "PMI_SIZE": "2", "PMI_RANK": "1"}
    command = [sys.executable, "-m", "distdl_jax", "hook.py", how]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=job)
    status = 4 if how == "exit" else 1
    assert found.returncode == plain.returncode == status
    assert found.stderr.startswith(plain.stderr) and "before it had a partition" in found.stderr


def test_modules_of_the_working_folder_stay_there(tmp_path):
    """A program elsewhere gets the standard library's. (Python itself imports some with -m before anything of ours.)"""
    for name in ("socket", "typing", "argparse", "enum", "signal", "random", "distdl"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('of the working folder')")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "program.py").write_text("import jax, sys, socket; print(sys.path[0])")
    for options in ((), ("-P",)):
        command = [sys.executable, *options, "-m", "distdl_jax", "elsewhere/program.py"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (done.stdout.strip() == str(tmp_path / "elsewhere")) == (not options)

"""`python -m distdl_jax` runs a program as `python` does."""

import subprocess
import sys
from pathlib import Path

from jobs import run_alone

SHOWS = """
import sys
names = {name for name in globals() if not name.startswith("sh")}
print(sys.argv, repr(sys.path[0]), sorted(names), globals().get("__file__"), __name__, __package__)
print(__spec__ and __spec__.name, sys.modules["__main__"].__dict__ is globals(), __loader__.__class__.__name__[:6])
"""

# Both ways in one process: importing jax is what takes time.
RUNS = """
import os, sys
from distdl_jax.__main__ import main
for command in (["shown.py"], ["-m", "shown"], ["-m", "folder"], ["-c", open("shown.py").read()]):
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
    commands = (["shown.py"], ["-m", "shown"], ["-m", "folder"], ["-c", SHOWS])
    plain = [as_python_does([*command, "a", "-b"], tmp_path) for command in commands]
    status, output = run_alone("-c", RUNS, cwd=tmp_path)
    assert status == 0, output
    given = [line for line in output.splitlines(keepends=True) if line.startswith(("[", "None", "shown", "folder"))]
    assert "".join(given).replace("NoneTy", "type") == "".join(plain)


def test_the_traceback_is_the_programs_own(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    status, output = run_alone("-m", "distdl_jax", "fails.py", cwd=tmp_path)
    assert status == 1
    assert output == as_python_does(["fails.py"], tmp_path)

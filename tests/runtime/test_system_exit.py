"""How a main program ends that raises SystemExit itself: with which status, from Python 3.12 on; in which line."""

import subprocess
import sys
from pathlib import Path

import pytest

import distdl_jax

PROGRAM = f"""
import atexit, importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "system_exit", "{Path(distdl_jax.__file__).parent / "watchdog" / "system_exit.py"}"
)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
found = []
main = module.MainProgram(found.append)
atexit.register(lambda: print(found, repr(main.ended_at())))
def ends(code):
    raise SystemExit(code)
try:
    ends(4)  # caught: says nothing
except SystemExit:
    pass
assert main.ended_at() == ""  # it goes on
if len(sys.argv) > 1:
    ends(3)
"""


@pytest.mark.parametrize("module", [False, True], ids=["file", "module"])
@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
def test_what_is_seen_of_the_end(tmp_path, module, raises):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["-m", "program"] if module else ["program.py"]
    done = subprocess.run(
        [sys.executable, *command, *(["raises"] if raises else [])], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (3 if raises else 0, "")
    line = PROGRAM.splitlines().index("    ends(3)") + 1
    known = [3] if sys.version_info >= (3, 12) and raises else []
    assert done.stdout == f"{known} {f'program.py:{line}' if raises else ''!r}\n"

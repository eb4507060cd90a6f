"""A user's program is checked with the library's types, as `make venv` installs it: editable."""

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytest.importorskip("mypy")

PROGRAM = """
import distdl_jax as dj

P = dj.Partition()
reveal_type(P.size)
dj.Partition(3)
step = dj.jit(lambda x: 2 * x)
layer = dj.nn.DistributedLinear(P.grid([1, 1]), in_features=2.5)
"""


@pytest.mark.skipif("__editable__" not in str(distribution("distdl_jax").files), reason="not an editable install")
def test_a_users_program_is_checked(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert 'Revealed type is "int"' in done.stdout, done.stdout + done.stderr
    assert 'program.py:6: error: Argument 1 to "Partition" has incompatible type "int"' in done.stdout, done.stdout
    assert "program.py:8: error" in done.stdout, done.stdout

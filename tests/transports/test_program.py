"""`python -m distdl_jax --simulate N program.py`: the file as each worker's main program, also where MPI is missing."""

import re
from pathlib import Path

import pytest
from jobs import ROOT, run_alone

pytestmark = pytest.mark.limit(200)

WITHOUT_MPI = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *args):
        return None if name.split(".")[0] in ("mpi4py", "mpi4jax") else self.finder.find_spec(name, *args)

sys.meta_path[:] = map(Without, sys.meta_path)
"""

MODEL = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar

@dataclass
class Point:
    dim: ClassVar[int] = 1
    x: int = 0
"""

MAIN = """
from __future__ import annotations
import sys
from dataclasses import dataclass
from typing import ClassVar
import model, parts.first
from model import Point
import distdl_jax as dj
import jax.numpy as jnp

class Note:
    rank = None

@dataclass
class Place:
    dim: ClassVar[int] = 1
    x: int = 0

P = dj.Partition()
note = Note()
note.rank = P.rank
assert __name__ == "__main__" and __file__ == sys.argv[0] and sys.modules["__main__"].note is note
for kind in (Point, Place):
    points = P.allgather_data(kind(P.rank))
    assert all(type(point) is kind for point in points) and list(vars(points[0])) == ["x"]
assert [note.rank for note in P.allgather_data(note)] == list(range(P.size))
assert parts.first.rank(P) == P.rank and parts.first.model is model
total = dj.functional.all_sum_reduce(jnp.ones(2) * P.rank, P, axes_keep=())
if P.rank == 0:
    print("total", total, sys.argv[1:])
sys.exit(int(sys.argv[1]) if P.rank == 1 else 0)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Write a program with a module and a package beside it."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from . import first\n")
    (tmp_path / "parts" / "first.py").write_text("import model\n\ndef rank(P):\n    return P.rank\n")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "main.py").write_text(MAIN)
    return tmp_path / "main.py"


@pytest.mark.parametrize("status", [0, 5])
def test_every_worker_has_its_own_program_and_shares_modules(program: Path, status: int) -> None:
    got, output = run_alone("-m", "distdl_jax", "--simulate", 3, program, status, "--flag")
    assert got == status, output
    assert f"total [3. 3.] ['{status}', '--flag']" in output
    assert ("SystemExit(5): Raised on worker 1 of 3, in dj.simulate." in output) == (status == 5)


@pytest.mark.parametrize("size", [1, 3])
def test_a_module_that_makes_a_partition_is_refused(program: Path, size: int) -> None:
    """All workers would get that of the worker which imports it first."""
    (program.parent / "parts" / "first.py").write_text("from distdl_jax import Partition\n\nP = Partition()\n")
    got, output = run_alone("-m", "distdl_jax", "--simulate", size, program, 0)
    assert got == 1
    assert "SetupError: The module parts.first makes a partition while it is imported" in output


def test_readmes_program_runs_in_one_command_without_mpi(tmp_path: Path) -> None:
    """mpi4py and mpi4jax are not there: dj.simulate needs neither, and a partition outside of it says what to do."""
    readme = (ROOT / "README.md").read_text()
    code = re.search(r"^```python\n(.*?)^```$", readme, re.M | re.S)
    assert code is not None
    (tmp_path / "program.py").write_text(code[1] + "\nif P.rank == 0:\n    print('loss', loss)\n")
    then = f"""
import distdl_jax as dj
from distdl_jax.__main__ import main
main(["--simulate", "4", {str(tmp_path / "program.py")!r}])
assert not any(name.startswith("mpi4") for name in sys.modules)
dj.Partition()
"""
    status, output = run_alone("-c", WITHOUT_MPI + then)
    assert status == 1 and re.search(r"^loss 0\.\d+", output, re.M), output
    assert "SetupError: A partition needs MPI" in output and "dj.simulate(n, program)" in output
    assert "python -m distdl_jax --simulate 4 program.py" in readme


def test_a_wrong_command_line_is_refused() -> None:
    for arguments, words in (
        (("--simulate", "none", "x.py"), "'none' must be a number of workers, 1 or more."),
        (("--simulate", "2", "missing.py"), "there is no file 'missing.py'."),
    ):
        status, output = run_alone("-m", "distdl_jax", *arguments)
        assert status == 2 and words in output

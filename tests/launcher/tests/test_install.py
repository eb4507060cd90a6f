"""The launcher installs as a plugin of pytest, which then needs no line in a conftest.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import mpiexec

PLUGIN = Path(__file__).parents[1]
TEST = """
import pytest
from mpi4py import MPI

@pytest.mark.world(2)
def test_sum():
    assert MPI.COMM_WORLD.allreduce(1) == 2
"""


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "conftest", ["", 'pytest_plugins = ["launcher.plugin"]\n'], ids=["alone", "and in conftest.py"]
)
def test_an_installed_launcher(conftest: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    source, site, project = (tmp_path / name for name in ("source", "site", "project"))
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("tests", "build", "*.egg-info", "__pycache__"))
    install = [*("install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"), "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(source)], check=True)
    project.mkdir()
    (project / "conftest.py").write_text(conftest)
    (project / "test_sum.py").write_text(TEST)
    environment = mpiexec.clean(os.environ) | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sum.py"]
    ended = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0 and "1 passed" in ended.stdout, ended.stdout + ended.stderr

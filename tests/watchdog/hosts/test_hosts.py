"""Jobs on two hosts without shared memory, and under Slurm: each fault ends them everywhere, with its message.

Not in the default run: DISTDL_JAX_TEST_HOSTS=1 runs them, with root, Linux, MPICH, and for Slurm Debian's packages.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from jobs import ROOT, start_up

pytestmark = [
    pytest.mark.skipif(os.environ.get("DISTDL_JAX_TEST_HOSTS") != "1", reason="only with DISTDL_JAX_TEST_HOSTS=1"),
    pytest.mark.limit(1800),
]

HOSTS, SLURM = ROOT / "tools" / "two_hosts.sh", ROOT / "tools" / "one_node_slurm.sh"
FAULTS = Path(__file__).parents[1] / "faults"
FILES = {name: file for file in FAULTS.glob("*.py") for name in re.findall(r"^def (\w+)", file.read_text(), re.M)}
STEPS = "steps_until_ended"
CLOCK = 10


class Launcher:
    """Starts `python -m distdl_jax program` on a few workers."""

    def __init__(self, command: Sequence[str], settings: dict[str, str]) -> None:
        self.command = command
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        alike = {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "NPROC": "1", "DISTDL_JAX_TIMEOUT": str(CLOCK)}
        self.environment = {**os.environ, **alike, **settings}

    def start(self, program: str, output: Path) -> subprocess.Popen[str]:
        """Start a job, with all output in a file."""
        with output.open("w") as file:
            return subprocess.Popen(
                [*self.command, sys.executable, "-m", "distdl_jax", str(FILES[program]), program],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def run(self, program: str, folder: Path) -> tuple[int, str]:
        """Return the status and the output."""
        process = self.start(program, folder / "output")
        status = process.wait(20 * start_up() + 2 * CLOCK)
        return status, " ".join((folder / "output").read_text().split())


def wait_for_steps(output: Path) -> None:
    until = time.monotonic() + 20 * start_up()
    while "steps have begun" not in output.read_text():
        assert time.monotonic() < until, output.read_text()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Launcher]:
    subprocess.run([HOSTS, "down"], check=True)
    subprocess.run([HOSTS, "up"], check=True)
    yield Launcher([str(HOSTS), "run", "2"], {})
    subprocess.run([HOSTS, "down"], check=True)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    if shutil.which("slurmctld") is None:
        pytest.skip("there is no slurmctld")
    folder = tmp_path_factory.mktemp("slurm")
    subprocess.run([SLURM, "up", folder], check=True, timeout=120)
    command = ["srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "--overcommit", "--job-name=distdl", "--ntasks=2"]
    yield Launcher(command, {"SLURM_CONF": str(folder / "slurm.conf")})
    subprocess.run([SLURM, "down", folder], check=True)


BEFORE = "ended with exit status 1, before it had a partition with others; the job ends."
CASES = {
    "normal_end": ["worker 0 is done", "worker 1 is done"],
    "exception_before_the_first_partition": [BEFORE, "ValueError: no such configuration"],
    "never_joined": ["Worker 0 is about to run broadcast from 1 x 1 (0) to 1 x 2 (0, 1)"],
    "tags_differ": ["The plan of tags_differ.pass_on", "the message has tag 7, and one with tag 8 is expected"],
    "stopped": [f"Worker 1 was not heard from for {CLOCK} s."],
}
ENDS = {
    "killed": ["Worker 1 of 2 (process", "was ended by SIGKILL"],
    "exit_of_the_system": ["ended with exit status 0, by os._exit"],
    "segmentation_fault": ["was ended by SIGSEGV"],
}


def check(launcher: Launcher, program: str, folder: Path) -> None:
    status, output = launcher.run(program, folder)
    assert (status == 0) == (program == "normal_end"), output
    assert all(sentence in output for sentence in {**CASES, **ENDS}[program]), output


@pytest.mark.parametrize("program", CASES)
def test_on_two_hosts(program: str, hosts: Launcher, tmp_path: Path) -> None:
    check(hosts, program, tmp_path)


@pytest.mark.parametrize("program", [*CASES, *ENDS])
def test_under_slurm(program: str, slurm: Launcher, tmp_path: Path) -> None:
    check(slurm, program, tmp_path)


def test_scancel(slurm: Launcher, tmp_path: Path) -> None:
    process = slurm.start(STEPS, tmp_path / "output")
    wait_for_steps(tmp_path / "output")
    subprocess.run(["scancel", "--name=distdl"], check=True, env=slurm.environment)
    assert process.wait(20 * start_up()) != 0
    assert "Worker 0 of 2 (process" in (tmp_path / "output").read_text()


def test_a_link_that_is_cut(hosts: Launcher, tmp_path: Path) -> None:
    """The last test with these hosts: each side finds the other silent, and nothing is left on either."""
    process = hosts.start(STEPS, tmp_path / "output")
    wait_for_steps(tmp_path / "output")
    subprocess.run([HOSTS, "cut"], check=True)
    assert process.wait(20 * start_up() + 3 * CLOCK) != 0
    assert f"Worker 1 was not heard from for {CLOCK} s." in (tmp_path / "output").read_text()
    until = time.monotonic() + 60 + 3 * CLOCK
    while left := [
        pids
        for host in ("a", "b")
        if (pids := subprocess.run(["ip", "netns", "pids", f"distdl-{host}"], capture_output=True).stdout)
    ]:
        assert time.monotonic() < until, left
        time.sleep(1)

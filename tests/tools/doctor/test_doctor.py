"""`python -m distdl_jax doctor`, started as users start it, finds what is broken on purpose."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, patience, run
from launcher import mpiexec

from distdl_jax.kernels import onednn_library as shared_library

pytestmark = pytest.mark.limit(600)

DOCTOR = ["-m", "distdl_jax", "doctor", "--json"]


def content(output: str) -> dict[str, Any]:
    """Return the report in what a job has printed."""
    start, end = output.index("{\n"), output.rindex("\n}")
    report: dict[str, Any] = json.loads(output[start : end + 2])
    return report


def not_ok(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (each["verdict"], each["subject"]) for each in report["findings"] if each["verdict"] in ("warning", "error")
    }


def words(report: dict[str, Any], subject: str) -> str:
    return "\n".join(each["found"] for each in report["findings"] if each["subject"] == subject)


# Hides packages from imports, though their metadata is there.
HIDDEN = """
import os, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *args):
        return None if name.split(".")[0] == os.environ["HIDDEN"] else self.finder.find_spec(name, *args)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def by_itself(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = mpiexec.clean(os.environ) | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | settings
    return subprocess.run(
        [sys.executable, *DOCTOR, "--checkpoints", str(ROOT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )


def alone(*arguments: str, **settings: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the report of the doctor without a launcher."""
    done = by_itself(*arguments, **settings)
    return done.returncode, content(done.stdout)


def true_here(workers: int) -> set[tuple[str, str]]:
    """Return the warnings that are true of the machine that runs the tests."""
    cores, true = len(os.sched_getaffinity(0)), set()
    if cores < workers:
        true.add(("warning", "cores"))
    disk = os.statvfs("/dev/shm")
    if disk.f_bavail * disk.f_frsize < workers * 32 * 2**20:
        true.add(("warning", "shared memory"))
    if shared_library.version() == "none":
        true.add(("warning", "onednn"))
    return true


def test_a_healthy_job():
    """No warning that isn't true, and every kind of fact; worker 0 alone prints, in seconds."""
    limit, began = patience(20), time.monotonic()
    status, output = run(2, *DOCTOR, "--checkpoints", ROOT, anew=True, settings={"NPROC": "1", "OMP_NUM_THREADS": "1"})
    taken, report = time.monotonic() - began, content(output)
    assert not_ok(report) - true_here(2) == set(), report
    assert (status, report["workers"], output.count('"verdict": ')) == (0, 2, 1 + len(report["findings"]))
    assert taken < limit
    assert [host["affinity"] for host in report["hosts"]] == [sorted(os.sched_getaffinity(0))] * 2
    assert report["hosts"][0]["threads"].get("XLA", 1) == 1
    assert "MPI knows all of them" in words(report, "launcher")
    assert words(report, "message").count("from worker 0 to 1, on one host") == 2
    assert shared_library.version() == "none" or words(report, "onednn") == shared_library.description()


# Pins a worker to the first core.
PINNED = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="affinity")
def test_a_job_with_many_mistakes(tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    (tmp_path / "file").touch()
    settings = {
        "MPI4PY_RC_THREAD_LEVEL": "single",
        "DISTDL_JAX_DEBUG": "yes",
        "DISTDL_JAX_TIMOUT": "60",
        "NPROC": "64",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_DISABLE_JIT": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }
    command = ["-c", PINNED, *DOCTOR, "--checkpoints", tmp_path / "file" / "run"]
    status, output = run(2, *command, anew=True, settings=settings)
    report = content(output)
    assert status == 1 and report["verdict"] == "error"
    expected = {
        ("error", "settings"),
        ("warning", "settings"),
        ("error", "mpi"),
        ("error", "devices"),
        ("warning", "jax"),
        ("warning", "cores"),
        ("warning", "threads"),
        ("warning", "compilation cache"),
        ("warning", "checkpoints"),
    }
    assert not_ok(report) - true_here(2) == expected, report
    assert "MPI_THREAD_SINGLE" in words(report, "mpi")
    assert "2 workers on " in words(report, "cores") and "can use 1 of" in words(report, "cores")
    assert "XLA computes with 64 threads" in words(report, "threads")
    assert "JAX_NUMPY_RANK_PROMOTION" in words(report, "jax") and "JAX_DISABLE_JIT" in words(report, "jax")
    assert "did you mean DISTDL_JAX_TIMEOUT?" in words(report, "settings")
    assert words(report, "checkpoints").endswith("run can't be written to: Not a directory.")


def test_a_launcher_of_another_mpi():
    status, report = alone(PMI_SIZE="4")
    assert status == 1 and not_ok(report) - true_here(1) == {("error", "mpi")}
    assert "started 4 processes, but this one believes that it is alone" in words(report, "mpi")


@pytest.mark.skipif(mpiexec.flavour() != "hydra", reason="what MPICH does under Open MPI's launcher")
def test_a_launcher_under_which_mpi_ends_the_process():
    """The doctor says why before."""
    done = by_itself(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0", PMIX_NAMESPACE="x", PMIX_RANK="0")
    assert done.returncode != 0
    said, _, after = done.stderr.partition("unsupported PMI version")
    assert after and "The launcher is Open MPI's, but mpi4py runs on MPICH" in said


# What Open MPI's mpiexec says of its version, and does with programs of another MPI.
FAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo "mpiexec (OpenRTE) 4.1.2"; exit; fi
shift 2
"$@"; "$@"
"""


@pytest.mark.skipif(mpiexec.flavour() == "openmpi", reason="it would be the right one")
def test_an_mpiexec_of_another_mpi_first_on_path(tmp_path: Path):
    fake = tmp_path / "mpiexec"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    status, report = alone(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert status == 1 and not_ok(report) - true_here(1) == {("error", "launcher")}
    assert f"{fake} starts workers each of which believes that it is alone" in words(report, "launcher")


@pytest.mark.parametrize("package", ["jax", "jaxlib", "numpy", "mpi4py", "mpi4jax"])
def test_a_package_that_can_not_be_imported(tmp_path: Path, package: str) -> None:
    """The doctor names it, and looks at the rest."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    status, report = alone(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", HIDDEN=package)
    errors = [each["found"] for each in report["findings"] if each["verdict"] == "error"]
    assert status == 1 and all(package in error for error in errors), report
    assert {each["subject"] for each in report["findings"]} >= {"versions", "settings", "checkpoints"}


def test_the_right_mpiexec_on_path_and_a_cache_that_another_process_reads(tmp_path: Path) -> None:
    path = mpiexec.find()
    assert path is not None
    on_path = f"{Path(path).parent}{os.pathsep}{os.environ['PATH']}"
    status, report = alone(PATH=on_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"))
    assert status == 0 and not_ok(report) - true_here(1) <= {("warning", "compilation cache")}, report
    assert words(report, "launcher") == f"{path} starts workers that find each other."
    took = words(report, "compilation cache").startswith(
        ("A process finds in", "A process does not use compiled programs")
    )
    assert took and list(tmp_path.iterdir()) == []


def test_an_mpi_that_one_worker_can_not_load():
    """That worker says so, and ends the job."""
    other = [":", "-n", "1", "env", "MPI4PY_LIBMPI=/nowhere/libmpi.so", sys.executable, *DOCTOR]
    status, output = run(1, *DOCTOR, *other, anew=True)
    report = content(output)
    assert status != 0 and ("error", "mpi") in not_ok(report)
    assert "/nowhere/libmpi.so" in words(report, "mpi")
    assert "Worker 1 of 2" in output and "the job ends" in output


# Waits for another worker, but not for long.
IMPATIENT = """
import sys
from distdl_jax.tools.doctor import __main__ as doctor
doctor.LONGEST = 3
sys.exit(doctor.main(["--json"]))
"""


def test_a_worker_that_does_not_answer():
    """The first worker reports what it knows, and ends the job."""
    silent = [":", "-n", "1", sys.executable, "-c", "from mpi4py import MPI; import time; time.sleep(3600)"]
    status, output = run(1, "-m", "distdl_jax", "-c", IMPATIENT, *silent, anew=True)
    assert status != 0 and ("error", "message") in not_ok(content(output))
    assert "Worker 0 has waited 3 s for the others, although MPI has started" in words(content(output), "message")


def test_workers_in_one_process():
    status, report = alone("--simulate", "3")
    assert (status, not_ok(report) - true_here(1)) == (0, set()), report
    assert words(report, "simulate").startswith("3 workers in this process")
    assert not {each["subject"] for each in report["findings"]} & {"mpi", "launcher", "mpiexec", "message"}

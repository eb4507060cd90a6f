"""What is found of a healthy job, and of one of which a test has broken something; and how it is printed."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from distdl_jax.settings import read_settings
from distdl_jax.tools.doctor import __main__ as doctor
from distdl_jax.tools.doctor import job_checks as job
from distdl_jax.tools.doctor import worker_checks as worker
from distdl_jax.tools.doctor.report import Finding, as_json, as_text, merged
from distdl_jax.transports.mpi.launch_checks import Installation
from distdl_jax.watchdog.launch.gpus import WorkerGpu

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
GIB = 2**30
HOST = job.Host("node0", 8, tuple(range(8)), 60 * GIB, 32 * GIB, {"XLA": 2, "oneDNN": 2}, "NPROC=2")
ONE_THREAD = {"threads": {"XLA": 1, "oneDNN": 1}}


def hosts(*changed: dict[str, Any], size: int = 4, **changes: Any) -> list[job.Host]:
    """Return what `size` workers say of their hosts: with `changes` on all, `changed` on the first, second, ..."""
    return [HOST._replace(**(changes | mine)) for mine in [*changed, *({} for _ in range(size - len(changed)))]]


def not_ok(findings: Any) -> list[Finding]:
    return [finding for finding in findings if finding.verdict != "ok"]


BROKEN: dict[str, tuple[list[job.Host], tuple[str, ...]]] = {
    "healthy": (hosts(), ()),
    "more workers than cores": (
        hosts(cores=2, affinity=(0, 1), **ONE_THREAD),
        ("warning", "cores", "4 workers on node0 can use 2 of 2 cores", "Start at most 2"),
    ),
    "all on one core": (
        hosts(affinity=(0,), **ONE_THREAD),
        ("warning", "cores", "4 workers on node0 can use 1 of 8 cores", "--bind-to core"),
    ),
    "cores overlap": (
        hosts(*({"affinity": cores} for cores in ((0, 1), (1, 2), (3, 4), (5, 6))), **ONE_THREAD),
        ("warning", "cores", "worker 0 has 0, 1, worker 1 has 1, 2", "--bind-to core"),
    ),
    "many threads": (
        hosts(threads={"XLA": 64}, variables="NPROC=64"),
        ("warning", "threads", "XLA computes with 64 threads on 2 cores (NPROC=64)", "NPROC"),
    ),
    "many threads of oneDNN": (
        hosts(threads={"XLA": 2, "oneDNN": 8}),
        ("warning", "threads", "oneDNN computes with 8 threads", "OMP_NUM_THREADS"),
    ),
    "few threads": (hosts(threads={"XLA": 1}), ("note", "threads", "XLA computes with 1 thread", "NPROC=2")),
    "little memory": (hosts(memory=3 * GIB), ("warning", "memory", "0.75 GiB for each worker on node0", "fewer work")),
    "small /dev/shm": (
        hosts(shared=2**26), ("warning", "shared memory", "0.0156 GiB for each worker on node0", "--shm-size"),
    ),
    "workers dealt out": (
        hosts(*({"name": f"node{rank % 2}"} for rank in range(4)), threads={"XLA": 4}),
        ("warning", "hosts", "(node0: 0, 2; node1: 1, 3)", "--distribution=block"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_misconfigured_host_is_found(name):
    everyone, expected = BROKEN[name]
    found = not_ok(job.find(everyone))
    assert len(found) == (len(expected) > 0)
    for one in found:
        verdict, subject, words, cure = expected
        assert (one.verdict, one.subject) == (verdict, subject) and words in one.found and cure in one.cure


def test_the_fullest_of_many_hosts_is_named():
    everyone = hosts(*({"name": f"node{rank // 2}"} for rank in range(128)), size=128, threads={"XLA": 4})
    (crowded,) = (each for each in job.find([*everyone, *hosts(size=8, name="last")]) if each.subject == "cores")
    assert (crowded.verdict, crowded.found) == ("ok", "8 workers on last can use 8 of 8 cores.")
    placement = next(job.find(everyone))
    assert placement.found.endswith("node7: 14, 15; and 56 more).") and placement.verdict == "ok"


def test_what_is_right_on_some_workers_names_the_others():
    (finding,) = not_ok(job.find(hosts({}, {"threads": {"XLA": 64}}, {"threads": {"XLA": 64}})))
    assert finding.workers == (1, 2)
    assert "(workers 1, 2)" in as_text("", [finding])


def test_findings_that_differ_are_not_merged():
    each = [[Finding("note", "x", str(rank in (0, 3))), Finding("ok", "y", "")] for rank in range(4)]
    found = merged(each)
    assert [(one.found, one.workers) for one in found] == [("True", (0, 3)), ("False", (1, 2)), ("", ())]


@pytest.mark.parametrize(
    ("environment", "verdict", "words"),
    [
        ({}, "ok", "right"),
        ({"DISTDL_JAX_TIMEOUT": "soon"}, "error", "DISTDL_JAX_TIMEOUT (='soon') must be a number"),
        ({"DISTDL_JAX_TIMOUT": "60"}, "warning", "DISTDL_JAX_TIMOUT (did you mean DISTDL_JAX_TIMEOUT?)"),
    ],
)
def test_settings(environment, verdict, words):
    (found,) = doctor.settings([read_settings(environment)])
    assert found.verdict == verdict and words in found.found


def test_workers_that_differ():
    """As the first partition refuses them, but all at once."""
    gpu = WorkerGpu("node0", "", False, None, "", "")
    everyone = [Installation({"jaxlib": version, "x64": False}, read_settings({}), gpu) for version in ("1", "2", "1")]
    everyone[2] = everyone[2]._replace(versions={"jaxlib": "1", "x64": True})
    found = [finding.found for finding in worker.disagreements(everyone)]
    assert len(found) == 2 and "jaxlib, but it is 1 on 2 of 3 workers and 2 on worker 1" in found[0]
    gpus = [each._replace(versions={}, gpu=gpu._replace(gpu="GPU-1")) for each in everyone]
    (error, messages) = worker.disagreements(gpus)
    assert "mpi4jax was compiled without CUDA" in error.found
    assert (messages.verdict, messages.subject) == ("ok", "gpu messages")


@pytest.mark.parametrize(
    ("versions", "verdict", "words"),
    [
        ({"mpi4jax": None}, "error", "mpi4jax is not installed"),
        ({"jax": "0.9.1"}, "error", "jax 0.9.1 is too old"),
        ({"jax": "0.99.0"}, "warning", "tested with jax before"),
        ({"distdl_jax": None}, "ok", "distdl_jax not installed"),
    ],
)
def test_versions(monkeypatch, versions, verdict, words):
    installed = worker.installed_version
    monkeypatch.setattr(worker, "minimum_versions", lambda: {"jax": "0.10.2"})
    monkeypatch.setattr(
        worker, "installed_version", lambda package: versions.get(package, installed(package) and "0.12.0")
    )
    found = next(worker.versions())
    assert found.verdict == verdict and words in found.found


def test_mpi_is_not_needed_to_simulate(monkeypatch):
    installed = worker.installed_version
    monkeypatch.setattr(worker, "installed_version", lambda name: None if name[:4] == "mpi4" else installed(name))
    assert {found.verdict for found in worker.versions(needs_mpi=False)} == {"note"}


REJECTED = (
    "E0612 cpu_aot_loader.cc:195] Loading XLA:CPU AOT result. Target machine feature +prefer-no-gather is not "
    "supported on the host machine.\nmiss\n"
)


@pytest.mark.parametrize(
    ("reads", "printed", "verdict", "words", "cure"),
    [
        (worker.trial, "size=2\nsize=2\n", "ok", "find each other", ""),
        (worker.trial, "size=1\nsize=1\n", "error", "each of which believes that it is alone", ""),
        (worker.trial, "There are not enough slots available", "error", "not enough slots", "--oversubscribe"),
        (
            worker.trial,
            "prterun has detected an attempt to run as root",
            "error",
            "run as root",
            "--allow-run-as-root",
        ),
        (worker.reloaded, "hit\n", "ok", "finds", ""),
        (worker.reloaded, REJECTED, "warning", "+prefer-no-gather is not supported", ""),
        (worker.reloaded, "", "warning", "no further", ""),
    ],
)
def test_what_mpiexec_and_a_reader_of_a_cache_print(reads, printed, verdict, words, cure):
    found = reads("/cache", printed)
    assert found.verdict == verdict and words in found.found and cure in found.cure


@pytest.mark.parametrize(("mode", "verdict"), [(0o777, "warning"), (0o1777, "ok"), (0o755, "ok")])
def test_a_cache_that_anyone_may_change(tmp_path, mode, verdict, monkeypatch):
    jax = pytest.importorskip("jax")
    tmp_path.chmod(mode)
    monkeypatch.setattr(worker, "output", lambda *command, **settings: "hit\n")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        found = list(worker.compilation_cache("MPICH"))
        (of_open_mpi,) = (each for each in worker.compilation_cache("Open MPI") if "handles" in each.found)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert found[0].verdict == verdict and found[-1].verdict == "ok"
    assert "Leave JAX_COMPILATION_CACHE_DIR out" in of_open_mpi.cure


def test_a_folder_for_checkpoints(tmp_path):
    (found,) = worker.checkpoints(str(tmp_path / "new" / "folder"))
    assert found.subject == "checkpoints" and list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (found,) = worker.checkpoints(str(tmp_path / "file" / "folder"))
    assert (found.verdict, found.found.endswith("can't be written to: Not a directory.")) == ("warning", True)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm")
def test_a_folder_in_memory():
    (found,) = worker.checkpoints("/dev/shm")
    assert found.verdict == "warning" and "in memory (tmpfs)" in found.found


def test_messages_between_hosts():
    assert job.message(40e-6, 8, "a", "a", 1).verdict == job.message(2e-6, 8, "a", "b", 1).verdict == "ok"
    slow = job.message(40e-6, 8, "a", "b", 1)
    assert (slow.verdict, "the cluster's own MPI" in slow.cure) == ("note", True)


@pytest.mark.parametrize(
    ("environment", "library", "says"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "MPICH Version: 5.0.2", True),
        ({"MPI_LOCALNRANKS": "2"}, "Open MPI v5.0.11", True),
        ({"MPI_LOCALNRANKS": "2"}, "Intel(R) MPI Library 2021", False),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "MPICH Version: 5.0.2", False),
        ({"PMI_SIZE": "2"}, "MPICH Version: 5.0.2", False),
        ({"MPI_LOCALNRANKS": "2"}, "(no library)", False),
    ],
)
def test_a_launcher_of_another_mpi_is_named_before_mpi_starts(monkeypatch, environment, library, says):
    for name in worker.os.environ:
        if worker.SET_BY_LAUNCHERS.match(name):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "output", lambda command: library)
    assert (worker.launcher_mismatch() is not None) == says


def test_the_report_as_text_and_as_json():
    everyone = hosts(affinity=(0,), **ONE_THREAD)
    found = list(job.find(everyone))
    text = as_text("4 workers", found).splitlines()
    assert text[0] == "distdl_jax doctor: 4 workers"
    assert text[-1] == "0 errors, 1 warning, 0 notes."
    assert max(map(len, text)) <= 120
    content = json.loads(as_json(found, [host._asdict() for host in everyone]))
    assert content["verdict"] == "warning" and len(content["hosts"]) == content["workers"] == 4
    assert content["hosts"][0]["affinity"] == [0]
    assert [each["subject"] for each in content["findings"] if each["verdict"] == "warning"] == ["cores"]


def test_the_report_on_the_page_is_that_of_such_a_job():
    many = {"threads": {"XLA": 8}, "variables": "NPROC=8"}
    everyone = hosts({"threads": {"XLA": 2}}, many, many, {"threads": {"XLA": 2}})
    text = as_text("4 workers", [*job.find(everyone), job.message(0.61e-6, 8, "node0", "node0", 1)])
    assert f"```text not-run\n{text}\n```" in PAGE.read_text(), text


def test_the_page_names_every_subject():
    page, modules = PAGE.read_text(), (worker, job, doctor)
    source = "".join(Path(module.__file__ or "").read_text() for module in modules)
    subjects = set(re.findall(r'Finding\(\s*(?:"\w+"|verdict|[^"]*?), "([\w ]+)"', source)) | {"compilation cache"}
    assert len(subjects) > 14 and {each for each in subjects if f"| {each} |" not in page} == set()


@pytest.mark.world(3)
def test_messages_and_files_of_three_workers(tmp_path):
    """Of which the third calls its host by another name, and each saves to a folder of its own."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    sent = [(each.verdict in ("ok", "note"), each.found.partition(" takes ")[0]) for each in job.messages(comm, "aab")]
    of_second = [(True, f"{size} from worker 0 to 1, on one host,") for size in ("8 bytes", "1 MiB")]
    of_third = [(True, f"{size} from worker 0 to 2, on a and b,") for size in ("8 bytes", "1 MiB")]
    assert sent == ([*of_second, *of_third], of_second, of_third)[comm.rank]
    own = tmp_path / str(comm.rank)
    own.mkdir()
    (error,) = job.folder_seen(comm, str(own))
    assert (error.verdict, error.workers) == ("error", (1, 2)) and list(own.iterdir()) == []
    shared = Path(comm.bcast(str(tmp_path)))
    assert job.folder_seen(comm, str(shared)) == []

"""Each misconfiguration, made in the facts of a healthy job, is found; and a healthy job has none."""

import json
from pathlib import Path
from typing import Any

import pytest
from healthy_job import PACKAGES, job, worker

from distdl_jax.doctor import findings, launch, report
from distdl_jax.doctor.facts import Launch, Measured, Message
from distdl_jax.doctor.findings import Finding, on_each_worker

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def found(everyone: Any, measured: Measured | None = None) -> list[Finding]:
    """Return what is not ok."""
    all_of_them = report.findings(everyone, measured or Measured())
    return [finding for finding in all_of_them if finding.verdict != "ok"]


def test_a_healthy_job_has_nothing_to_find():
    assert found(job()) == []


GPU = {"platform": "gpu", "gpus": 4, "plugin": "jax-cuda13-plugin", "bridge": True}
NO_LAUNCHER = {"rank": None, "started": 1, "launcher": "", "launcher_program": None}

BROKEN = {
    # facts, (verdict, subject, words of the finding, words of the cure)
    "package missing": (
        job(software={"packages": PACKAGES | {"mpi4jax": None}}),
        ("error", "versions", "mpi4jax is not installed", "--no-binary=mpi4jax"),
    ),
    "old jax": (
        job(software={"packages": PACKAGES | {"jax": "0.9.1"}}),
        ("error", "versions", "jax 0.9.1 is too old: distdl_jax needs 0.10.2", "jax>=0.10.2"),
    ),
    "new jax": (
        job(software={"packages": PACKAGES | {"jax": "0.13.0"}}),
        ("warning", "versions", "not been tested with jax 0.13.0", "jax<0.13"),
    ),
    "new Python": (job(software={"python": "3.15.0rc1"}), ("warning", "versions", "3.15.0rc1", "")),
    "JAX does not start": (
        job(software={"jax_error": "RuntimeError: no cuda"}),
        ("error", "jax", "RuntimeError: no cuda", "JAX_PLATFORMS=cpu"),
    ),
    "jit off": (job(software={"disable_jit": True}), ("warning", "jax", "JAX_DISABLE_JIT", "")),
    "rank promotion": (job(software={"rank_promotion": "raise"}), ("warning", "jax", "RANK_PROMOTION", "allow")),
    "debug nans": (job(software={"debug_nans": True}), ("note", "jax", "JAX_DEBUG_NANS", "")),
    "oneDNN of another jaxlib": (
        job(software={"onednn": "none", "onednn_problem": "x.so is left out"}),
        ("warning", "onednn", "left out", "distdl_jax.onednn"),
    ),
    "oneDNN not compiled": (
        job(software={"onednn": "none", "onednn_is_here": True}),
        ("warning", "onednn", "oneDNN and a C++ compiler are here, but", "python -m distdl_jax.onednn"),
    ),
    "Python of old jax": (
        job(software={"python": "3.11.9"}),
        ("note", "versions", "Python 3.11.9 ends with jax 0.10.2", "make venv PYTHON="),
    ),
    "x64 on one worker": (
        job({}, {}, {"software": {"x64": True}}),
        ("error", "workers differ", "jax_enable_x64, but it is False on 3 of 4 workers and True on worker 2", ""),
    ),
    "jaxlib of one worker": (
        job({}, {"software": {"packages": PACKAGES | {"jaxlib": "0.11.0"}}}),
        ("error", "workers differ", "jaxlib, but it is 0.12.0 on 3 of 4 workers and 0.11.0 on worker 1", ""),
    ),
    "MPI of one worker": (
        job({}, {"mpi": {"implementation": "MPICH Version: 4.2.0"}}),
        ("error", "workers differ", "MPI library", ""),
    ),
    "oneDNN on one worker": (
        job({}, {"software": {"onednn": "none"}}),
        (
            "error",
            "workers differ",
            "oneDNN, but it is 3.2.0 on 3 of 4 workers and none on worker 1",
            "ONEDNN=off on all",
        ),
    ),
    "wrong setting": (
        job(environment={"DISTDL_JAX_TIMEOUT": "soon"}),
        ("error", "settings", "DISTDL_JAX_TIMEOUT (='soon', on worker 0) must be a number", "docs/settings.md"),
    ),
    "settings differ": (
        job({}, {"environment": {"DISTDL_JAX_DEBUG": "1"}}),
        ("error", "settings", "DISTDL_JAX_DEBUG", ""),
    ),
    "unknown setting": (
        job({}, {"environment": {"DISTDL_JAX_TIMOUT": "60"}}),
        ("warning", "settings", "DISTDL_JAX_TIMOUT (did you mean DISTDL_JAX_TIMEOUT?)", ""),
    ),
    "MPI not loaded": (
        [worker(mpi={"error": "RuntimeError: cannot load MPI library"})],
        ("error", "mpi", "cannot load MPI library", "LD_LIBRARY_PATH"),
    ),
    "MPI not initialized": (
        [worker(mpi={"error": "not to start MPI (mpi4py.rc.initialize)"})],
        ("error", "mpi", "not to start MPI", "MPI4PY_RC_INITIALIZE"),
    ),
    "threads of MPI": (
        job(mpi={"thread_level": "MPI_THREAD_FUNNELED"}),
        ("error", "mpi threads", "MPI_THREAD_FUNNELED", "MPI4PY_RC_THREAD_LEVEL"),
    ),
    "mpi4jax of Open MPI": (
        job(mpi={"bridge_error": "ImportError: libmpi.so.40: cannot open shared object file"}),
        ("error", "mpi4jax", "compiled for Open MPI", "--no-binary=mpi4jax"),
    ),
    "two MPI libraries": (
        job(mpi={"loaded": ("/env/lib/libmpi.so.12", "/usr/lib/libmpi.so.12")}),
        ("error", "mpi4jax", "/env/lib/libmpi.so.12, /usr/lib/libmpi.so.12", "LD_LIBRARY_PATH"),
    ),
    "another launcher": (
        [worker(mpi={"size": 1}, launch={"launcher": "Open MPI", "mpiexec_beside": "/venv/bin/mpiexec"})],
        ("error", "launcher", "Open MPI (/env/bin/hydra_pmi_proxy) started 4 processes, but each", "/venv/bin/mpiexec"),
    ),
    "srun with the wrong --mpi": (
        [worker(mpi={"size": 1}, launch={"launcher": "Slurm"})],
        ("error", "launcher", "The launcher of Slurm", "srun --mpi=list"),
    ),
    "mpiexec of another MPI": (
        [worker(size=1, launch=NO_LAUNCHER | {"mpiexec_of": "Open MPI"}, threads={"xla": 8})],
        ("error", "mpiexec", "is Open MPI's, but mpi4py runs on MPICH Version: 5.0.2", ""),
    ),
    "mpiexec that starts strangers": (
        [worker(size=1, launch=NO_LAUNCHER | {"trial": "size=1\nsize=1\n"})],
        ("error", "launcher", "each believes that it is alone", ""),
    ),
    "no slots": (
        [worker(size=1, launch=NO_LAUNCHER | {"trial": "There are not enough slots available"})],
        ("error", "launcher", "not enough slots", "--oversubscribe"),
    ),
    "root": (
        [worker(size=1, launch=NO_LAUNCHER | {"trial": "prterun has detected an attempt to run as root."})],
        ("error", "launcher", "run as root", "--allow-run-as-root"),
    ),
    "no mpiexec": (
        [worker(size=1, launch=NO_LAUNCHER | {"mpiexec": None, "mpiexec_of": "", "mpiexec_beside": "/v/mpiexec"})],
        ("warning", "launcher", "no mpiexec on PATH", "/v/mpiexec is there"),
    ),
    "more workers than cores": (
        job(host={"cores": 2, "affinity": (0, 1)}, threads={"xla": 1, "onednn": 1}),
        ("warning", "cores", "4 workers share 2 of", "at most 2 workers"),
    ),
    "all on one core": (
        job(host={"affinity": (0,)}, threads={"xla": 1, "onednn": 1}),
        ("warning", "cores", "4 workers share 1 of 8 cores on node0", "--bind-to core"),
    ),
    "a cgroup's quota": (
        job(host={"quota": 2.0}, threads={"xla": 1, "onednn": 1}),
        ("warning", "cores", "4 workers share 2 of", "at most 2 workers"),
    ),
    "cores overlap": (
        job(
            {"host": {"affinity": (0, 1)}},
            {"host": {"affinity": (1, 2)}},
            {"host": {"affinity": (3, 4)}},
            {"host": {"affinity": (5, 6)}},
            threads={"xla": 1, "onednn": 1},
        ),
        ("warning", "cores", "worker 0 has cores 0, 1, worker 1 has cores 1, 2", "--bind-to core"),
    ),
    "many threads": (
        job(threads={"environment": {"NPROC": "64"}, "xla": 64}),
        ("warning", "threads", "XLA computes with 64 threads on a worker, whose share is 2 cores (NPROC=64)", "NPROC"),
    ),
    "many threads of oneDNN": (
        job(threads={"onednn": 8}),
        ("warning", "threads", "oneDNN computes with 8 threads", "OMP_NUM_THREADS"),
    ),
    "few threads": (job(threads={"xla": 1}), ("note", "threads", "XLA computes with 1 thread", "NPROC=2")),
    "little memory": (
        job(host={"memory_available": 3 * 2**30}),
        ("warning", "memory", "768 MiB for each worker", "Fewer workers"),
    ),
    "a cgroup's memory": (
        job(host={"memory_limit": 2 * 2**30}),
        ("warning", "memory", "(a cgroup's limit is 2 GiB): 512 MiB for each worker", "Fewer workers"),
    ),
    "small /dev/shm": (
        job(host={"shared_memory": 64 * 2**20, "shared_memory_free": 64 * 2**20}),
        ("warning", "shared memory", "64 MiB of 64 MiB in /dev/shm on node0", "--shm-size"),
    ),
    "no huge pages": (job(host={"huge_pages": "never"}), ("note", "huge pages", "gives out no huge pages", "madvise")),
    "old glibc": (job(host={"glibc": "2.31"}), ("note", "huge pages", "glibc 2.31", "")),
    "malloc left alone": (job(host={"malloc": ""}), ("note", "huge pages", "GLIBC_TUNABLES=''", "")),
    "limit of addresses": (job(host={"address_space": 2**33}), ("warning", "limits", "8 GiB", "ulimit -v")),
    "workers dealt out": (
        job(*({"host": {"name": f"node{rank % 2}"}} for rank in range(4)), threads={"xla": 4, "onednn": 4}),
        ("warning", "hosts", "node0: workers 0, 2; node1: workers 1, 3", "--distribution=block"),
    ),
    "uneven hosts": (
        job({"host": {"name": "a"}}, threads={"xla": 2, "onednn": 2}),
        ("note", "hosts", "between 1 and 3 workers", ""),
    ),
    "unlike processors": (
        job({"host": {"name": "a", "processor": "Intel Xeon"}}),
        ("note", "hosts", "Intel Xeon, AMD EPYC 7763", ""),
    ),
    "little locked memory": (
        job({"host": {"name": "a", "locked_memory": 2**16}}),
        ("note", "limits", "64 KiB", "ulimit -l"),
    ),
    "cache that is not ours": (
        job(cache={"problem": "Permission denied"}),
        ("warning", "compilation cache", "Permission denied", "JAX_COMPILATION_CACHE_DIR"),
    ),
    "cache that is everybody's": (
        job(cache={"anyone_writes": True}),
        ("warning", "compilation cache", "Every user can write", "chmod go-w"),
    ),
    "cache under Open MPI": (
        job(mpi={"implementation": "Open MPI v5.0.11"}, launch={"mpiexec_of": "Open MPI"}),
        ("warning", "compilation cache", "Under Open MPI", "Leave JAX_COMPILATION_CACHE_DIR out"),
    ),
    "cache of unlike threads": (
        job({"threads": {"xla": 1}}),
        ("warning", "compilation cache", "different numbers of threads share", "a folder for each"),
    ),
    "cache of unlike processors": (
        job({"host": {"processor": "Intel Xeon"}}),
        ("warning", "compilation cache", "different processors share", "a folder for each"),
    ),
    "cache while debugging": (
        job(environment={"DISTDL_JAX_DEBUG": "1"}),
        ("note", "compilation cache", "DISTDL_JAX_DEBUG=1", ""),
    ),
    "full disk": (job(checkpoints={"free": 2**20}), ("warning", "checkpoints", "has 1 MiB free", "Make room")),
    "checkpoints in memory": (
        job(checkpoints={"filesystem": "tmpfs"}),
        ("warning", "checkpoints", "in memory", "disk"),
    ),
    "checkpoints not writable": (
        job(checkpoints={"problem": "Read-only file system"}),
        ("warning", "checkpoints", "Read-only", ""),
    ),
    "checkpoints on a local disk": (
        job({"host": {"name": "a"}}, checkpoints={"filesystem": "ext4"}),
        ("note", "checkpoints", "ext4, local", "All workers must see"),
    ),
    "two devices": (
        job(devices={"count": 2}),
        ("error", "devices", "has 2 JAX devices", "--xla_force_host_platform_device_count"),
    ),
    "GPU not used": (job(devices={"gpus": 4}), ("note", "devices", "4 NVIDIA GPUs", "jax[cuda13]")),
    "GPU not found": (
        job(devices={"gpus": 1, "plugin": "jax-cuda13-plugin"}),
        ("note", "devices", "1 NVIDIA GPU.", "jax-cuda13-plugin is installed"),
    ),
    "one GPU for all": (
        job(devices=GPU | {"use_cuda_mpi": "0"}),
        ("error", "devices", "Workers 0 to 3 on node0 share one GPU (CUDA_VISIBLE_DEVICES is not set)", "GPUS=share"),
    ),
    "no CUDA bridge": (job(devices=GPU | {"bridge": False}), ("error", "gpu messages", "without CUDA", "GPU=cuda13")),
    "MPI without CUDA": (
        job(devices=GPU | {"use_cuda_mpi": "1"}),
        ("error", "gpu messages", "segmentation fault", "MPI4JAX_USE_CUDA_MPI=0"),
    ),
    "copies though MPI knows CUDA": (
        job(devices=GPU, mpi={"cuda_aware": True}),
        ("note", "gpu messages", "copied to the host", "MPI4JAX_USE_CUDA_MPI=1"),
    ),
}


# What else is true of these jobs.
SIDE_EFFECTS = {
    "settings differ": {"compilation cache"},
    "uneven hosts": {"threads"},
    "unlike processors": {"compilation cache", "threads"},
    "little locked memory": {"threads", "hosts"},
    "cache of unlike threads": {"threads"},
    "checkpoints on a local disk": {"threads", "hosts"},
    "one GPU for all": {"gpu messages"},
    "no CUDA bridge": {"devices"},
    "MPI without CUDA": {"devices"},
    "copies though MPI knows CUDA": {"devices"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_misconfiguration_is_found(name):
    everyone, (verdict, subject, words, cure) = BROKEN[name]
    all_found = found(everyone)
    fits = [each for each in all_found if (each.verdict, each.subject) == (verdict, subject) and words in each.found]
    assert len(fits) == 1, all_found
    assert cure in fits[0].cure
    assert {each.subject for each in all_found} - {subject} == SIDE_EFFECTS.get(name, set())


def test_what_is_right_on_some_workers_names_the_others():
    everyone = job({}, {"threads": {"xla": 64}}, {"threads": {"xla": 64}})
    (finding,) = (each for each in found(everyone) if each.subject == "threads")
    assert finding.workers == (1, 2)
    assert "(workers 1, 2)" in report.as_text([finding], everyone)


def test_findings_that_differ_are_not_merged():
    merged = on_each_worker(lambda facts: [Finding("note", "x", str(facts.launch.rank in (0, 3)))], job())
    assert [(each.found, each.workers) for each in merged] == [("True", (0, 3)), ("False", (1, 2))]


def test_a_folder_that_one_host_does_not_see_is_an_error():
    everyone = job({}, {}, {"host": {"name": "b"}}, {"host": {"name": "b"}}, threads={"xla": 4, "onednn": 4})
    (error,) = found(everyone, Measured(folder_seen=(True, True, False, False)))
    assert error.verdict == "error" and "Workers 2, 3 can't see a file" in error.found


def test_mpi_is_not_needed_to_simulate():
    facts = worker(size=1, software={"packages": PACKAGES | {"mpi4py": None, "mpi4jax": None}}, launch=NO_LAUNCHER)
    all_found = list(report.findings_of_simulation(facts, 4, 0.5))
    assert {each.verdict for each in all_found} == {"ok", "note"}
    assert findings.worst(report.findings_of_simulation(facts, 4, None, "no memory")) == "error"
    small = worker(size=1, host={"memory_available": 2 * 2**30})
    assert "512 MiB for each worker" in str(list(report.findings_of_simulation(small, 4, 0.5)))


def test_the_report_as_text_and_as_json():
    everyone = job(host={"affinity": (0,)}, threads={"xla": 1, "onednn": 1})
    all_found = list(report.findings(everyone, Measured()))
    text = report.as_text(all_found, everyone).splitlines()
    assert text[0] == "distdl_jax doctor: 4 workers on 1 host"
    assert text[-1] == "0 errors, 1 warning, 0 notes."
    assert max(map(len, text)) <= 120
    content = json.loads(report.as_json(all_found, everyone))
    assert content["verdict"] == "warning" and len(content["facts"]) == content["workers"] == 4
    assert content["facts"][0]["host"]["affinity"] == [0] and content["facts"][3]["launch"]["rank"] == 3
    assert [each["subject"] for each in content["findings"] if each["verdict"] == "warning"] == ["cores"]


@pytest.mark.parametrize(
    ("launcher", "library", "says"),
    [
        ("Open MPI", "MPICH Version: 5.0.2", True),
        ("MPICH", "Open MPI v5.0.11", True),
        ("MPICH", "Intel(R) MPI Library 2021", False),
        ("Slurm", "MPICH Version: 5.0.2", False),
        ("unknown", "MPICH Version: 5.0.2", False),
        ("MPICH", "(no library)", False),
    ],
)
def test_a_launcher_of_another_mpi_is_named_before_mpi_starts(launcher, library, says):
    finding = launch.foreseen(Launch(0, 2, launcher, implementation=library, mpiexec_beside="/env/bin/mpiexec"))
    assert (finding is not None) == says
    assert finding is None or (finding.verdict, "/env/bin/mpiexec" in finding.cure) == ("error", True)


def test_one_worker_of_a_broken_job_speaks_for_itself():
    alone = [worker(2, mpi={"error": "RuntimeError: cannot load MPI library"})]
    all_found = list(report.findings(alone, Measured()))
    assert report.as_text(all_found, alone).startswith("distdl_jax doctor: worker 2 of 4, by itself\n")
    assert not [each for each in all_found if each.subject in ("cores", "threads", "memory")]


def test_the_page_names_every_subject():
    page = PAGE.read_text()
    subjects = {each.subject for everyone, _ in BROKEN.values() for each in report.findings(everyone, Measured())}
    assert {subject for subject in subjects if f"| {subject} |" not in page} == set()


def test_the_report_on_the_page_is_that_of_such_a_job():
    threads = {"threads": {"environment": {"NPROC": "8"}, "xla": 8}}
    everyone = job({}, threads, threads, host={"huge_pages": "never"}, cache={"path": "/home/me/jax"})
    measured = Measured((Message(0, 1, 8, 0.61e-6), Message(0, 1, 2**20, 131e-6)), {8: 1.7e-6, 2**20: 310e-6})
    text = report.as_text(list(report.findings(everyone, measured)), everyone)
    assert f"```text not-run\n{text}\n```" in PAGE.read_text(), text


def test_a_job_of_many_hosts_has_as_many_lines_as_one_of_two():
    def hosts(count):
        each = (
            {"host": {"name": f"node{rank // 2}", "memory_available": 2**35 + rank * 2**28}}
            for rank in range(2 * count)
        )
        return job(*each, size=2 * count, threads={"xla": 4, "onednn": 4})

    few, many = (list(report.findings(hosts(count), Measured())) for count in (2, 64))
    assert [(each.verdict, each.subject) for each in few] == [(each.verdict, each.subject) for each in many]
    (cores,) = (each.found for each in many if each.subject == "cores")
    assert cores.startswith("2 workers share 8 of 8 cores on node0, node1, node2, node3 and 60 more")

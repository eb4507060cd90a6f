"""The GPU of each worker, chosen from facts of hosts that are given as values; and what the first partition refuses."""

import pytest

import distdl_jax as dj
from distdl_jax.transports.mpi import launch_checks
from distdl_jax.watchdog.launch.gpus import XLA_FLAG, WorkerGpu, choose_gpu, gpu_messages, gpu_problem, visible_gpus
from distdl_jax.watchdog.launch.launcher import local_rank

FOUR = ("0", "1", "2", "3")


def chosen(gpus, workers, use="own", **environment):
    """Return the GPU and the fraction of its memory that each worker of a host gets."""
    choices = [choose_gpu(environment, gpus, workers, number, use, "node0") for number in range(workers)]
    assert not any(choice.problem for choice in choices)
    assert [bool(choice.line) for choice in choices] == [True] + [False] * (workers - 1)
    names = ("CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION")
    return [tuple(choice.added.get(name) for name in names) for choice in choices]


def test_each_worker_takes_the_gpu_of_its_number():
    assert chosen(FOUR, 4) == [(gpu, None) for gpu in FOUR]
    assert chosen(FOUR, 2) == [("0", None), ("1", None)]
    assert chosen(FOUR, 1) == [("0", None)]
    assert chosen(("5", "GPU-a"), 2, CUDA_VISIBLE_DEVICES="5,GPU-a") == [("5", None), ("GPU-a", None)]


def test_workers_that_share_a_gpu_divide_its_memory():
    assert chosen(("0",), 2, "share") == [("0", "0.375")] * 2
    assert chosen(("0", "1"), 3, "share") == [("0", "0.375"), ("1", "0.750"), ("0", "0.375")]
    assert chosen(FOUR, 4, "share") == [(gpu, None) for gpu in FOUR]
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert chosen(("0",), 2, "share", **{name: "0.2"}) == [("0", None)] * 2


def test_too_few_gpus_are_refused_unasked():
    for number in range(2):
        choice = choose_gpu({}, ("0",), 2, number, "own", "node0")
        assert choice.added == {} and choice.problem.startswith("node0 has 1 GPU for 2 workers: ")
        assert "DISTDL_JAX_GPUS=share" in choice.problem
    assert choose_gpu({}, FOUR, 5, 0, "own", "node0").problem


def test_what_slurm_or_the_user_gives_stays():
    assert chosen(("0",), 4, CUDA_VISIBLE_DEVICES="0") == [("0", None)] * 4  # each in a container of its own
    assert "CUDA_VISIBLE_DEVICES" not in choose_gpu({}, FOUR, 4, 2, "given", "node0").added
    assert "CUDA_VISIBLE_DEVICES" not in choose_gpu({}, FOUR, 4, None, "own", "node0").added
    assert choose_gpu({}, (), 4, 2, "own", "node0") == ({}, "", "")


def test_xla_gets_the_flag_without_which_it_ends():
    def flags(**environment):
        return choose_gpu(environment, FOUR, 4, 0, "own", "node0").added["XLA_FLAGS"]

    assert flags() == XLA_FLAG
    assert flags(XLA_FLAGS="--one") == f"{XLA_FLAG} --one"
    assert flags(XLA_FLAGS=XLA_FLAG.replace("false", "true")) == XLA_FLAG.replace("false", "true")


def test_visible_gpus():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,0"}) == ("2", "0")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == ()


@pytest.mark.parametrize("name", ["MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"])
def test_the_number_on_a_host_is_the_launchers(name, monkeypatch):
    monkeypatch.setenv(name, "3")
    monkeypatch.setattr("distdl_jax.watchdog.launch.launcher.job_size", lambda: 4)
    assert local_rank() == 3
    monkeypatch.setattr("distdl_jax.watchdog.launch.launcher.job_size", lambda: 1)
    assert local_rank() == 0  # a shell of a batch job has such variables, too


RIGHT = WorkerGpu("node0", "GPU-a", bridge=True, cuda_aware=False, use_cuda_mpi="0", xla_flags=XLA_FLAG)
OTHER = RIGHT._replace(gpu="GPU-b")


@pytest.mark.parametrize(
    ("everyone", "says"),
    [
        ([RIGHT, RIGHT], "Workers 0, 1 on node0 share one GPU"),
        ([OTHER, RIGHT._replace(bridge=False)], "Worker 1 computes on a GPU, but mpi4jax was compiled without CUDA"),
        ([OTHER, RIGHT._replace(use_cuda_mpi="1")], "MPI4JAX_USE_CUDA_MPI is 1 on worker 1"),
        ([OTHER._replace(xla_flags=""), RIGHT], XLA_FLAG),
        ([RIGHT, OTHER], ""),
        ([RIGHT, RIGHT._replace(host="node1")], ""),
        ([RIGHT._replace(gpu="", bridge=False, xla_flags="")] * 2, ""),
        ([OTHER, RIGHT._replace(use_cuda_mpi="1", cuda_aware=None)], ""),
        ([RIGHT._replace(bridge=False, xla_flags="")], ""),
    ],
)
def test_what_can_not_run_is_refused(everyone, says):
    problem = gpu_problem(everyone, "own")
    assert says in problem if says else not problem
    assert not gpu_problem([RIGHT, RIGHT], "share")


def test_how_messages_travel_is_said():
    assert "copied through the host; the MPI library is built without CUDA" in gpu_messages([RIGHT])
    assert "reads the GPUs' memory" in gpu_messages([RIGHT._replace(use_cuda_mpi="1", cuda_aware=True)])
    assert gpu_messages([RIGHT._replace(gpu="")]) == ""


@pytest.mark.world(2)
def test_two_workers_on_one_gpu_are_refused_on_both(monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr(launch_checks, "_worker_gpu", lambda: RIGHT)
    with pytest.raises(dj.SetupError, match="Workers 0, 1 on node0 share one GPU"):
        launch_checks.check_workers_agree(MPI.COMM_WORLD)

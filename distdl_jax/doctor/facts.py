"""The facts of one worker, and what workers measure together: plain values, which travel as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdl_jax.settings import Reading


@dataclass(frozen=True)
class Software:
    """Python, packages and JAX's options.

    - `packages`: versions by name; None for what is not installed.
    - `minimum`: the versions that distdl_jax needs, by package.
    - `location`: the folder of distdl_jax.
    - `jax_error`: why JAX can't be imported, or has no device; then the options are the defaults.
    - `onednn`: the version of oneDNN, or "none"; `onednn_problem`: why a compiled one is left out; `onednn_is_here`:
      whether it could be compiled, by the looks of it.
    """

    python: str
    packages: dict[str, str | None]
    minimum: dict[str, str] = field(default_factory=dict)
    location: str = ""
    jax_error: str | None = None
    x64: bool = False
    disable_jit: bool = False
    debug_nans: bool = False
    rank_promotion: str = "allow"
    onednn: str = "none"
    onednn_problem: str | None = None
    onednn_is_here: bool = False


@dataclass(frozen=True)
class Mpi:
    """The MPI of this process, without a launcher's view of it.

    - `error`: why mpi4py can't load or start it.
    - `implementation`: its name and version; `loaded`: the files of all MPI libraries in this process.
    - `thread_level`: the name of its level of thread support.
    - `bridge_error`: why mpi4jax can't be imported.
    - `cuda_aware`: whether the library reads a GPU's memory; None where it does not say.
    """

    error: str | None = None
    implementation: str = ""
    loaded: tuple[str, ...] = ()
    size: int = 1
    thread_level: str = "MPI_THREAD_MULTIPLE"
    bridge_error: str | None = None
    cuda_aware: bool | None = None


@dataclass(frozen=True)
class Launch:
    """What has started this process, and what would start others.

    - `rank`, `started`: its number and the number of processes, as the launcher says.
    - `launcher`: "MPICH", "Open MPI", "Slurm", or "" where there is none; `launcher_program`: its file.
    - `implementation`: the MPI library that mpi4py would load; found out where a launcher is around.
    - `mpiexec`, `mpiexec_of`: the one on PATH, and whose it is; `mpiexec_beside`: the one beside Python.
    - `trial`: what `mpiexec -n 2` printed, "size=2" for a worker in a world of two; None if not tried.
    """

    rank: int | None = None
    started: int = 1
    launcher: str = ""
    launcher_program: str | None = None
    implementation: str = ""
    mpiexec: str | None = None
    mpiexec_of: str = ""
    mpiexec_beside: str | None = None
    trial: str | None = None
    srun: bool = False


@dataclass(frozen=True)
class Host:
    """A worker's host, and what of it the worker may use. Sizes in bytes; None where there is no limit, or unknown.

    - `cores`: of the host; `affinity`: those that this worker may run on; `quota`: processors that a cgroup gives.
    - `memory_limit`: of a cgroup; `address_space`, `locked_memory`: limits of the process.
    - `huge_pages`: always, madvise or never; `glibc`: its version, "" for another libc; `malloc`: GLIBC_TUNABLES.
    """

    name: str
    processor: str = ""
    cores: int = 1
    affinity: tuple[int, ...] = (0,)
    quota: float | None = None
    memory: int | None = None
    memory_available: int | None = None
    memory_limit: int | None = None
    address_space: int | None = None
    locked_memory: int | None = None
    shared_memory: int | None = None
    shared_memory_free: int | None = None
    huge_pages: str = ""
    glibc: str = ""
    malloc: str = ""


@dataclass(frozen=True)
class Threads:
    """The threads that a worker computes with.

    - `environment`: those of the variables that decide on them which are set.
    - `xla`: counted in this process; `onednn`: of each call.
    """

    environment: dict[str, str] = field(default_factory=dict)
    xla: int | None = None
    onednn: int = 1


@dataclass(frozen=True)
class Folder:
    """A folder that the library or JAX writes to.

    - `problem`: why this worker can't write there; None if it can.
    - `filesystem`: its type, as the system's table of mounts says; `free`: bytes.
    - `anyone_writes`: whether every user of the host can.
    """

    path: str
    problem: str | None = None
    filesystem: str = ""
    free: int | None = None
    anyone_writes: bool = False


@dataclass(frozen=True)
class Devices:
    """JAX's devices, and the GPUs of the host.

    - `platform`, `count`: JAX's default device, and how many this process has.
    - `gpus`: NVIDIA GPUs of the host; `visible`: CUDA_VISIBLE_DEVICES; `plugin`: JAX's package for CUDA.
    - `bridge`: whether mpi4jax has its CUDA bridge; `use_cuda_mpi`: MPI4JAX_USE_CUDA_MPI.
    - `platforms`: JAX_PLATFORMS. - `gpu`: the name of the GPU that CUDA shows this process first.
    """

    platform: str = "cpu"
    count: int = 1
    gpus: int = 0
    visible: str | None = None
    plugin: str | None = None
    bridge: bool = False
    use_cuda_mpi: str | None = None
    platforms: str = ""
    gpu: str = ""


@dataclass(frozen=True)
class Facts:
    """All facts of one worker. `cache`: JAX's compilation cache, None where none is set."""

    software: Software
    settings: Reading
    host: Host
    mpi: Mpi = Mpi()
    launch: Launch = Launch()
    threads: Threads = Threads()
    devices: Devices = Devices()
    cache: Folder | None = None
    checkpoints: Folder | None = None


@dataclass(frozen=True)
class Message:
    """The time of a message from one worker to another."""

    source: int
    to: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What workers measured together.

    - `messages`: half of a round trip, the median of several.
    - `all_reduces`: seconds by the bytes of each worker's array.
    - `folder_seen`: by worker, whether it sees a file that worker 0 wrote to the folder for checkpoints.
    """

    messages: tuple[Message, ...] = ()
    all_reduces: dict[int, float] = field(default_factory=dict)
    folder_seen: tuple[bool, ...] = ()

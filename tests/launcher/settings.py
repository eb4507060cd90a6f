"""Settings of a test run: environment variables, limits, and what the processes of a world get."""

import os
from collections.abc import MutableMapping
from importlib.metadata import version

PREFIX = "DISTDL_JAX_TEST_"
DEFAULT_LIMIT = 120.0


def long_run() -> bool:
    """Return whether the user wants all combinations and more examples."""
    return os.environ.get(f"{PREFIX}LONG", "0") not in ("", "0")


def limit(seconds: float = DEFAULT_LIMIT) -> float:
    """Return the user's own limit, or `seconds` times the load of each core (at most 10): limits are for hangs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = float(os.environ.get(f"{PREFIX}LIMIT") or 0)
    return own or seconds * min(10.0, max(1.0, os.getloadavg()[0] / cores))


def worlds_at_a_time() -> int:
    """Return how many worlds may run at a time, the plain tests counting as one."""
    return max(1, int(os.environ.get(f"{PREFIX}WORLDS") or 2))


# Where programs compute on one GPU that all their workers share; `pytest -m gpu` has what is to run so.
ON_GPU = os.environ.get(f"{PREFIX}GPU") == "1"
# Tests compile much and run little: LLVM need not be given a program in many parts, and XLA's newer code generator,
# which jax 0.11 made the only one, takes twice as long over what is small. Where little is computed, it need not try
# hard either. All of it brings compilation down to a tenth; but a block may then differ from the whole in the last bit.
# Tests of one worker are compiled as users compile them, and so is everything in a long run.
FAST_TO_COMPILE = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):
    FAST_TO_COMPILE.append("--xla_cpu_use_fusion_emitters=false")
if long_run() or ON_GPU:
    FAST_TO_COMPILE.clear()

IN_TESTS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
    "JAX_TRACEBACK_FILTERING": "off",  # a failure shows the library's frames, too
    "OPENBLAS_NUM_THREADS": "1",  # else each import of numpy has its threads spin, for a third of what it takes
}
# NPROC is the size of XLA's thread pool; the flag below alone does not limit it in jaxlib 0.10.
ON_A_RANK = {**IN_TESTS, "NPROC": "1", "OMP_NUM_THREADS": "1"}


def set_up_plain(environment: MutableMapping[str, str]) -> None:
    """Set what the pytest process needs, where the user has not."""
    for name, value in IN_TESTS.items():
        environment.setdefault(name, value)
    environment["XLA_FLAGS"] = with_flags(environment.get("XLA_FLAGS", ""), *FAST_TO_COMPILE)


def set_up_rank(environment: MutableMapping[str, str], size: int) -> None:
    """Set the CPU, float64 and one thread. What runs on one worker alone is compiled as users compile it."""
    for name, value in ON_A_RANK.items():
        environment.setdefault(name, value)
    flags = " ".join(flag for flag in environment.get("XLA_FLAGS", "").split() if flag not in FAST_TO_COMPILE)
    fast = FAST_TO_COMPILE if size > 1 else []
    environment["XLA_FLAGS"] = with_flags(flags, "--xla_cpu_multi_thread_eigen=false", *fast)


def with_flags(flags: str, *more: str) -> str:
    """Return XLA's flags, with those of `more` that the user has not set."""
    return " ".join([*flags.split(), *(flag for flag in more if flag.split("=")[0] not in flags)])

"""JAX's persistent compilation cache: jobs that share it compute what they would without it."""

import re
from pathlib import Path

import pytest
from jobs import run
from launcher import mpiexec

pytestmark = pytest.mark.primitives  # under each MPI, for their handles are of different kinds

PROGRAM = Path(__file__).parent / "cached_program.py"


def job(order: str, cache: Path) -> tuple[int, int]:
    """How many programs one job has found in the cache, and how many not."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    status, output = run(3, PROGRAM, order, settings=settings, anew=True)
    assert status == 0, output
    found = re.findall(r"^worker \d is done, (\d+) found, (\d+) not$", output, re.M)
    assert len(found) == 3, output
    return sum(int(hits) for hits, _ in found), sum(int(misses) for _, misses in found)


def test_jobs_that_share_a_cache(tmp_path):
    """Teams made in another order have other handles, or the same ones for other workers."""
    first = job("01234", tmp_path)
    second = job("01234", tmp_path)
    assert first[1] > 20 and second[0] > first[0]
    if mpiexec.flavour() == "hydra":  # whose handles are numbers; of others they are addresses
        assert second[1] == 0
    for order in ("43210", "20143", "3", "1403"):
        found, compiled = job(order, tmp_path)
        assert found > compiled

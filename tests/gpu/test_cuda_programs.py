"""The library's programs lower for CUDA as on a GPU, by mpi4jax's rules for CUDA, without one.

It shows that no rule for CPUs alone, no kernel for CPUs, no call back to Python and no demand on layouts is in their
way. It shows neither that XLA compiles them (`cuda_programs.py --compile` does) nor that they run.
"""

import json
import os

from jobs import ROOT, run
from launcher.settings import long_run

MESSAGES = {"mpi_allreduce_ffi", "mpi_recv_ffi", "mpi_sendrecv_ffi"}
FOLDERS = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests", "benchmarks", "examples"))


def test_primitives_layers_and_networks_lower_for_cuda():
    arguments = ["tests/gpu/cuda_programs.py"] + ["--all"] * long_run()
    status, output = run(2, *arguments, settings={"PYTHONPATH": FOLDERS, "MPI4JAX_USE_CUDA_MPI": "0"}, limit=300)
    assert status == 0, output
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(found) == 2, output
    for worker in found:
        assert len(worker["programs"]) > 100
    # All that is called is a message: JAX's own random numbers are no custom call here.
    assert set().union(*(worker["calls"] for worker in found)) == MESSAGES

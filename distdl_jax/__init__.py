"""Model-parallel deep learning for JAX over MPI.

Tensors are split over partitions of workers, data moves between partitions by primitives with exact adjoints, and
distributed layers give block for block what the sequential layers give.
"""

# ruff: noqa: E402
from distdl_jax.backends.mpi.memory import prefer_huge_pages

prefer_huge_pages()  # before mpi4py starts MPI, whose threads would get heaps of their own

from distdl_jax import functional, nn
from distdl_jax.backends.mpi.partition import MPICartesianPartition as CartesianPartition
from distdl_jax.backends.mpi.partition import MPIPartition as Partition
from distdl_jax.checking import check, jit
from distdl_jax.differentiation import value_and_grad
from distdl_jax.errors import DistDLError, InvalidArgumentError, InvalidTypeError, PlanError, SetupError
from distdl_jax.tensors import TensorSpec, gather, scatter
from distdl_jax.zero_volume import zero_volume_tensor

__all__ = [
    "CartesianPartition",
    "DistDLError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "Partition",
    "PlanError",
    "SetupError",
    "TensorSpec",
    "check",
    "functional",
    "gather",
    "jit",
    "nn",
    "scatter",
    "value_and_grad",
    "zero_volume_tensor",
]
__version__ = "0.1.0"

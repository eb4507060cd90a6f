"""The primitives: linear data movements between partitions, each with its exact adjoint."""

from distdl_jax.backends.mpi.functional.all_sum_reduce import all_sum_reduce as all_sum_reduce
from distdl_jax.backends.mpi.functional.replication import broadcast as broadcast
from distdl_jax.backends.mpi.functional.replication import sum_reduce as sum_reduce

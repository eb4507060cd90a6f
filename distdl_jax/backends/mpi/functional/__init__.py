"""The primitives: linear data movements between partitions, each with its exact adjoint."""

from distdl_jax.backends.mpi.functional.all_gather import all_gather as all_gather
from distdl_jax.backends.mpi.functional.all_gather import reduce_scatter as reduce_scatter
from distdl_jax.backends.mpi.functional.all_sum_reduce import all_sum_reduce as all_sum_reduce
from distdl_jax.backends.mpi.functional.halo_exchange import halo_exchange as halo_exchange
from distdl_jax.backends.mpi.functional.repartition import repartition as repartition
from distdl_jax.backends.mpi.functional.replication import broadcast as broadcast
from distdl_jax.backends.mpi.functional.replication import sum_reduce as sum_reduce

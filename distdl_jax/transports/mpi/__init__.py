"""The MPI back-end: partitions over mpi4py communicators, data movement through mpi4jax."""

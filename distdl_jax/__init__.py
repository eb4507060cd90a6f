"""Model-parallel deep learning for JAX over MPI."""

"""Algorithms of convolutions on CPUs, and the choice between them; imported only if JAX computes on a CPU."""

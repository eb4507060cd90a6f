"""Algorithms of convolutions on CPUs, and the choice between them; imported where JAX computes on a CPU only."""

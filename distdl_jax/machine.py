"""Machines as five numbers, from which `dj.cost` and `dj.advise` estimate seconds."""

from distdl_jax.tools.cost.machines import Machine, load, measure, names

__all__ = ["Machine", "load", "measure", "names"]

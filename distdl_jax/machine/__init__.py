"""Machines: files that say how long messages and arithmetic take, and their measurement."""

from distdl_jax.machine.machine import Machine, load, names
from distdl_jax.machine.measurement import measure

__all__ = ["Machine", "load", "measure", "names"]

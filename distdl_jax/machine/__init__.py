"""Machines: files that say how long messages and arithmetic take, and their measurement."""

from distdl_jax.machine.machine import Machine, load, names

__all__ = ["Machine", "load", "names"]

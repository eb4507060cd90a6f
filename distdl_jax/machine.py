"""Machines as five numbers, from which `dj.cost` estimates seconds."""

from distdl_jax.tools.cost.machines import Machine, load, measure, names

__all__ = ["Machine", "load", "measure", "names"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)

"""Checkpoints: the state of a run on disk, which any number of workers on any partition can read."""

from distdl_jax.checkpoint.import_export import export, import_
from distdl_jax.checkpoint.manager import Manager
from distdl_jax.checkpoint.preemption import Preemption
from distdl_jax.checkpoint.reading import latest_step, restore, steps
from distdl_jax.checkpoint.writing import save

__all__ = ["Manager", "Preemption", "export", "import_", "latest_step", "restore", "save", "steps"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)

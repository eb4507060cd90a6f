"""Data read in parts: every worker reads its own box of every sample, and all read the samples in the same order."""

from distdl_jax.data.batches import Batches, batches
from distdl_jax.partitions.formats.arrays import open_array, read
from distdl_jax.transports.threads.one_reader import one_reader

__all__ = ["Batches", "batches", "one_reader", "open_array", "read"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)

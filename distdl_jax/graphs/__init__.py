"""Meshes and graphs: their edges, and an order of nodes in which neighbours are mostly on one worker; in numpy."""

from distdl_jax.graphs.connectivity import edges_of_cells
from distdl_jax.graphs.ordering import order_nodes

__all__ = ["edges_of_cells", "order_nodes"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)

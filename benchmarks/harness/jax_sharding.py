"""JAX's own way to spread work over the same processes: one mesh over all workers, collectives over gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "gloo")

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mpi4py import MPI


def start() -> None:
    """Make the workers one JAX program as well. Call it before the first JAX array."""
    comm = MPI.COMM_WORLD
    if comm.size == 1:
        return
    address = None
    if comm.rank == 0:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
    jax.distributed.initialize(comm.bcast(address), comm.size, comm.rank)


def sharding(partition: Sequence[int]) -> NamedSharding:
    """Return the sharding of a tensor over a grid of all workers."""
    names = tuple("abcdefgh"[: len(partition)])
    mesh = Mesh(np.asarray(jax.devices()).reshape(partition), names)
    return NamedSharding(mesh, PartitionSpec(*(n if p > 1 else None for n, p in zip(names, partition, strict=True))))


def ones(shape: Sequence[int], partition: Sequence[int]) -> Any:
    """Return a global array of ones, spread over a grid of all workers that divides its shape."""
    local = np.ones(tuple(n // p for n, p in zip(shape, partition, strict=True)), np.float32)
    return jax.make_array_from_process_local_data(sharding(partition), local, tuple(shape))

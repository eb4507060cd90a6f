"""Layers: the primitives as objects, and distributed layers as pure functions of their parameters."""

from distdl_jax.nn.linear import DistributedLinear
from distdl_jax.nn.primitives import (
    AllGather,
    AllSumReduce,
    Broadcast,
    DistributedTranspose,
    HaloExchange,
    ReduceScatter,
    Repartition,
    SumReduce,
    Transpose,
)

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "DistributedLinear",
    "DistributedTranspose",
    "HaloExchange",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
    "Transpose",
]

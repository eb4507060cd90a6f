"""Layers: the primitives as objects, and distributed layers as pure functions of their parameters."""

from distdl_jax.nn.conv import (
    DistributedChannelConv1d,
    DistributedChannelConv2d,
    DistributedChannelConv3d,
    DistributedConv1d,
    DistributedConv2d,
    DistributedConv3d,
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
    DistributedGeneralConv1d,
    DistributedGeneralConv2d,
    DistributedGeneralConv3d,
)
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
    "DistributedChannelConv1d",
    "DistributedChannelConv2d",
    "DistributedChannelConv3d",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedFeatureConv1d",
    "DistributedFeatureConv2d",
    "DistributedFeatureConv3d",
    "DistributedGeneralConv1d",
    "DistributedGeneralConv2d",
    "DistributedGeneralConv3d",
    "DistributedLinear",
    "DistributedTranspose",
    "HaloExchange",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
    "Transpose",
]

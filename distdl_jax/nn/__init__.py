"""Layers: the primitives as objects, and distributed layers as pure functions of their parameters."""

from distdl_jax.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from distdl_jax.nn.conv_one_algorithm import (
    DistributedChannelConv1d,
    DistributedChannelConv2d,
    DistributedChannelConv3d,
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
    DistributedGeneralConv1d,
    DistributedGeneralConv2d,
    DistributedGeneralConv3d,
)
from distdl_jax.nn.data_movement import (
    AllGather,
    AllReduce,
    AllSumReduce,
    Broadcast,
    DistributedTranspose,
    HaloExchange,
    ReduceScatter,
    Repartition,
    SumReduce,
    Transpose,
)
from distdl_jax.nn.layer import Layer
from distdl_jax.nn.linear import DistributedLinear
from distdl_jax.nn.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from distdl_jax.nn.sequential import Sequential

__all__ = [
    "AllGather",
    "AllReduce",
    "AllSumReduce",
    "Broadcast",
    "DistributedAvgPool1d",
    "DistributedAvgPool2d",
    "DistributedAvgPool3d",
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
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedTranspose",
    "HaloExchange",
    "Layer",
    "ReduceScatter",
    "Repartition",
    "Sequential",
    "SumReduce",
    "Transpose",
]

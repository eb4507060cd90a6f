"""Layers: the primitives as objects, and distributed layers as pure functions of their parameters."""

from distdl_jax.distribute.map_blocks import Local
from distdl_jax.nn.attention.attention import DistributedMultiHeadAttention
from distdl_jax.nn.attention.embedding import DistributedEmbedding
from distdl_jax.nn.base.layer import Layer
from distdl_jax.nn.conv.conv import (
    DistributedChannelConv1d,
    DistributedChannelConv2d,
    DistributedChannelConv3d,
    DistributedChannelConv4d,
    DistributedConv1d,
    DistributedConv2d,
    DistributedConv3d,
    DistributedConv4d,
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
    DistributedFeatureConv4d,
    DistributedGeneralConv1d,
    DistributedGeneralConv2d,
    DistributedGeneralConv3d,
    DistributedGeneralConv4d,
)
from distdl_jax.nn.conv.conv_lstm import (
    DistributedConvLSTMCell1d,
    DistributedConvLSTMCell2d,
    DistributedConvLSTMCell3d,
)
from distdl_jax.nn.conv.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
    DistributedConvTranspose4d,
)
from distdl_jax.nn.dense.dropout import Dropout
from distdl_jax.nn.dense.linear import DistributedLinear
from distdl_jax.nn.dense.pointwise import DistributedPointwise
from distdl_jax.nn.dense.prelu import DistributedPReLU
from distdl_jax.nn.dense.squeeze_excitation import DistributedSqueezeExcitation
from distdl_jax.nn.dense.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from distdl_jax.nn.experts.mixture import DistributedMixtureOfExperts
from distdl_jax.nn.graph.graph_conv import DistributedGraphConv
from distdl_jax.nn.graph.graph_net import DistributedGraphNetBlock
from distdl_jax.nn.losses.classes import DistributedAccuracy, DistributedCrossEntropyLoss
from distdl_jax.nn.losses.dice import DistributedDiceLoss
from distdl_jax.nn.losses.focal import DistributedFocalLoss
from distdl_jax.nn.losses.loss import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedHuberLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedLoss,
    DistributedMSELoss,
    DistributedPoissonNLLLoss,
)
from distdl_jax.nn.networks.pipeline import Pipeline
from distdl_jax.nn.networks.remat_precision import Precision, Remat
from distdl_jax.nn.networks.residual import Residual, Skip
from distdl_jax.nn.networks.sequential import Sequential
from distdl_jax.nn.norm.batch import DistributedBatchNorm
from distdl_jax.nn.norm.per_sample import (
    DistributedGroupNorm,
    DistributedInstanceNorm,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from distdl_jax.nn.norm.weight_norms import SpectralNorm, WeightNorm
from distdl_jax.nn.pool.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedAvgPool4d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
    DistributedMaxPool4d,
)
from distdl_jax.nn.recurrent.cells import DistributedGRUCell, DistributedLSTMCell
from distdl_jax.nn.recurrent.over_time import DistributedGRU, DistributedLSTM
from distdl_jax.nn.shape.concatenate import Concatenate
from distdl_jax.nn.shape.data_movement import (
    AllGather,
    AllReduce,
    AllSumReduce,
    AllToAll,
    Broadcast,
    DistributedTranspose,
    HaloExchange,
    ReduceScatter,
    Repartition,
    Roll,
    SegmentSum,
    SumReduce,
    Take,
    Transpose,
)
from distdl_jax.nn.shape.flatten import Flatten, Reshape, Unflatten
from distdl_jax.nn.shape.global_pool import DistributedGlobalAvgPool, DistributedGlobalMaxPool
from distdl_jax.nn.shape.input import Input
from distdl_jax.nn.shape.resample import (
    DistributedAdaptiveAvgPool,
    DistributedCrop,
    DistributedPad,
    DistributedUpsample,
)
from distdl_jax.nn.spectral.fno import DistributedFNOBlock
from distdl_jax.nn.spectral.spectral_conv import (
    DistributedSpectralConv1d,
    DistributedSpectralConv2d,
    DistributedSpectralConv3d,
    DistributedSpectralConv4d,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "AllSumReduce",
    "AllToAll",
    "Broadcast",
    "ColumnParallelLinear",
    "Concatenate",
    "DistributedAccuracy",
    "DistributedAdaptiveAvgPool",
    "DistributedAvgPool1d",
    "DistributedAvgPool2d",
    "DistributedAvgPool3d",
    "DistributedAvgPool4d",
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedBatchNorm",
    "DistributedChannelConv1d",
    "DistributedChannelConv2d",
    "DistributedChannelConv3d",
    "DistributedChannelConv4d",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedConv4d",
    "DistributedConvLSTMCell1d",
    "DistributedConvLSTMCell2d",
    "DistributedConvLSTMCell3d",
    "DistributedConvTranspose1d",
    "DistributedConvTranspose2d",
    "DistributedConvTranspose3d",
    "DistributedConvTranspose4d",
    "DistributedCrop",
    "DistributedCrossEntropyLoss",
    "DistributedDiceLoss",
    "DistributedEmbedding",
    "DistributedFNOBlock",
    "DistributedFeatureConv1d",
    "DistributedFeatureConv2d",
    "DistributedFeatureConv3d",
    "DistributedFeatureConv4d",
    "DistributedFocalLoss",
    "DistributedGRU",
    "DistributedGRUCell",
    "DistributedGeneralConv1d",
    "DistributedGeneralConv2d",
    "DistributedGeneralConv3d",
    "DistributedGeneralConv4d",
    "DistributedGlobalAvgPool",
    "DistributedGlobalMaxPool",
    "DistributedGraphConv",
    "DistributedGraphNetBlock",
    "DistributedGroupNorm",
    "DistributedHuberLoss",
    "DistributedInstanceNorm",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedLSTM",
    "DistributedLSTMCell",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedLoss",
    "DistributedMSELoss",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedMaxPool4d",
    "DistributedMixtureOfExperts",
    "DistributedMultiHeadAttention",
    "DistributedPReLU",
    "DistributedPad",
    "DistributedPointwise",
    "DistributedPoissonNLLLoss",
    "DistributedRMSNorm",
    "DistributedSpectralConv1d",
    "DistributedSpectralConv2d",
    "DistributedSpectralConv3d",
    "DistributedSpectralConv4d",
    "DistributedSqueezeExcitation",
    "DistributedTranspose",
    "DistributedUpsample",
    "Dropout",
    "Flatten",
    "HaloExchange",
    "Input",
    "Layer",
    "Local",
    "Pipeline",
    "Precision",
    "ReduceScatter",
    "Remat",
    "Repartition",
    "Reshape",
    "Residual",
    "Roll",
    "RowParallelLinear",
    "SegmentSum",
    "Sequential",
    "Skip",
    "SpectralNorm",
    "SumReduce",
    "Take",
    "Transpose",
    "Unflatten",
    "WeightNorm",
]


# Descriptions of layers of the version before, and the layers. They go with the next version.
_REMOVED = {
    "batch_norm": "DistributedBatchNorm",
    "describe": "Layer",
    "flatten": "Flatten",
    "group_norm": "DistributedGroupNorm",
    "instance_norm": "DistributedInstanceNorm",
    "layer_norm": "DistributedLayerNorm",
    "linear": "DistributedLinear",
    "skip": "Residual",
}
for _dims in (1, 2, 3):
    _REMOVED[f"conv{_dims}d"] = f"DistributedConv{_dims}d"
    _REMOVED[f"conv_transpose{_dims}d"] = f"DistributedConvTranspose{_dims}d"
    _REMOVED[f"max_pool{_dims}d"] = f"DistributedMaxPool{_dims}d"
    _REMOVED[f"avg_pool{_dims}d"] = f"DistributedAvgPool{_dims}d"


def __getattr__(name: str) -> None:
    """Say what to write in place of a name that has been removed."""
    if layer := _REMOVED.get(name):
        raise AttributeError(f"nn.{name} has been removed, with dj.advise: write nn.{layer}, with its partition.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)

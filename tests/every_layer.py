"""A layer of each kind, from all of four workers, all of its arguments by keyword."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import distdl_jax as dj
from distdl_jax import nn

LAYERS: dict[str, Callable[[dj.Partition], Any]] = {
    "Broadcast": lambda P: nn.Broadcast(P_x=P.grid([1, 2]), P_y=P.grid([2, 2]), transpose_src=False),
    "SumReduce": lambda P: nn.SumReduce(P_x=P.grid([2, 2]), P_y=P.grid([1, 2]), preserve_batch=True),
    "AllSumReduce": lambda P: nn.AllSumReduce(P_x=P.grid([2, 2]), axes_reduce=(0,)),
    "AllReduce": lambda P: nn.AllReduce(P_x=P.grid([2, 2]), op="max", axes_reduce=(0,)),
    "Repartition": lambda P: nn.Repartition(P_x=P.grid([2, 2]), P_y=P.grid([1, 4]), preserve_batch=False),
    "HaloExchange": lambda P: nn.HaloExchange(P_x=P.grid([2, 2]), halo=((1, 1), (0, 1)), periodic=(True, False)),
    "AllGather": lambda P: nn.AllGather(P_x=P.grid([2, 2]), axes=(1,)),
    "AllToAll": lambda P: nn.AllToAll(P_x=P.grid([2, 2]), split_axis=0, concat_axis=1),
    "ReduceScatter": lambda P: nn.ReduceScatter(P_x=P.grid([2, 2]), axes=(0,)),
    "Roll": lambda P: nn.Roll(P_x=P.grid([2, 2]), shift=(1, -1), axis=(0, 1)),
    "Take": lambda P: nn.Take(P_x=P.grid([2, 2]), indices=[2, 0, 0, 1, 2], axis=-2, P_y=None),
    "SegmentSum": lambda P: nn.SegmentSum(P_x=P.grid([2, 2]), segment_ids=[2, 0, 2], num_segments=4, axis=0),
    "DistributedLinear": lambda P: nn.DistributedLinear(
        P_x=P.grid([1, 2]), P_y=P.grid([1, 2]), P_W=P.grid([2, 2]), in_features=5, out_features=3, bias=False
    ),
    "DistributedPReLU": lambda P: nn.DistributedPReLU(P_x=P.grid([2, 2]), num_parameters=3, init=0.5),
    "DistributedPointwise": lambda P: nn.DistributedPointwise(
        P_x=P.grid([2, 2]), in_features=5, out_features=3, dim=-1, bias=True
    ),
    **{
        f"DistributedConv{d}d": lambda P, d=d: getattr(nn, f"DistributedConv{d}d")(
            P_x=P.grid([1, 1, 4, *(1,) * (d - 1)]), P_y=None, P_W=None, in_channels=2, out_channels=3, kernel_size=3
        )
        for d in (1, 2, 3, 4)
    },
    **{
        f"Distributed{kind}Pool{d}d": lambda P, d=d, kind=kind: getattr(nn, f"Distributed{kind}Pool{d}d")(
            P_x=P.grid([1, 1, 4, *(1,) * (d - 1)]), kernel_size=2, stride=1, padding=1
        )
        for d in (1, 2, 3, 4)
        for kind in ("Max", "Avg")
    },
    "DistributedBatchNorm": lambda P: nn.DistributedBatchNorm(P_x=P.grid([2, 2]), num_features=3, momentum=None),
    "DistributedLayerNorm": lambda P: nn.DistributedLayerNorm(P_x=P.grid([2, 2]), normalized_shape=[3], bias=False),
    "DistributedRMSNorm": lambda P: nn.DistributedRMSNorm(P_x=P.grid([2, 2]), normalized_shape=3, dim=0),
    "DistributedGroupNorm": lambda P: nn.DistributedGroupNorm(P_x=P.grid([2, 2]), num_groups=2, num_channels=6),
    "DistributedInstanceNorm": lambda P: nn.DistributedInstanceNorm(P_x=P.grid([1, 2, 2]), num_features=3, affine=True),
    **{
        f"DistributedConvTranspose{d}d": lambda P, d=d: getattr(nn, f"DistributedConvTranspose{d}d")(
            P_x=P.grid([1, 1, 4, *(1,) * (d - 1)]),
            in_channels=2,
            out_channels=3,
            kernel_size=3,
            output_padding=1,
            stride=2,
        )
        for d in (1, 2, 3, 4)
    },
    "DistributedGRUCell": lambda P: nn.DistributedGRUCell(P_x=P.grid([2, 2]), input_size=3, hidden_size=5, bias=False),
    "DistributedLSTMCell": lambda P: nn.DistributedLSTMCell(P_x=P.grid([2, 2]), input_size=3, hidden_size=5),
    "DistributedGRU": lambda P: nn.DistributedGRU(P_x=P.grid([2, 1, 2]), input_size=3, hidden_size=5, num_layers=2),
    "DistributedLSTM": lambda P: nn.DistributedLSTM(P_x=P.grid([2, 1, 2]), input_size=3, hidden_size=5, bias=False),
    **{
        f"DistributedConvLSTMCell{d}d": lambda P, d=d: getattr(nn, f"DistributedConvLSTMCell{d}d")(
            P_x=P.grid([1, 1, 4, *(1,) * (d - 1)]), in_channels=2, hidden_channels=3, kernel_size=3, dilation=2
        )
        for d in (1, 2, 3)
    },
    "DistributedGraphConv": lambda P: nn.DistributedGraphConv(
        P_x=P.grid([4, 1]),
        in_features=2,
        out_features=3,
        senders=[1, 0, 2, 1],
        receivers=[0, 1, 1, 2],
        num_nodes=3,
        aggregation="mean",
        root=True,
        bias=False,
    ),
    "DistributedUpsample": lambda P: nn.DistributedUpsample(P_x=P.grid([1, 2, 2]), P_y=None, scale_factor=2),
    "DistributedAdaptiveAvgPool": lambda P: nn.DistributedAdaptiveAvgPool(P_x=P.grid([1, 2, 2]), output_size=3),
    "DistributedGlobalAvgPool": lambda P: nn.DistributedGlobalAvgPool(P_x=P.grid([1, 2, 2])),
    "DistributedGlobalMaxPool": lambda P: nn.DistributedGlobalMaxPool(P_x=P.grid([1, 2, 2]), copies=True),
    "DistributedPad": lambda P: nn.DistributedPad(P_x=P.grid([2, 2]), padding=[(1, 2)], mode="reflect"),
    "DistributedCrop": lambda P: nn.DistributedCrop(P_x=P.grid([2, 2]), cropping=[(1, 2)]),
    "Flatten": lambda P: nn.Flatten(P_x=P.grid([1, 2, 2]), P_y=P.grid([2, 2])),
    "Reshape": lambda P: nn.Reshape(P_x=P.grid([2, 2]), P_y=P.grid([1, 2, 2]), shape=[3, -1, 4]),
    "Unflatten": lambda P: nn.Unflatten(P_x=P.grid([2, 2]), P_y=P.grid([1, 2, 2]), shape=[3, 4]),
    "Input": lambda P: nn.Input(spec=dj.TensorSpec((6, 8), P.grid([2, 2]))),
    "Dropout": lambda P: nn.Dropout(P_x=P.grid([2, 2]), p=0.3),
    "DistributedEmbedding": lambda P: nn.DistributedEmbedding(
        P_x=P.grid([1]), P_y=P.grid([1, 2]), P_W=P.grid([2, 2]), num_embeddings=5, embedding_dim=3, padding_idx=1
    ),
    "Remat": lambda P: nn.Remat(
        layer=nn.DistributedLayerNorm(P.grid([2, 2]), 3), policy=jax.checkpoint_policies.dots_saveable
    ),
    "Precision": lambda P: nn.Precision(
        layer=nn.DistributedLayerNorm(P.grid([2, 2]), 3), compute="float16", output=jnp.float32
    ),
    "WeightNorm": lambda P: nn.WeightNorm(
        layer=nn.DistributedLinear(P.grid([1, 1]), P.grid([1, 4]), P.grid([4, 1]), 5, 3), name="weight", dim=-2
    ),
    "SpectralNorm": lambda P: nn.SpectralNorm(
        layer=nn.DistributedLayerNorm(P.grid([2, 2]), 3), name="weight", n_power_iterations=2, eps=1e-6
    ),
    "DistributedMultiHeadAttention": lambda P: nn.DistributedMultiHeadAttention(
        P_x=P.grid([1, 2, 2]), embed_dim=6, num_heads=3, causal=True, rotary=10.0, exchange="heads"
    ),
    "DistributedMixtureOfExperts": lambda P: nn.DistributedMixtureOfExperts(
        P_x=P.grid([2, 2, 1]), embed_dim=3, num_experts=5, hidden_dim=2, capacity_factor=None, P_W=P.grid([3])
    ),
    **{
        f"DistributedSpectralConv{d}d": lambda P, d=d: getattr(nn, f"DistributedSpectralConv{d}d")(
            P_x=P.grid([1, 1, 4, *(1,) * (d - 1)]), in_channels=2, out_channels=3, modes=2, P_W=None
        )
        for d in (1, 2, 3, 4)
    },
    "DistributedFNOBlock": lambda P: nn.DistributedFNOBlock(
        P_x=P.grid([2, 1, 2]), in_channels=2, out_channels=3, modes=2, activation=None
    ),
    "DistributedSqueezeExcitation": lambda P: nn.DistributedSqueezeExcitation(
        P_x=P.grid([1, 2, 2]), input_channels=5, squeeze_channels=3, activation=jax.nn.silu
    ),
    "Residual": lambda P: nn.Residual(
        body=nn.Sequential(nn.DistributedLayerNorm(P.grid([2, 2]), 3), jax.nn.relu),
        shortcut=nn.Repartition(P.grid([2, 2]), P.grid([2, 2])),
    ),
    "Skip": lambda P: nn.Skip(
        body=nn.Sequential(nn.DistributedLayerNorm(P.grid([2, 2]), 3), jax.nn.relu), join="concatenate", axis=1
    ),
    "Pipeline": lambda P: nn.Pipeline(
        stages=[nn.DistributedLayerNorm(P.grid([2, 2]), 3), nn.Repartition(P.grid([2, 2], range(4)), P.grid([2, 2]))],
        microbatches=2,
    ),
    "Sequential": lambda P: nn.Sequential(nn.Repartition(P.grid([2, 2]), P.grid([1, 4])), jax.nn.relu),
}

BY_DIMENSIONS = {1: (8,), 2: (6, 6), 3: (4, 6, 6), 4: (2, 2, 8, 8), 5: (2, 2, 8, 8, 8), 6: (2, 2, 8, 8, 8, 8)}
SHAPES = {
    **dict.fromkeys(("SegmentSum", "DistributedGraphConv"), (3, 2)),
    **dict.fromkeys(("DistributedLinear", "DistributedPointwise", "WeightNorm"), (2, 5)),
    **dict.fromkeys(("DistributedGRU", "DistributedLSTM", "DistributedMixtureOfExperts"), (2, 2, 3)),
    **dict.fromkeys(("DistributedConv1d", "DistributedConvTranspose1d", "DistributedConvLSTMCell1d"), (2, 2, 8)),
    **dict.fromkeys(("DistributedSpectralConv1d", "DistributedFNOBlock"), (2, 2, 8)),
    **dict.fromkeys(("DistributedPReLU", "DistributedBatchNorm", "DistributedLayerNorm"), (4, 3)),
    **dict.fromkeys(("Remat", "Precision", "SpectralNorm", "Residual", "Skip", "Pipeline"), (4, 3)),
    **dict.fromkeys(("DistributedGRUCell", "DistributedLSTMCell"), (4, 3)),
    "DistributedRMSNorm": (3, 4),
    "DistributedInstanceNorm": (2, 3, 4),
    "DistributedSqueezeExcitation": (2, 5, 4),
    "Input": (6, 8),
    "Unflatten": (2, 12),
}


def spec_of_x(name: str, layer: Any) -> dj.TensorSpec:
    """Return the spec of an input of the layer."""
    P_x = layer.input_partition
    return dj.TensorSpec(SHAPES.get(name, BY_DIMENSIONS[P_x.dim]), P_x)

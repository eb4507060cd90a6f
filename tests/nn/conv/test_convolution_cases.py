"""Convolutions that the original gets wrong, refuses or reads otherwise, each with its reason."""

import numpy as np
import pytest
from convolution.draws import Conv, balanced
from convolution.programs import check
from matrix.partitions import On

import distdl_jax as dj
from distdl_jax import nn


def feature_conv(P: int, n: int, k: int, p: int = 0, s: int = 1, d: int = 1, mode: str = "zeros") -> Conv:
    """A convolution of N x C x n_0, split by features over P workers."""
    return Conv(
        world=4,
        P_x=On((1, 1, P), tuple(range(P))),
        kernel=(k,),
        stride=(s,),
        dilation=(d,),
        padding=p,
        pairs=((p, p),),
        batch=2,
        channels=2,
        sizes=(n,),
        cuts=([(0, 2)], [(0, 2)], balanced(n, P)),
        P_y=None,
        P_W=None,
        out_channels=3,
        groups=1,
        bias=True,
        mode=mode,
    )


def channel_conv(p_co: int, p_ci: int, groups: int, mode: str, features: tuple[int, int] = (1, 1)) -> Conv:
    """A convolution of N x C x n_1 x n_0 with channels split; 12 to 24 channels in groups."""
    workers = np.arange(4)
    P_x, P_y = (1, p_ci, *features), (1, p_co, *features)
    P_W = (p_co, 1 if groups > 1 and p_ci > 1 else p_ci, *features)
    on = [On(shape, tuple(workers[: int(np.prod(shape))].tolist())) for shape in (P_x, P_y, P_W)]
    return Conv(
        world=4,
        P_x=on[0],
        kernel=(3, 2),
        stride=(1, 2),
        dilation=(1, 1),
        padding=((2, 0), (1, 1)),
        pairs=((2, 0), (1, 1)),
        batch=2,
        channels=12,
        sizes=(4, 5),
        cuts=([(0, 2)], balanced(12, p_ci), balanced(4, features[0]), balanced(5, features[1])),
        P_y=on[1],
        P_W=on[2],
        out_channels=24,
        groups=groups,
        bias=True,
        mode=mode,
    )


@pytest.mark.world(4)
def test_right_where_the_original_is_wrong_or_stuck() -> None:
    """Forward and all gradients of a feature-split convolution: its wrong lengths, values and exceptions."""
    check(
        [
            feature_conv(P=3, n=16, k=1, p=1),  # 2 * padding > dilation * (kernel - 1): 18 outputs, not 19
            feature_conv(P=4, n=6, k=3),  # blocks smaller than dilation * (kernel - 1): wrong values
            feature_conv(P=4, n=8, k=4),
            feature_conv(P=3, n=7, k=3, d=2),
            feature_conv(P=4, n=10, k=7, p=3),
            feature_conv(P=2, n=2, k=2),  # a worker with no output, or too little input: exceptions
            feature_conv(P=4, n=4, k=1, s=2),
        ]
    )


@pytest.mark.simulated(4)
def test_what_the_original_refuses_or_means_otherwise() -> None:
    """Padding modes, also wider than a block, and groups whose channels are split: as in the sequential layer."""
    check(
        [
            feature_conv(P=4, n=6, k=3, p=5, mode="reflect"),
            feature_conv(P=4, n=6, k=3, p=6, mode="circular"),
            feature_conv(P=4, n=3, k=3, p=5, mode="replicate"),
            channel_conv(2, 2, groups=4, mode="circular"),
            channel_conv(2, 2, groups=2, mode="zeros", features=(1, 2)),
            channel_conv(2, 1, groups=12, mode="reflect", features=(2, 1)),
            channel_conv(4, 4, groups=4, mode="replicate"),
        ]
    )


@pytest.mark.world(4)
def test_input_channels_split_alone_split_the_weight() -> None:
    """The original takes the feature algorithm for them, unchecked."""
    P_x = dj.Partition().grid([1, 4, 1])
    layer = nn.DistributedConv1d(P_x, in_channels=4, out_channels=4, kernel_size=3)
    assert layer.kind == "channel" and layer.P_W.size == 4 and layer.P_y == P_x

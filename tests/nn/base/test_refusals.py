"""What layers refuse when they are made: one sentence, which names argument and value, the same on every worker."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from all_workers import refusal
from matrix.partitions import on
from sequential import made

import distdl_jax as dj

ATTENTION, SPLIT, FOUR = "MultiHeadAttention", on(1, 2, 2), on(2, 2)
CONV: dict[str, Any] = {"in_channels": 2, "out_channels": 2, "kernel_size": 3}
MODES: dict[str, Any] = {"in_channels": 2, "out_channels": 2, "modes": 2}
IN_OUT: dict[str, Any] = {"in_features": 2, "out_features": 2}
ONE, LINE, ROWS, COLUMNS, PIXELS = on(1, 1), on(4), on(2, 1), on(1, 2), on(1, 1, 4)

ARGUMENTS = (
    # Linear layers, and those of channels.
    ("`in_features` (=0) must be 1 or more", made("Linear", ONE, ONE, ONE, 0, 2)),
    ("`P_W` (1) must have two dimensions", made("Linear", ONE, ONE, on(1), 2, 2)),
    ("or three, P_n x P_fo x P_fi, with those along the batch", made("Linear", ONE, ONE, on(1, 1, 1, 1), 2, 2)),
    ("`P_x` (1) must have shape 1 x 1, P_n x P_fi, if `P_W` is 1 x 1", made("Linear", on(1), ONE, ONE, 2, 2)),
    ("`P_y` (()) must have shape 1 x 1, P_n x P_fo, if `P_W` is 1 x 1", made("Linear", ONE, on(), ONE, 2, 2)),
    ("`P_x` (1 x 3) must have shape 1 x 2", made("Linear", on(1, 3), COLUMNS, FOUR, 4, 4)),
    ("`P_y` (1 x 3) must have shape 1 x 2", made("Linear", COLUMNS, on(1, 3), FOUR, 4, 4)),
    ("must have shape 1 x 1, P_n x P_fi, if `P_W` is 1 x 1, P_fo x P_fi; or 1 x 1 x 1 on",
     made("Linear", ROWS, ROWS, ONE, 4, 4)),
    ("`P_y` (1 x 2) must have shape 2 x 1, P_n x P_fo, if `P_W` is 2 x 1 x 1, P_n x P_fo x P_fi",
     made("Linear", ROWS, COLUMNS, on(2, 1, 1), 4, 4)),
    ("must have shape 2 x 1, P_n x P_fi", made("Linear", on(2, 2, ranks=(0, 1, 3, 2)), FOUR, on(2, 2, 1), 4, 4)),
    ("or 1 x 2 x 2 on P_W's workers, to split the sequence",
     made("Linear", on(1, 2, 2, ranks=(1, 0, 2, 3)), COLUMNS, FOUR, 4, 4)),
    ("`replicated` (=True) requires workers that hold copies: `P_x` of 1 x 2 x 2",
     made("Linear", COLUMNS, COLUMNS, FOUR, 4, 4, replicated=True)),
    ("`split` (='rows') must be 'in_features', 'out_features', or None", made("Linear", FOUR, **IN_OUT, split="rows")),
    ("`P_x` (1 x 4 x 1) and `P_y` (1 x 4 x 1) must be P_n x 1 x ... x P_f", made("Linear", on(1, 4, 1), **IN_OUT)),
    ("`P_x` (2 x 2) and `P_y` (1 x 4) must be P_n x 1 x ... x P_f, with the same number of workers along the batch",
     made("Linear", FOUR, on(1, 4), **IN_OUT)),
    ("`P_W` is not given, and can't be derived from `P_x`, 2 x 2 (0-3), and `P_y`, 2 x 2 (3, 2, 1, 0): both cut",
     made("Linear", FOUR, on(2, 2, ranks=(3, 2, 1, 0)), **IN_OUT)),
    ("`split` (='out_features') must be None if `P_W` is given",
     made("Linear", FOUR, FOUR, on(2, 2, 1), 2, 2, split="out_features")),
    ("`P` (1 x 2 x 2) must be P_n x 1 x p", made("ColumnParallelLinear", SPLIT, in_features=4, out_features=4)),
    ("`P` (1 x 4) must be P_n x 1 x p", made("RowParallelLinear", on(1, 4), in_features=4, out_features=4)),
    ("`dim` (=(3,)) names dimension 3, but the partition (shape 2 x 1)", made("Pointwise", ROWS, 4, 3, 3)),
    ("`in_features` (=0) must be 1 or more.", made("Pointwise", ROWS, 0, 3)),
    ("`num_parameters` (=3) must be 1 if `P_x` (2) has one dimension", made("PReLU", on(2), 3)),
    ("`init` (='a') must be a number.", made("PReLU", on(2), init="a")),
    ("`P_x` (2 x 1) must have 3 dimensions or more", made("SqueezeExcitation", ROWS, 3, 2)),
    # Attention and embedding.
    ("`embed_dim` (=5) must be divisible by `num_heads` (=2).", made(ATTENTION, SPLIT, 5, 2)),
    ("`num_heads` (=4) must be divisible by `num_key_heads` (=3).", made(ATTENTION, SPLIT, 8, 4, num_key_heads=3)),
    ("differ, so both must be divisible by the 4 workers",
     made(ATTENTION, PIXELS, 8, 4, num_key_heads=2)),
    ("`P_x` (2 x 2) must have 3 dimensions: batch, sequence", made(ATTENTION, FOUR, 8, 4)),
    ("`rotary` (=1) must be a base above 1", made(ATTENTION, SPLIT, 8, 4, rotary=1)),
    ("`exchange` (='all') must be 'ring', 'heads' or 'gather'.", made(ATTENTION, SPLIT, 8, 4, exchange="all")),
    ("must not split the features if `exchange` is 'gather'", made(ATTENTION, SPLIT, 8, 4, exchange="gather")),
    ("`dropout` (=1) must be a probability, from 0 to below 1.", made(ATTENTION, SPLIT, 8, 2, dropout=1)),
    ("`padding_idx` (=7) must be an index, 0 to 6.", made("Embedding", ONE, on(1, 1, 2), FOUR, 7, 3, padding_idx=7)),
    ("`P_y` (1 x 2) must have shape 1 x 1 x 2, since", made("Embedding", ONE, COLUMNS, FOUR, 7, 3)),
    ("must have two dimensions, P_v x P_e", made("Embedding", ONE, COLUMNS, LINE, 7, 3)),
    # Norms.
    ("`num_channels` (=6) must be divisible by `num_groups` (=4).", made("GroupNorm", FOUR, 4, 6)),
    ("`P_x` (2 x 2) must have 3 dimensions or more", made("InstanceNorm", FOUR, 4)),
    ("`P_x` (4) must have 2 dimensions or more", made("BatchNorm", LINE, 4)),
    ("`momentum` (=2) must be a number from 0 to 1, or None.", made("BatchNorm", FOUR, 4, momentum=2)),
    ("`eps` (=-1) must be a number, 0 or more.", made("RMSNorm", FOUR, 4, eps=-1)),
    ("`normalized_shape` (=(2, 3, 4)) must not have more dimensions than `P_x` (2 x 2).",
     made("LayerNorm", FOUR, (2, 3, 4))),
    ("`dim` (=2) must name as many dimensions as `normalized_shape` (=(2, 3))",
     made("RMSNorm", on(2, 1, 2), (2, 3), dim=2)),
    ("`dim` (=(3,)) names dimension 3, but the partition", made("LayerNorm", on(2, 1, 2), 3, dim=3)),
    ("`normalized_shape` (=0) must be the lengths", made("LayerNorm", FOUR, 0)),
    ("`num_features` (=0) must be 1 or more.", made("BatchNorm", FOUR, 0)),
    # Shapes.
    ("Exactly one of `size` (=3) and `scale_factor` (=2) must be given.",
     made("Upsample", PIXELS, size=3, scale_factor=2)),
    ("`mode` (='cubic') must be one of 'nearest', 'nearest-exact', 'linear'",
     made("Upsample", PIXELS, size=3, mode="cubic")),
    ("`size` (=0) must be an integer, 1 or more, or 1 of them.", made("Upsample", PIXELS, size=0)),
    ("`align_corners` (=True) must be False if", made("Upsample", PIXELS, size=3, align_corners=True)),
    ("`output_size` (=(2, 2)) must be an integer, 1 or more, or 1 of them or None.",
     made("AdaptiveAvgPool", PIXELS, (2, 2))),
    ("`mode` (='edge') must be one of 'constant', 'reflect'", made("Pad", PIXELS, [(1, 1)], "edge")),
    ("`padding` (=[1]) must be pairs", made("Pad", PIXELS, [1])),
    ("`cropping` (=[(-1, 0)]) must be pairs (low, high) of integers, 0 or more.", made("Crop", PIXELS, [(-1, 0)])),
    ("`output_padding` (=2) must be an integer of 0 or more, below stride or dilation (2)",
     made("ConvTranspose1d", PIXELS, **CONV, stride=2, output_padding=2)),
    ("`padding` (='same') must be numbers in a transposed", made("ConvTranspose1d", PIXELS, **CONV, padding="same")),
    ("`p` (=1) must be a probability, from 0 to below 1.", made("Dropout", LINE, 1)),
    ("`P_y` (1 x 1 x 4) must have 2 dimensions: batch, and features.", made("Flatten", PIXELS, PIXELS)),
    ("`shape` (=(3,)) must be channels and features", made("Unflatten", FOUR, PIXELS, [3])),
    ("`shape` (=(-1, -1)) must hold a length, 0 or more, for each dimension of `P_y` (2 x 2)",
     made("Reshape", PIXELS, FOUR, (-1, -1))),
    ("`shape` (=(4,)) must hold a length", made("Reshape", PIXELS, FOUR, 4)),
    ("`axis` (=(3,)) names dimension 3", made("Concatenate", PIXELS, 3)),
    # Frequencies, sequences and graphs.
    ("`modes` (=(2, 2, 2)) must be an integer, 1 or more, or 1 of them.",
     made("SpectralConv1d", PIXELS, **MODES | {"modes": (2, 2, 2)})),
    ("`P_W` (1 x 2 x 2) must have shape 1 x 1 x ..., 3 dimensions", made("SpectralConv1d", PIXELS, **MODES, P_W=SPLIT)),
    ("`P_x` (1 x 4) must have 4 dimensions: batch, channels, and 2 feature", made("SpectralConv2d", on(1, 4), **MODES)),
    ("`P_x` (1 x 2 x 2) must have 3 to 6 dimensions, batch, channels, and features, and one worker along",
     made("FNOBlock", SPLIT, **MODES)),
    ("`P_x` (2 x 2 x 1) must have shape P_n x ... x 1 x P_f: the sequence", made("GRU", on(2, 2, 1), 2, 3)),
    ("`num_layers` (=0) must be 1 or more", made("LSTM", on(1, 4), 2, 3, num_layers=0)),
    ("`hidden_size` (=0) must be 1 or more", made("LSTMCell", FOUR, 2, 0)),
    ("`P_x` (2 x 2 x 1) must have one worker along the channels",
     made("ConvLSTMCell1d", on(2, 2, 1), in_channels=1, hidden_channels=1, kernel_size=3)),
    ("`aggregation` (='add') must be one of ('sum', 'mean'", made("GraphConv", ONE, 2, 3, [0], [1], 2, "add")),
    ("must have one number for each edge", made("GraphConv", ONE, 2, 3, [0, 1], [1], 2)),
    ("`senders` holds 3, but must be 0 to 2 (`num_nodes` is 3)", made("GraphNetBlock", ONE, 4, [3], [0], 3)),
    ("`receivers` (of shape 2) must have one number for each edge", made("GraphNetBlock", ONE, 4, [0], [0, 1], 3)),
    ("`P_x` (1) must have two dimensions or more", made("GraphNetBlock", on(1), 4, [0], [0], 3)),
    ("`hidden_layers` (=-1) must be 0 or more", made("GraphNetBlock", ONE, 4, [0], [0], 3, 4, -1)),
    # Losses.
    ("`reduction` (='all') must be one of 'mean', 'sum', 'none'.", made("L1Loss", LINE, "all")),
    ("`reduction` (='none') must be one of 'mean', 'sum'.", made("Accuracy", LINE, "none")),
    ("`delta` (=0) must be a number above 0.", made("HuberLoss", LINE, delta=0)),
    *((f"`eps` (={eps!r}) must be a real number of 0 or more.", made("PoissonNLLLoss", LINE, eps=eps))
      for eps in (-1, np.nan, "a")),
    ("`P_x` (4) must have 2 dimensions or more", made("CrossEntropyLoss", LINE)),
    ("`label_smoothing` (=2) must be a number from 0 to 1.", made("CrossEntropyLoss", FOUR, label_smoothing=2)),
    ("`ignore_index` (=1.5) must be an integer, or None.", made("CrossEntropyLoss", FOUR, ignore_index=1.5)),
    ("`P_x` (2) must have 2 dimensions or more", made("DiceLoss", on(2))),
    ("`sigmoid` (=True) and `softmax` (=True) must not both be True",
     made("DiceLoss", COLUMNS, sigmoid=True, softmax=True)),
    ("`smooth_dr` (=-1) must be a number of 0 or more", made("DiceLoss", COLUMNS, smooth_dr=-1)),
    ("`gamma` (=-1) must be a number of 0 or more", made("FocalLoss", COLUMNS, gamma=-1)),
    ("`alpha` (=1.5) must be a number from 0 to 1, or None", made("FocalLoss", COLUMNS, alpha=1.5)),
    ("one for each class needs use_softmax=True", made("FocalLoss", COLUMNS, alpha=[1, 2])),
    ("`P_x` (2) must have 2 dim", made("FocalLoss", on(2), use_softmax=True)),
)  # fmt: skip
TYPES = (
    ("`in_features` (=2.5) must be an integer", made("Linear", ONE, ONE, ONE, 2.5, 2)),
    ("`in_features` (=None) must be an integer", made("Linear", FOUR)),
    ("`P_W` (='here') must be a partition", made("Linear", ONE, ONE, "here", 2, 2)),
    ("`P_x` (='here') must be a partition", made("Linear", "here", ONE, ONE, 2, 2)),
    ("`activation` (='relu') must be a function.", made("SqueezeExcitation", on(2, 1, 1), 3, 2, "relu")),
)


@pytest.mark.parametrize(("sentence", "make"), ARGUMENTS)
def test_arguments(sentence: str, make: Callable[[dj.Partition], Any]) -> None:
    assert sentence in refusal(4, make, dj.InvalidArgumentError)


@pytest.mark.parametrize(("sentence", "make"), TYPES)
def test_types(sentence: str, make: Callable[[dj.Partition], Any]) -> None:
    assert sentence in refusal(4, make, dj.InvalidTypeError)

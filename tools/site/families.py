"""The pages of the API reference: a title, an introduction, and patterns of the public names on it.

A name is on the first page that has a pattern for it, and each name has to be on one. The order of the patterns is that
on the page; a name is written as it is after `dj.`.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """One page of the reference; `about` is Markdown, with links relative to docs/api."""

    file: str
    title: str
    about: str
    patterns: str
    boost: float = 2  # weight in the search


FAMILIES = (
    Family(
        "partitions",
        "Partitions and tensors",
        "Teams of workers on grids, and tensors in blocks over them. Guides: [partitions](../partitions.md), "
        "[primitives](../primitives.md#partitions), [the contract](../contract.md).",
        "Partition CartesianPartition TensorSpec ShapeDtype zero_volume_tensor planning_world gather scatter init "
        "init_block specs_like training_specs map_blocks map_overlap draw Drawing random.*",
    ),
    Family(
        "distribute",
        "Functions of whole arrays",
        "Run an ordinary JAX function on blocks. `dj.VARIABLE`, `dj.COPIES`, `dj.PARTS` and `dj.BLOCKS` are [words of "
        "its specs](../distribute.md#specs); its result `f` has `f.plan(*args)`, [what moves](../how-to/which-way.md), "
        "and `f.output_specs(*args)`. Guides: [ten minutes](../ten-minutes.md), [specs and limits](../distribute.md).",
        "distribute constrain with_rule",
    ),
    Family(
        "programs",
        "Programs and derivatives",
        "Compile, differentiate and check programs of all workers. Guides: [the contract](../contract.md), "
        "[the sharp bits](../sharp-bits.md), [faults](../faults.md), [simulate](../simulate.md).",
        "simulate jit check value_and_grad grad part total jvp hvp linearize linear_transpose replicated "
        "check_replicated progress close",
    ),
    Family(
        "primitives",
        "Primitives",
        "Movements of data between partitions: the functions take the partitions with each call, and the layers of "
        "the same kind hold them. Guide: [primitives](../primitives.md).",
        "functional.broadcast functional.sum_reduce functional.all_sum_reduce all_reduce functional.all_reduce "
        "functional.all_max functional.repartition functional.halo_exchange functional.all_gather "
        "functional.reduce_scatter functional.all_to_all functional.roll functional.take nn.Broadcast nn.SumReduce "
        "nn.AllSumReduce nn.AllReduce nn.Repartition nn.HaloExchange nn.AllGather nn.ReduceScatter nn.AllToAll "
        "nn.Roll nn.Take nn.SegmentSum nn.Transpose nn.DistributedTranspose",
    ),
    Family(
        "linear",
        "Linear layers",
        "Affine maps with split features. Guide: [layers](../layers/products.md).",
        "nn.DistributedLinear nn.ColumnParallelLinear nn.RowParallelLinear nn.DistributedPointwise",
    ),
    Family(
        "convolutions",
        "Convolutions",
        "Convolutions over 1 to 4 dimensions with channels, space and batch split. "
        "Guide: [layers](../layers/products.md).",
        "nn.DistributedConv?d",
    ),
    Family(
        "transposed-convolutions",
        "Transposed convolutions",
        "Transposed convolutions over 1 to 4 dimensions. Guide: [layers](../layers/products.md).",
        "nn.DistributedConvTranspose?d",
    ),
    Family(
        "convolutions-by-algorithm",
        "Convolutions by algorithm",
        "DistDL's names for the three cases of [the convolutions](convolutions.md). They accept one algorithm each.",
        "nn.DistributedFeatureConv?d nn.DistributedChannelConv?d nn.DistributedGeneralConv?d",
        boost=0.5,
    ),
    Family(
        "pooling",
        "Pooling",
        "Means and maxima over windows, and over whole tensors. Guide: [layers](../layers/products.md).",
        "nn.DistributedMaxPool?d nn.DistributedAvgPool?d nn.*Pool",
    ),
    Family(
        "norms",
        "Normalisations",
        "Statistics over split dimensions, and layers with normalised weights. Guide: [layers](../layers/norms.md).",
        "nn.Distributed*Norm nn.*Norm",
    ),
    Family(
        "shapes",
        "Shapes, resampling and activations",
        "Layers that change shapes, resample, drop or rescale values. Guide: [layers](../layers/shapes.md).",
        "nn.Reshape nn.Flatten nn.Unflatten nn.Concatenate nn.DistributedPad nn.DistributedCrop "
        "nn.DistributedUpsample nn.Dropout nn.DistributedPReLU nn.DistributedSqueezeExcitation",
    ),
    Family(
        "sequences",
        "Attention, sequences and recurrent layers",
        "Attention with split heads or a split sequence, embeddings, GRUs and LSTMs. "
        "Guides: [attention](../layers/attention.md), [recurrent layers](../layers/recurrent.md).",
        "nn.DistributedMultiHeadAttention nn.DistributedEmbedding nn.*GRU* nn.*LSTM*",
    ),
    Family(
        "experts",
        "Mixtures of experts",
        "Networks for each token, on several workers. Guide: [layers](../layers/experts.md).",
        "nn.DistributedMixtureOfExperts",
    ),
    Family(
        "spectral",
        "Fourier transforms and spectral layers",
        "Transforms along split dimensions, and layers of frequencies. Guide: [layers](../layers/spectral.md).",
        "functional.*fft* nn.DistributedSpectralConv* nn.DistributedFNOBlock",
    ),
    Family(
        "graphs",
        "Graphs and meshes",
        "Nodes and edges over workers. Guide: [layers](../layers/graphs.md).",
        "graphs.* nn.DistributedGraph* functional.segment_*",
    ),
    Family(
        "functions",
        "Functions of split tensors",
        "Reductions, scans, windows and samples along split dimensions. "
        "Guide: [functions of split tensors](../layers/functions.md).",
        "functional.*",
    ),
    Family(
        "losses",
        "Losses and metrics",
        "Losses over split samples, space and classes. Guide: [layers](../layers/losses.md).",
        "nn.Distributed*Loss nn.DistributedAccuracy",
    ),
    Family(
        "networks",
        "Networks",
        "The contract of a layer, and layers that are made of layers. "
        "Guides: [around layers](../layers/around.md), [pipelines](../layers/pipelines.md), "
        "[layers of your own](../own-layers.md).",
        "nn.Layer nn.Sequential nn.Input nn.Local nn.Residual nn.Skip nn.Pipeline nn.Remat nn.Precision",
    ),
    Family(
        "optim",
        "Optimizers",
        "The parts of an optimiser that need whole tensors. Guide: [optimisers](../optimisers.md).",
        "optim.*",
    ),
    Family(
        "solvers",
        "Solvers",
        "Linear equations and fixed points. Guide: [solvers](../solvers.md).",
        "solvers.*",
    ),
    Family(
        "checkpoint",
        "Checkpoints and weights",
        "State on disk, and weights from PyTorch. Guides: [checkpoints](../checkpoints.md), "
        "[from PyTorch](../from-torch.md).",
        "checkpoint.* from_torch",
    ),
    Family(
        "data",
        "Data",
        "Samples of which each worker reads its own box. Guide: [data](../checkpoints.md#data).",
        "data.*",
    ),
    Family(
        "cost",
        "Cost and profiles",
        "Messages, bytes and memory of a step before it runs, and where a step's time went. Guides: "
        "[cost](../cost.md), [profile](../profile.md).",
        "cost profile",
    ),
    Family(
        "errors",
        "Errors",
        "All errors of the library derive from `DistDLError`. Guide: [faults](../faults.md).",
        "DistDLError *Error *Warning",
    ),
)

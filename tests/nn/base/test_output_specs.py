"""What a layer's output will be, and what every worker holds of it, known before anything is traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.partitions import On, on
from sequential import made

import distdl_jax as dj
from distdl_jax import nn


def part(P: dj.Partition, *shape: int, ranks: Any = None) -> dj.CartesianPartition:
    return on(*shape, ranks=ranks).partition(P)


# The batch split in two, to other workers; and channels split, to others.
LINEAR_Y, CONV_Y = on(2, 2, ranks=(2, 3, 1, 0)), on(1, 2, 1, ranks=(3, 2))
linear = made("Linear", on(2, 1, ranks=(1, 0)), LINEAR_Y, on(2, 2, 1), 5, 3)
CONV = (on(1, 2, 1), CONV_Y, on(2, 2, 1)), {"in_channels": 3, "out_channels": 5, "kernel_size": 2}


def network(P: dj.Partition) -> nn.Sequential:
    P_x, P_line = part(P, 1, 1, 2, 2), part(P, 1, 4)
    return nn.Sequential(
        nn.Repartition(part(P, 1, 1, 1, 1), P_x),
        nn.DistributedConv2d(P_x, in_channels=1, out_channels=4, kernel_size=3),
        nn.DistributedMaxPool2d(P_x, 2),
        nn.Repartition(P_x, part(P, 1, 4, 1, 1)),
        lambda x: x.reshape(x.shape[0], x.shape[1] * 6 if x.size else 0),
        nn.DistributedLinear(P_line, part(P, 1, 1), P_line, 24, 3),
        nn.Sequential(jax.nn.softplus),
    )


SPLIT, FEATURES, THREE = on(2, 1, 2), on(1, 2, 2), on(1, 3)
# From all workers a layer, the shape of its input, that of its output, where it is, and along what it is copied.
LAYERS: dict[str, tuple[Any, ...]] = {
    "linear": (linear, (5, 5), (5, 3), LINEAR_Y),
    "conv": (made("Conv1d", *CONV[0], **CONV[1]), (2, 3, 7), (2, 5, 6), CONV_Y),
    "pool": (made("AvgPool1d", SPLIT, 2), (3, 2, 9), (3, 2, 4), SPLIT),
    "group norm": (made("GroupNorm", on(1, 3, 1), 2, 4), (3, 4, 5), (3, 4, 5), on(1, 3, 1)),
    "transposed": (made("ConvTranspose1d", *CONV[0], **CONV[1], stride=2), (2, 3, 7), (2, 5, 14), CONV_Y),
    "upsample": (made("Upsample", SPLIT, on(1, 3, 1), scale_factor=1.5), (2, 4, 5), (2, 4, 7), on(1, 3, 1)),
    "global pool": (made("GlobalAvgPool", SPLIT), (2, 4, 5), (2, 4, 1), SPLIT),
    "copies of a pool": (made("GlobalAvgPool", FEATURES, copies=True), (2, 4, 5), (2, 4, 1), on(1, 2, 2, 1), (2,)),
    "network of a pool": (
        lambda P: nn.Sequential(jnp.tanh, made("GlobalMaxPool", FEATURES, copies=True)(P), jax.nn.sigmoid),
        (2, 4, 5), (2, 4, 1), on(1, 2, 2, 1), (2,),
    ),
    "flatten": (made("Flatten", SPLIT, THREE), (2, 4, 5), (2, 20), THREE),
    "flatten where it is": (made("Flatten", SPLIT), (2, 4, 5), (2, 20), on(2, 2)),
    "unflatten": (made("Unflatten", THREE, SPLIT, (4, 5)), (2, 20), (2, 4, 5), SPLIT),
    "reshape": (made("Reshape", THREE, SPLIT, (5, -1, 4)), (2, 20), (5, 2, 4), SPLIT),
    "fno block": (made("FNOBlock", SPLIT, 4, 3, 2), (3, 4, 5), (3, 3, 5), SPLIT),
    "rows to columns": (
        made("Repartition", on(2, 1, ranks=(0, 1)), on(1, 2, ranks=(2, 3))), (5, 4), (5, 4), on(1, 2, ranks=(2, 3)),
    ),
    "broadcast": (made("Broadcast", on(1, 2), on(2, 2)), (5, 3), (5, 3), on(2, 1, 2), (0,)),
    "broadcast to more dimensions": (made("Broadcast", on(2), SPLIT), (3,), (3,), SPLIT, (0, 1)),
    "sum": (made("SumReduce", on(2, 2), on(2, ranks=(3, 1))), (4, 3), (2, 3), on(1, 2, ranks=(3, 1))),
    "all sum": (made("AllSumReduce", on(2, 2), 0), (4, 3), (2, 3), SPLIT, (0,)),
    "all max": (made("AllReduce", on(2, 2), "max"), (4, 2), (2, 1), on(2, 1, 2, 1), (0, 2)),
    "all gather": (made("AllGather", on(2, 2), 1), (5, 3), (5, 3), on(2, 2, 1), (1,)),
    "all to all": (made("AllToAll", SPLIT, 1, -1), (4, 3, 5), (4, 3, 5), on(2, 2, 1)),
    "reduce scatter": (made("ReduceScatter", on(4), 0), (12,), (3,), on(4)),
    "network": (network, (2, 1, 8, 7), (2, 3), on(1, 1)),
    "functions": (lambda P: nn.Sequential(jnp.sin), (7, 3), (7, 3), on(3, 1)),
}  # fmt: skip


@pytest.mark.simulated(4)
def test_the_spec_says_what_every_worker_gets() -> None:
    """Its global shape and partition; the shape of this worker's block, or of its placeholder, in a real run.

    All layers run in one compiled program.
    """
    P = dj.Partition()
    specs, layers, params, xs = {}, {}, {}, {}
    for name, (make, n, m, on_y, *copied) in LAYERS.items():
        layers[name] = make(P)
        x_spec = dj.TensorSpec(n, layers[name].input_partition or part(P, 3, 1))
        specs[name] = layers[name].output_spec(x_spec)
        assert specs[name] == dj.TensorSpec(m, on_y.partition(P), *copied), name
        held = x_spec.local_shape if x_spec.box is not None else dj.zero_volume_tensor(like=x_spec).shape
        xs[name] = np.ones(held)
        params[name] = jax.tree.map(lambda spec: np.ones(spec.local_shape), layers[name].param_specs())

    @dj.jit
    def program(params: Any, xs: dict[str, Any]) -> dict[str, jax.Array]:
        return {name: layer(params[name], xs[name]) for name, layer in layers.items()}

    for name, y in program(params, xs).items():
        spec = specs[name]
        active = spec.partition.active
        assert y.shape == spec.shape_on(P.rank) == (spec.local_shape if active else spec.zero_volume_shape), name
        assert active or dj.zero_volume_tensor(like=spec).shape == y.shape, name


# Networks of an embedding, and what comes before it: without parameters, and nothing to floats alone.
OF_INDICES: dict[str, Callable[[nn.Repartition, nn.DistributedEmbedding], Any]] = {
    "moved": lambda move, embedding: (move, embedding),
    "moved inside": lambda move, embedding: (nn.Sequential(nn.Remat(move)), nn.Sequential(nn.Remat(embedding))),
    "a function": lambda move, embedding: (lambda x: x, move, nn.Precision(embedding)),
    "nothing": lambda move, embedding: (nn.Sequential(), move, nn.Residual(embedding, embedding)),
    "two ways": lambda move, embedding: (nn.Residual(nn.Sequential(move, embedding), nn.Sequential(move, embedding)),),
}


@pytest.mark.parametrize("name", OF_INDICES)
def test_a_network_of_indices_is_planned_of_integers(name: str) -> None:
    for rank in range(2):
        P = dj.planning_world(2, rank)
        P_root, P_x, P_y = part(P, 1, 1), part(P, 2, 1), part(P, 2, 1, 1)
        layers = OF_INDICES[name](nn.Repartition(P_root, P_x), nn.DistributedEmbedding(P_x, P_y, P_y, 7, 3))
        spec = nn.Sequential(*layers, jax.nn.relu).output_spec(dj.TensorSpec((4, 5), P_root))
        assert spec == dj.TensorSpec((4, 5, 3), P_y)


def of(shape: tuple[int, ...], where: On, **options: Any) -> Callable[[dj.Partition], dj.TensorSpec]:
    return lambda P: dj.TensorSpec(shape, where.partition(P), **options)


# By sentence: the error, the layer, and the spec of its input.
REFUSED: dict[str, tuple[Any, Any, Any]] = {
    "`x_spec` (='x') must be a TensorSpec.": (dj.InvalidTypeError, linear, lambda P: "x"),
    "must be the spec of a tensor on P_x, 2 x 1": (
        dj.InvalidArgumentError, made("Repartition", on(2, 1), on(1, 2)), of((4, 4), on(1, 2))
    ),
    ", without copies.": (dj.InvalidArgumentError, made("AllGather", on(2), 0), of((4,), on(2), replicated=True)),
    "No TensorSpec describes an output of 0 dimensions on a partition of 3 x 1 workers.": (
        dj.PlanError, lambda P: nn.Sequential(jnp.sum), of((4, 4), on(3, 1))
    ),
    "worker 0 gets (2, 1), but the balanced block of 2 x 3 on 1 x 2 workers is (2, 2).": (
        dj.PlanError, lambda P: nn.Sequential(lambda x: x[:, :1] if x.shape[1] == 3 else x), of((2, 5), on(1, 2))
    ),
    "the output of a broadcast that transposes a partition.": (
        dj.PlanError, made("Broadcast", on(1, 2), on(2, 2), transpose_src=True), of((4, 4), on(1, 2))
    ),
    "`halos` must be given": (dj.InvalidArgumentError, made("HaloExchange", on(2), ((1, 1),)), of((4,), on(2))),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_no_spec_describes_is_refused(sentence: str) -> None:
    kind, make, spec = REFUSED[sentence]
    for P in (dj.planning_world(4, rank) for rank in range(4)):
        with pytest.raises(kind) as caught:
            make(P).output_spec(spec(P))
        assert sentence in str(caught.value)


@pytest.mark.world(1)
def test_placeholders_like_something() -> None:
    for like in (jnp.ones((3, 5), jnp.bfloat16), np.ones((3, 5), "float16"), jax.ShapeDtypeStruct((3, 0), jnp.int8)):
        assert dj.zero_volume_tensor(like=like).shape == (3, 0)
        assert dj.zero_volume_tensor(like=like).dtype == like.dtype
        assert dj.zero_volume_tensor(dtype="float32", like=like).dtype == jnp.float32
    assert dj.zero_volume_tensor(like=jnp.float32(1)).shape == (0,)
    P = dj.Partition()
    assert dj.zero_volume_tensor(like=dj.TensorSpec((7,), P)).shape == (7, 0)
    assert dj.zero_volume_tensor(like=dj.TensorSpec((), P)).shape == (0,)
    with pytest.raises(dj.InvalidArgumentError, match=r"Give only one of `batch_size` \(=3\) and `like`"):
        dj.zero_volume_tensor(3, like=jnp.ones(3))
    with pytest.raises(dj.InvalidTypeError, match=r"`like` \(=\(3, 4\)\) must be an array or a TensorSpec"):
        dj.zero_volume_tensor(like=(3, 4))

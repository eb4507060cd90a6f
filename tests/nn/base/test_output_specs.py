"""What a layer's output will be, and what every worker holds of it, known before anything is traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from matrix.partitions import on

import distdl_jax as dj
from distdl_jax import nn


def part(P: dj.Partition, *shape: int, ranks: Any = None) -> dj.CartesianPartition:
    return on(*shape, ranks=ranks).partition(P)


def linear(P: dj.Partition) -> nn.DistributedLinear:
    """The batch split in two, to other workers."""
    return nn.DistributedLinear(part(P, 2, 1, ranks=(1, 0)), part(P, 2, 2, ranks=(2, 3, 1, 0)), part(P, 2, 2, 1), 5, 3)


def conv(P: dj.Partition, transposed: bool = False, **options: Any) -> Any:
    """Channels split, to other workers."""
    kind = nn.DistributedConvTranspose1d if transposed else nn.DistributedConv1d
    grids = part(P, 1, 2, 1), part(P, 1, 2, 1, ranks=(3, 2)), part(P, 2, 2, 1)
    return kind(*grids, in_channels=3, out_channels=5, kernel_size=2, **options)


def network(P: dj.Partition) -> nn.Sequential:
    P_root, P_x, P_out = part(P, 1, 1, 1, 1), part(P, 1, 1, 2, 2), part(P, 1, 1)
    return nn.Sequential(
        nn.Repartition(P_root, P_x),
        nn.DistributedConv2d(P_x, in_channels=1, out_channels=4, kernel_size=3),
        nn.DistributedMaxPool2d(P_x, 2),
        nn.Repartition(P_x, part(P, 1, 4, 1, 1)),
        lambda x: x.reshape(x.shape[0], x.shape[1] * 6 if x.size else 0),
        nn.DistributedLinear(part(P, 1, 4), P_out, part(P, 1, 4), 24, 3),
        nn.Sequential(jax.nn.softplus),
    )


# From all workers a layer, the shape of its input, that of its output, where it is, and along what it is copied.
LAYERS: dict[str, Callable[[dj.Partition], Any]] = {
    "linear": lambda P: (linear(P), (5, 5), (5, 3), linear(P).P_y),
    "conv": lambda P: (conv(P), (2, 3, 7), (2, 5, 6), conv(P).P_y),
    "pool": lambda P: (nn.DistributedAvgPool1d(part(P, 2, 1, 2), 2), (3, 2, 9), (3, 2, 4), part(P, 2, 1, 2)),
    "group norm": lambda P: (nn.DistributedGroupNorm(part(P, 1, 3, 1), 2, 4), (3, 4, 5), (3, 4, 5), part(P, 1, 3, 1)),
    "transposed": lambda P: (conv(P, True, stride=2), (2, 3, 7), (2, 5, 14), conv(P).P_y),
    "upsample": lambda P: (
        nn.DistributedUpsample(part(P, 2, 1, 2), part(P, 1, 3, 1), scale_factor=1.5), (2, 4, 5), (2, 4, 7),
        part(P, 1, 3, 1),
    ),
    "global pool": lambda P: (nn.DistributedGlobalAvgPool(part(P, 2, 1, 2)), (2, 4, 5), (2, 4, 1), part(P, 2, 1, 2)),
    "network of a pool": lambda P: (
        nn.Sequential(jnp.tanh, nn.DistributedGlobalMaxPool(part(P, 1, 2, 2), copies=True), jax.nn.sigmoid),
        (2, 4, 5), (2, 4, 1), part(P, 1, 2, 2, 1), (2,),
    ),
    "flatten": lambda P: (nn.Flatten(part(P, 2, 1, 2), part(P, 1, 3)), (2, 4, 5), (2, 20), part(P, 1, 3)),
    "flatten where it is": lambda P: (nn.Flatten(part(P, 2, 1, 2)), (2, 4, 5), (2, 20), part(P, 2, 2)),
    "unflatten": lambda P: (
        nn.Unflatten(part(P, 1, 3), part(P, 2, 1, 2), (4, 5)), (2, 20), (2, 4, 5), part(P, 2, 1, 2),
    ),
    "reshape": lambda P: (
        nn.Reshape(part(P, 1, 3), part(P, 2, 1, 2), (5, -1, 4)), (2, 20), (5, 2, 4), part(P, 2, 1, 2),
    ),
    "fno block": lambda P: (nn.DistributedFNOBlock(part(P, 2, 1, 2), 4, 3, 2), (3, 4, 5), (3, 3, 5), part(P, 2, 1, 2)),
    "rows to columns": lambda P: (
        nn.Repartition(part(P, 2, 1, ranks=(0, 1)), part(P, 1, 2, ranks=(2, 3))), (5, 4), (5, 4),
        part(P, 1, 2, ranks=(2, 3)),
    ),
    "broadcast to more dimensions": lambda P: (
        nn.Broadcast(part(P, 2), part(P, 2, 1, 2)), (3,), (3,), part(P, 2, 1, 2), (0, 1),
    ),
    "sum": lambda P: (
        nn.SumReduce(part(P, 2, 2), part(P, 2, ranks=(3, 1))), (4, 3), (2, 3), part(P, 1, 2, ranks=(3, 1)),
    ),
    "all sum": lambda P: (nn.AllSumReduce(part(P, 2, 2), 0), (4, 3), (2, 3), part(P, 2, 1, 2), (0,)),
    "all max": lambda P: (nn.AllReduce(part(P, 2, 2), "max"), (4, 2), (2, 1), part(P, 2, 1, 2, 1), (0, 2)),
    "all gather": lambda P: (nn.AllGather(part(P, 2, 2), 1), (5, 3), (5, 3), part(P, 2, 2, 1), (1,)),
    "all to all": lambda P: (nn.AllToAll(part(P, 2, 1, 2), 1, -1), (4, 3, 5), (4, 3, 5), part(P, 2, 2, 1)),
    "reduce scatter": lambda P: (nn.ReduceScatter(part(P, 4), 0), (12,), (3,), part(P, 4)),
    "network": lambda P: (network(P), (2, 1, 8, 7), (2, 3), part(P, 1, 1)),
    "functions": lambda P: (nn.Sequential(jnp.sin), (7, 3), (7, 3), part(P, 3, 1)),
}  # fmt: skip


@pytest.mark.simulated(4)
def test_the_spec_says_what_every_worker_gets() -> None:
    """Its global shape and partition; the shape of this worker's block, or of its placeholder, in a real run.

    All layers run in one compiled program.
    """
    P = dj.Partition()
    specs, layers, params, xs = {}, {}, {}, {}
    for name, made in LAYERS.items():
        layers[name], n, m, P_y, *copied = made(P)
        x_spec = dj.TensorSpec(n, layers[name].input_partition or part(P, 3, 1))
        specs[name] = layers[name].output_spec(x_spec)
        assert specs[name] == dj.TensorSpec(m, P_y, *copied), name
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


@pytest.mark.simulated(4)
def test_a_target_needs_no_counting() -> None:
    """The batch is split, and the output on other workers: with `like`, shapes agree on all, and so do gradients."""
    P = dj.Partition()
    layer = linear(P)
    x_spec = dj.TensorSpec((5, 5), layer.P_x)
    y_spec = layer.output_spec(x_spec)
    x, target = (jnp.ones(s.local_shape) if s.box else dj.zero_volume_tensor(like=s) for s in (x_spec, y_spec))
    assert y_spec.box or target.shape == dj.zero_volume_tensor(like=x).shape
    params, specs = layer.init(jax.random.key(0), float), layer.param_specs()
    value, gradient = dj.jit(dj.value_and_grad(lambda p: jnp.sum((layer(p, x) - target) ** 2)))(params)
    whole, slopes = dj.gather(params, specs), dj.gather(gradient, specs)
    if P.rank == 0:
        plain = jax.value_and_grad(lambda p: jnp.sum((np.ones((5, 5)) @ p["weight"].T + p["bias"] - 1) ** 2))
        want, its = jax.jit(plain)(whole)
        np.testing.assert_allclose(value, want, rtol=1e-12)
        np.testing.assert_allclose(slopes["weight"], its["weight"], rtol=1e-12)


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


REFUSED: dict[str, tuple[Any, Any]] = {
    "`x_spec` (='x') must be a TensorSpec.": (dj.InvalidTypeError, lambda P: linear(P).output_spec("x")),
    "must be of a tensor on P_x, 2 x 1": (
        dj.InvalidArgumentError,
        lambda P: nn.Repartition(part(P, 2, 1), part(P, 1, 2)).output_spec(dj.TensorSpec((4, 4), part(P, 1, 2))),
    ),
    "and without copies.": (
        dj.InvalidArgumentError,
        lambda P: nn.AllGather(part(P, 2), 0).output_spec(dj.TensorSpec((4,), part(P, 2), replicated=True)),
    ),
    "No TensorSpec describes an output of 0 dimensions on a partition of 3 x 1 workers.": (
        dj.PlanError,
        lambda P: nn.Sequential(jnp.sum).output_spec(dj.TensorSpec((4, 4), part(P, 3, 1))),
    ),
    "worker 0 gets (2, 1), but the balanced block of 2 x 3 on 1 x 2 workers is (2, 2).": (
        dj.PlanError,  # the longer blocks come last
        lambda P: nn.Sequential(lambda x: x[:, :1] if x.shape[1] == 3 else x).output_spec(
            dj.TensorSpec((2, 5), part(P, 1, 2))
        ),
    ),
    "the output of a broadcast that transposes a partition.": (
        dj.PlanError,
        lambda P: nn.Broadcast(part(P, 1, 2), part(P, 2, 2), transpose_src=True).output_spec(
            dj.TensorSpec((4, 4), part(P, 1, 2))
        ),
    ),
    "`halos` must be given": (
        dj.InvalidArgumentError,
        lambda P: nn.HaloExchange(part(P, 2), ((1, 1),)).output_spec(dj.TensorSpec((4,), part(P, 2))),
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_no_spec_describes_is_refused(sentence: str) -> None:
    kind, call = REFUSED[sentence]
    assert sentence in refusal(4, call, kind)


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
    with pytest.raises(dj.InvalidArgumentError, match=r"Give one of `batch_size` \(=3\) and `like`"):
        dj.zero_volume_tensor(3, like=jnp.ones(3))
    with pytest.raises(dj.InvalidTypeError, match=r"`like` \(=\(3, 4\)\) must be an array or a TensorSpec"):
        dj.zero_volume_tensor(like=(3, 4))

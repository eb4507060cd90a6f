"""Layers whose parameters are cut over all workers that use them are those whose parameters are on the first of these.

Linear layers and convolutions are compared with the sequential layer elsewhere, sharded or not.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.examples import LONG
from matrix.partitions import On

import distdl_jax as dj
from distdl_jax import nn

TOGETHER = 6


def drawn(seed: int) -> tuple[Any, Any, dj.TensorSpec]:
    """A layer on four workers or fewer, in any order, sharded and not, and its input."""
    rng, P = np.random.default_rng([31, seed]), dj.Partition()

    def upto(n: int) -> int:
        return int(rng.integers(1, n + 1))

    def on(*shape: int) -> dj.Partition:
        return On(shape, tuple(map(int, rng.permutation(4)[: int(np.prod(shape))]))).partition(P)

    if seed % 3 == 0:
        p_n, p_v, p_e = ((2, 2, 1), (4, 1, 1), (3, 1, 1), (2, 1, 2))[upto(4) - 1]
        P_x, P_y = on(p_n, 1), on(p_n, 1, p_e)
        padding_idx = 0 if upto(2) == 1 else None
        make = partial(nn.DistributedEmbedding, P_x, P_y, on(p_n, p_v, p_e), upto(9), upto(5), padding_idx)
        return make(sharded=True), make(), dj.TensorSpec((upto(5), 3), P_x)
    dims, groups = upto(2), (1, 1, 2)[upto(3) - 1]
    kind = getattr(nn, f"DistributedConv{'Transpose' * (seed % 3 - 1)}{dims}d")
    features = tuple(int(its) for its in rng.permutation([upto(2), 1])[:dims])
    grids = ((1, 1, 1, *features), (2, 1, 1, *features), (1, 2, 1, *features), (1, 1, 2, *features), (2, 1, 2))
    p_n, p_co, p_ci, *p_f = grids[upto(4 if groups == 1 else 3) - 1] + (1,) * (dims - len(features))
    split = p_co > 1 or p_ci > 1
    if groups > 1 and p_co > 1:
        p_ci = 1
    P_x, P_y = on(p_n, p_ci, *p_f), on(p_n, p_co, *p_f)
    others = (P_y, on(p_n, p_co, p_ci, *p_f)) if split else ()
    sizes = {"in_channels": groups * upto(3), "out_channels": groups * upto(4), "kernel_size": upto(3)}
    make = partial(kind, P_x, *others, **sizes, stride=upto(2), groups=groups, bias=upto(3) > 1)
    x = dj.TensorSpec((upto(3), sizes["in_channels"], *(upto(4) + 4 for _ in range(dims))), P_x)
    return make(sharded=True), make(), x


@pytest.mark.simulated(4)
@pytest.mark.parametrize("program", range(LONG))
def test_parameters_on_all_workers_or_on_the_first(program: int) -> None:
    """Output and all gradients, from equal initial values; and each worker has a balanced share of the parameters."""
    cases = [drawn(seed) for seed in range(TOGETHER * program, TOGETHER * (program + 1))]
    inputs = []
    for seed, (layer, _, x) in enumerate(cases):
        rng, y = np.random.default_rng([37, seed]), layer.output_spec(x)
        integers = isinstance(layer, nn.DistributedEmbedding)
        drawn_x = rng.integers(0, 9, x.global_shape) if integers else rng.normal(size=x.global_shape)
        inputs.append([block(drawn_x, x), block(rng.normal(size=y.global_shape), y)])

    @dj.jit
    def run(inputs: Any) -> Any:
        found = []
        for (*both, _), (x, dy) in zip(cases, inputs, strict=True):
            for layer in both:
                params = layer.init(jax.random.key(3), float)
                y, back = jax.vjp(layer.apply, params, x)
                of_params, dx = back(dy.astype(y.dtype) if dy.size else jnp.zeros_like(y))
                found.append(({"init": params, "grad": of_params}, y, None if x.dtype.kind == "i" else dx))
        return found

    results = iter(run(inputs))
    for *both, _ in cases:
        whole = []
        for layer, (of_params, *others) in zip(both, results, strict=False):
            specs = layer.param_specs()
            assert {name: its.shape for name, its in of_params["grad"].items()} == {
                name: spec.local_shape for name, spec in specs.items()
            }
            whole.append([*(dj.gather(its, specs) for its in of_params.values()), *others])
        for got, want in zip(*map(jax.tree.leaves, whole), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-12, err_msg=str(both[0]))
    cut = [
        layer.param_specs()["weight"].partition.size > other.param_specs()["weight"].partition.size
        for layer, other, _ in cases
    ]
    assert any(cut)


def block(whole: np.ndarray, spec: dj.TensorSpec) -> Any:
    if spec.box is None:
        return dj.zero_volume_tensor(like=spec, dtype=whole.dtype)
    return jnp.asarray(whole[tuple(slice(*side) for side in spec.box)])

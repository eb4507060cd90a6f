"""Where one argument alone is differentiated the others are constants, and no worker waits for ever."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import block_of
from matrix.partitions import on
from sequential import made

import distdl_jax as dj

CHANNELS: dict[str, Any] = {"in_channels": 3, "out_channels": 4, "kernel_size": 2}
LAYERS: dict[str, tuple[tuple[int, ...], Any]] = {
    "linear": ((3, 3), made("Linear", on(1, 2), on(1, 1, ranks=(2,)), on(1, 2, ranks=(3, 1)), 3, 2)),
    "convolution": (
        (2, 3, 5), made("Conv1d", on(1, 1, 3, ranks=(2, 0, 3)), **CHANNELS, padding=1, padding_mode="reflect"),
    ),
    "general convolution": (
        (2, 3, 5),
        made("Conv1d", on(1, 2, 2, ranks=(1, 3, 0, 2)), on(1, 1, 2, ranks=(3, 0)), on(1, 2, 2), **CHANNELS),
    ),
}  # fmt: skip


@pytest.mark.world(4)
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_is_that_of_all_arguments_together(name: str) -> None:
    """Eagerly, where each operation runs as it comes, and jitted."""
    shape, make = LAYERS[name]
    layer = make(dj.Partition())
    x = block_of(np.random.default_rng(0).normal(size=shape), dj.TensorSpec(shape, layer.P_x))
    given = {"x": jnp.asarray(x), **layer.init(jax.random.key(0), float)}

    def loss(given: Any) -> Any:
        params = {name: its for name, its in given.items() if name != "x"}
        return jnp.sum(jnp.sin(layer(params, given["x"])))

    def of_one(name: str, its: Any) -> Any:
        return loss(given | {name: its})

    together = jax.jit(jax.grad(loss))(given)
    for jit in (lambda f: f, jax.jit):
        for argument, its in given.items():
            got = jit(jax.grad(partial(of_one, argument)))(its)
            np.testing.assert_allclose(got, together[argument], rtol=0, atol=1e-13, err_msg=argument)

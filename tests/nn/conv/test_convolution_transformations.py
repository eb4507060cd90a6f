"""Convolutions and poolings under JAX's transformations: each block is that of the sequential layer so transformed.

The same functions run with the distributed layer on each worker's blocks and with the sequential layer on the whole
arrays: what they do besides is elementwise, and what they differentiate is a sum over all workers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution import whole
from convolution.draws import Conv, Draw, Pool
from convolution.programs import arrays, block, difference, run, slices
from jax import Array, lax
from launcher.examples import LONG

import distdl_jax as dj

Operator = Callable[[Any], Array]


def bent(tree: Any) -> Any:
    return jax.tree.map(lambda a: lax.sin(a), tree)


def three(tree: Any) -> Any:
    """Three of them, that differ."""
    return jax.tree.map(lambda a: jnp.stack([a, jnp.sin(a), a * a - 1]), tree)


def loss(F: Operator, c: Array) -> Callable[[Any], Array]:
    return lambda v: jnp.sum(c * bent(F(bent(v))))


def scanned(F: Operator, c: Array, vs: Any) -> tuple[Array, Array]:
    def step(total: Array, v: Any) -> tuple[Array, Array]:
        y = F(v)
        return bent(total) + y, y

    return lax.scan(step, jnp.zeros_like(c), vs)


def scan_loss(F: Operator, c: Array) -> Callable[[Any], Array]:
    def of(vs: Any) -> Array:
        total, ys = scanned(F, c, vs)
        return jnp.sum(c * total) + jnp.sum(c * bent(ys))

    return of


def looped(F: Operator, v: Any, c: Array, n: Array) -> Array:
    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        return state[0] + 1, bent(state[1]) + F(v)

    return lax.while_loop(lambda state: state[0] < n, body, (jnp.zeros_like(n), jnp.zeros_like(c)))[1]


def squared_gradient(F: Operator, c: Array) -> Callable[[Any], Array]:
    def of(v: Any) -> Array:
        return sum(jnp.sum(a * a) for a in jax.tree.leaves(jax.grad(loss(F, c))(v)))

    return of


# Each a function of the operator, its input v (parameters and x), its output's weights c, and 3. Gradients: d.
TRANSFORMATIONS: dict[str, Callable[[Operator, Any, Array, Array], Any]] = {
    "y": lambda F, v, c, n: F(v),
    "d grad": lambda F, v, c, n: jax.grad(loss(F, c))(v),
    "y vmap": lambda F, v, c, n: jax.vmap(F)(three(v)),
    "d vmap of grad": lambda F, v, c, n: jax.vmap(jax.grad(loss(F, c)))(three(v)),
    "d grad of vmap": lambda F, v, c, n: jax.grad(lambda vs: jnp.sum(c * bent(jax.vmap(F)(bent(vs)))))(three(v)),
    "d checkpoint": lambda F, v, c, n: jax.grad(jax.checkpoint(loss(F, c)))(v),
    "y scan": lambda F, v, c, n: scanned(F, c, three(v))[0],
    "d grad of scan": lambda F, v, c, n: jax.grad(scan_loss(F, c))(three(v)),
    "d grad of scan of checkpoint": lambda F, v, c, n: jax.grad(scan_loss(jax.checkpoint(F), c))(three(v)),
    "y while_loop": looped,
    "d reverse over reverse": lambda F, v, c, n: jax.grad(squared_gradient(F, c))(v),
}


def first(seed: int, draw: Callable[[Draw], Any], wanted: Callable[[Any], bool], workers: int = 4) -> Any:
    """The first layer drawn for so many workers, on two or more, that is as wanted and has finite results."""
    for case in range(1000):
        drawn = draw(Draw([seed, case], workers))
        if len(drawn.P_x.ranks) > 1 and drawn.batch and max(drawn.kernel) > 1 and wanted(drawn):
            return drawn
    raise AssertionError("no layer drawn is as wanted")


# As functions of x alone, all algorithms and average pooling are in the shared matrix.
LAYERS: dict[str, Conv | Pool] = {
    "feature": first(1, Draw.conv, lambda c: c.P_y is None and c.bias and c.dims == 2 and c.mode == "reflect", 2),
    "general": first(3, Draw.conv, lambda c: c.P_y is not None and c.bias and min(c.P_x.shape[1:]) > 1),
    "max": first(
        4, Draw.pool, lambda p: p.kind == "Max" and p.dims == 2 and set(p.dilation) == {1} and min(p.sizes) > 3, 2
    ),
}

# Which a short run takes: each of the convolutions every second one, pooling all.
SHORT = {
    "feature": ("y", *list(TRANSFORMATIONS)[1::2]),
    "general": tuple(TRANSFORMATIONS)[::2],
    "max": tuple(TRANSFORMATIONS),
}


def sequential(case: Conv | Pool) -> Operator:
    if isinstance(case, Pool):
        return lambda v: whole.pool_forward(case)(v["x"])
    return lambda v: whole.conv_forward(case)(v["x"], v["weight"], v["bias"])


def inputs(case: Conv | Pool) -> dict[str, np.ndarray]:
    made = arrays(case, 0)
    return {"x": made[0]} | (dict(zip(("weight", "bias"), made[1:3], strict=True)) if isinstance(case, Conv) else {})


def boxes(case: Conv | Pool, layer: Any, rank: int) -> dict[str, Any]:
    return {"x": case.x_boxes.get(rank)} | {name: slices(spec) for name, spec in layer.param_specs().items()}


def distributed(layer: Any) -> Operator:
    return lambda v: layer.apply({name: array for name, array in v.items() if name != "x"}, v["x"])


@pytest.mark.simulated(2, 4)
@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_transformations(world_size: int) -> None:
    """Eager, jit, vmap, grad, their nestings, checkpoint, scan, while_loop, reverse over reverse; in float64."""
    for name, case in LAYERS.items():
        if case.world == world_size:
            check(name)


def check(name: str) -> None:
    case, P_world = LAYERS[name], dj.Partition()
    rank, layer = P_world.rank, case.layer(P_world)
    v, c = inputs(case), arrays(case, 0)[-1]
    its_boxes, y_box = boxes(case, layer, rank), case.y_boxes.get(rank)

    def program(F: Operator) -> Callable[..., dict[str, Any]]:
        keys = SHORT[name] if LONG == 1 else TRANSFORMATIONS
        return lambda v, c, n: {key: TRANSFORMATIONS[key](F, v, c, n) for key in keys}

    mine = {key: block(array, its_boxes[key]) for key, array in v.items()}
    shape = jax.eval_shape(distributed(layer), mine).shape
    my_c = jnp.zeros(shape) if y_box is None else jax.device_put(c[y_box])
    assert y_box is None or shape == my_c.shape
    got = run(program(distributed(layer)), mine, my_c, 3)
    got["y eager"] = np.asarray(distributed(layer)(mine))
    donated = jax.jit(distributed(layer), donate_argnums=0)(jax.tree.map(lambda a: a + 0, mine))
    got["y donated"] = np.asarray(donated)
    want = None
    if rank == P_world.size - 1:  # one worker works it out for all
        want = jax.tree.map(np.asarray, jax.jit(program(sequential(case)))(v, c, 3))
    want = P_world.broadcast_data(want, root=P_world.size - 1)
    want |= {key: want["y"] for key in ("y eager", "y donated")}

    texts = {}
    for key, expected in want.items():
        if key.startswith("d "):
            for part, array in expected.items():
                texts[f"{key}, {part}"] = difference(got[key][part], array, its_boxes[part])
        else:
            texts[key] = difference(got[key], expected, y_box)
    wrong = [f"{key}: {text}" for key, text in texts.items() if text]
    assert not wrong, f"{layer}\n" + "\n".join(wrong)


@pytest.mark.simulated(2, 4)
def test_differentiating_one_argument_alone(world_size: int) -> None:
    """The weight, the bias or x alone, jitted, and once eagerly: others are constants, and no worker waits for ever.

    Over MPI a linear layer does so; workers of a simulation say at once what they would wait for.
    """
    case, P_world = LAYERS["feature" if world_size == 2 else "general"], dj.Partition()
    layer, v, F = case.layer(P_world), inputs(case), sequential(case)
    its_boxes = boxes(case, layer, P_world.rank)
    mine = {key: block(array, its_boxes[key]) for key, array in v.items()}

    def squared(F: Operator, key: str) -> Callable[[Any, Any], Array]:
        return lambda one, v: jnp.sum(F(v | {key: one}) ** 2)

    def gradients(F: Operator, v: Any) -> dict[str, Array]:
        return {key: jax.grad(squared(F, key))(array, v) for key, array in v.items()}

    want = P_world.broadcast_data(
        jax.tree.map(np.asarray, jax.jit(partial(gradients, F))(v)) if P_world.rank == 0 else None
    )
    of_blocks = partial(gradients, distributed(layer))
    for way in (of_blocks, jax.jit(of_blocks)) if LONG > 1 or world_size == 2 else (jax.jit(of_blocks),):
        for key, got in way(mine).items():
            assert not difference(np.asarray(got), want[key], its_boxes[key]), f"{key} of {layer}"

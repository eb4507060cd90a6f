"""Convolutions and poolings under JAX's transformations: each block is that of the sequential layer so transformed.

Of parameters and x together; as functions of x alone, all algorithms and average pooling are in the shared
matrix, whose transformations these are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution import whole
from convolution.draws import Conv, Draw, Pool
from convolution.programs import arrays, block, difference, run, slices
from launcher.examples import LONG
from matrix.transformations import TRANSFORMATIONS

import distdl_jax as dj


@dataclass(frozen=True)
class Operator:
    """A layer as a function of parameters and x; in a loop its input is the same on all workers and in one place."""

    function: Callable[[Any], Any]
    derivatives: Any = None

    def __call__(self, v: Any) -> Any:
        return self.function(v)

    def coupled(self, v: Any, y: Any) -> Any:
        return v


def first(seed: int, draw: Callable[[Draw], Any], is_wanted: Callable[[Any], bool], workers: int = 4) -> Any:
    """The first layer drawn for so many workers, on two or more, that is as wanted and has finite results."""
    for case in range(1000):
        drawn = draw(Draw([seed, case], workers))
        if len(drawn.P_x.ranks) > 1 and drawn.batch and max(drawn.kernel) > 1 and is_wanted(drawn):
            return drawn
    raise AssertionError("no layer drawn is as wanted")


LAYERS: dict[str, Conv | Pool] = {
    "feature": first(1, Draw.conv, lambda c: c.P_y is None and c.bias and c.dims == 2 and c.mode == "reflect", 2),
    "general": first(3, Draw.conv, lambda c: c.P_y is not None and c.bias and min(c.P_x.shape[1:]) > 1),
    "max": first(
        4, Draw.pool, lambda p: p.kind == "Max" and p.dims == 2 and set(p.dilation) == {1} and min(p.sizes) > 3, 2
    ),
}
# Which a short run takes.
SHORT = {
    "feature": ("jit", "grad", "vmap of grad", "checkpoint", "grad of scan", "while_loop"),
    "general": ("jit", "vmap", "grad of vmap", "scan", "grad of scan of checkpoint", "reverse over reverse"),
}
SHORT["max"] = tuple(dict.fromkeys(SHORT["feature"] + SHORT["general"]))


def sequential(case: Conv | Pool) -> Operator:
    if isinstance(case, Pool):
        return Operator(lambda v: whole.pool_forward(case)(v["x"]))
    return Operator(lambda v: whole.conv_forward(case)(v["x"], v["weight"], v["bias"]))


def distributed(layer: Any) -> Operator:
    return Operator(lambda v: layer.apply({name: array for name, array in v.items() if name != "x"}, v["x"]))


def times(tree: Any, lead: tuple[int, ...]) -> Any:
    """With dimensions in front, along which the arrays differ."""
    factors = np.arange(1.0, 1 + np.prod(lead)).reshape(lead)
    return jax.tree.map(lambda a: factors.reshape(*lead, *(1,) * a.ndim) * a, tree)


@pytest.mark.simulated(2, 4)
@pytest.mark.limit(300)
def test_transformations(world_size: int) -> None:
    """A program for each layer of so many workers."""
    for name, case in LAYERS.items():
        if case.world == world_size:
            check(name, case)


def check(name: str, case: Conv | Pool) -> None:
    P_world = dj.Partition()
    rank, layer = P_world.rank, case.layer(P_world)
    made = arrays(case, 0)
    v, c = dict(zip(("x", "weight", "bias"), made[:-1], strict=False)), made[-1]
    its_boxes = {"x": case.x_boxes.get(rank)} | {name: slices(spec) for name, spec in layer.param_specs().items()}
    y_box = case.y_boxes.get(rank)

    def program(F: Operator) -> Callable[..., dict[str, Any]]:
        chosen = {key: TRANSFORMATIONS[key] for key in (SHORT[name] if LONG == 1 else TRANSFORMATIONS)}
        return lambda v, c, n: {
            f"{kind}, {key}": result
            for key, its in chosen.items()
            for kind, result in its.function(F, times(v, its.lead), c, n).items()
        }

    mine = {key: block(array, its_boxes[key]) for key, array in v.items()}
    shape = jax.eval_shape(distributed(layer), mine).shape
    my_c = jnp.zeros(shape) if y_box is None else jax.device_put(c[y_box])
    assert y_box is None or shape == my_c.shape
    got = run(program(distributed(layer)), mine, my_c, 3)
    got["y, eager"] = np.asarray(distributed(layer)(mine))
    want = None
    if rank == P_world.size - 1:  # one worker works it out for all
        want = jax.tree.map(np.asarray, jax.jit(program(sequential(case)))(v, c, 3))
    want = P_world.broadcast_data(want, root=P_world.size - 1)
    want["y, eager"] = want["y, jit"]

    texts = {}
    for key, expected in want.items():
        if key.startswith("dx"):
            for part, array in expected.items():
                texts[f"{key}, {part}"] = difference(got[key][part], array, its_boxes[part])
        else:
            texts[key] = difference(got[key], expected, y_box)
    wrong = [f"{key}: {text}" for key, text in texts.items() if text]
    assert not wrong, f"{layer}\n" + "\n".join(wrong)

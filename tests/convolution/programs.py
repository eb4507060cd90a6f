"""Many drawn layers as one compiled program on every worker, forward and gradients, against JAX on the whole array."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matrix import programs

import distdl_jax as dj
from convolution import whole
from convolution.draws import Conv, Pool

TOLERANCE = 1e-12


def run(program: Callable[..., Any], *args: Any) -> Any:
    """Run `program` on all workers, and return numpy arrays."""
    return jax.tree.map(np.asarray, programs.run(program, *args))


def arrays(drawn: Conv | Pool, seed: int, dtype: str = "float64") -> list[np.ndarray]:
    """For a convolution x, w, b and dy, for a pooling x and dy: the whole arrays, the same on every worker.

    In float32 small integers, whose sums of products are exact in any order.
    """
    rng = np.random.default_rng(seed)
    shapes = [drawn.x_shape, drawn.y_shape]
    if isinstance(drawn, Conv):
        shapes[1:1] = [drawn.w_shape, (drawn.out_channels,)]
    made = [rng.normal(size=shape) for shape in shapes]
    if dtype == "float32":
        made = [np.rint(2 * array).astype(dtype) for array in made]
    if isinstance(drawn, Conv) and not drawn.bias:
        made[2] = np.zeros(drawn.out_channels, dtype)
    return made


def block(array: np.ndarray, box: Any) -> Any:
    """This worker's part; a zero-volume array where it has none."""
    return dj.zero_volume_tensor(dtype=array.dtype) if box is None else jax.device_put(array[box])


def slices(spec: dj.TensorSpec) -> tuple[slice, ...] | None:
    return None if spec.box is None else tuple(slice(*side) for side in spec.box)


def check(cases: Sequence[Conv | Pool], dtype: str = "float64") -> None:
    """Every worker's blocks of the output and of all gradients are those of the whole arrays' results.

    Reports all cases that differ. Each worker works out the whole of some cases for all.
    """
    P_world = dj.Partition()
    made = [arrays(case, seed, dtype) for seed, case in enumerate(cases)]
    layers = [case.layer(P_world) for case in cases]
    want = _whole_results(cases, made)
    got = run(_program(layers), [_inputs(*three, P_world.rank) for three in zip(cases, layers, made, strict=True)])
    wrong = []
    for case, layer, result, expected in zip(cases, layers, got, want, strict=True):
        boxes = {"y": case.y_boxes.get(P_world.rank), "dx": case.x_boxes.get(P_world.rank)}
        for name, spec in layer.param_specs().items():
            boxes[f"d{name[0]}"] = slices(spec)
        for name, box in boxes.items():
            if text := difference(result[name], expected[name], box):
                wrong.append(f"{name} of {layer}: {text}\n    {case}")
    assert not wrong, "\n".join(wrong)


def _inputs(case: Conv | Pool, layer: Any, made: list[np.ndarray], rank: int) -> dict[str, Any]:
    x, dy = block(made[0], case.x_boxes.get(rank)), block(made[-1], case.y_boxes.get(rank))
    whole_params = dict(zip(("weight", "bias"), made[1:3], strict=True)) if isinstance(case, Conv) else {}
    params = {name: block(whole_params[name], slices(spec)) for name, spec in layer.param_specs().items()}
    return {"params": params, "x": x, "dy": dy}


def _program(layers: Sequence[Any]) -> Callable[[Any], Any]:
    def program(inputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        results = []
        for layer, given in zip(layers, inputs, strict=True):
            y, pullback = jax.vjp(layer.apply, given["params"], given["x"])
            dparams, dx = pullback(given["dy"] if given["dy"].size else jnp.zeros_like(y))
            results.append({"y": y, "dx": dx} | {f"d{name[0]}": grad for name, grad in dparams.items()})
        return results

    return program


def _whole_results(cases: Sequence[Conv | Pool], made: Sequence[list[np.ndarray]]) -> list[dict[str, np.ndarray]]:
    P = dj.Partition()
    mine = {
        i: (whole.conv_by_lax if isinstance(case, Conv) else whole.pool_by_lax)(case, *made[i])._asdict()  # type: ignore[operator]
        for i, case in enumerate(cases)
        if i % P.size == P.rank
    }
    everyone = {i: result for some in P.allgather_data(mine) for i, result in some.items()}
    return [everyone[i] for i in range(len(cases))]


def difference(got: np.ndarray, whole_array: np.ndarray, box: Any) -> str:
    """How a block differs from its part of the whole, relative to the whole's largest entry; "" where it does not.

    `box` is that of the last dimensions.
    """
    if box is None:
        return "" if got.size == 0 else f"has shape {got.shape} where no block is"
    want = whole_array[(..., *box)]
    if got.shape != want.shape:
        return f"shape {got.shape}, not {want.shape}"
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    error = np.max(np.abs(np.subtract(got, want, where=~same, out=np.zeros(got.shape))), initial=0)
    finite = np.where(np.isfinite(whole_array), whole_array, 0)
    return "" if error <= TOLERANCE * max(1, np.max(np.abs(finite), initial=0)) else f"off by {error:.3g}"

"""Layers beside the sequential ones: output and all gradients of many cases, in one compiled program."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from blocks import block_of
from matrix.partitions import On

import distdl_jax as dj
from distdl_jax import nn

Sizes = int | Sequence[int]


@dataclass(frozen=True, eq=False)
class Beside:
    """A layer on some partitions, and the sequential layer on whole tensors.

    - `sizes`: the lengths of x, along each dimension one, cut evenly, or those of all blocks.
    - `layer`: from the partition of all workers, the layer.
    - `whole`: from the whole parameters and x, the whole output: plain jax.numpy.
    - `P_x`, `P_y`: where the input and the output are.
    - `y_sizes`: the lengths of the blocks of y, where they are not cut evenly.
    - `scale`, `offset`: of the numbers in x.
    """

    name: str
    sizes: Sequence[Sizes]
    layer: Callable[[dj.Partition], Any]
    whole: Callable[[Any, Any], Any]
    P_x: On
    P_y: On | None = None
    y_sizes: Sequence[Sizes] | None = None
    offset: float = 0.0
    integers: int = 0

    def draw(self, what: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(f"{self.name} {what}".encode())).standard_normal(shape)

    @property
    def x(self) -> np.ndarray:
        shape = tuple(n if isinstance(n, int) else sum(n) for n in self.sizes)
        if self.integers:
            return np.random.default_rng(3).integers(0, self.integers, shape)
        return self.offset + self.draw("x", shape)

    def params(self, specs: Any) -> Any:
        """Draw the whole parameters."""
        paths, structure = jax.tree.flatten_with_path(specs)
        return structure.unflatten(
            [self.draw(f"params{jax.tree_util.keystr(path)}", spec.global_shape) for path, spec in paths]
        )


def made(layer: Any, *args: Any, **options: Any) -> Callable[[dj.Partition], Any]:
    """From all workers the layer, or that of this kind, of whose arguments each `On` is made a partition of some."""
    if isinstance(layer, str):
        layer = getattr(nn, layer if hasattr(nn, layer) else f"Distributed{layer}")

    def make(P: dj.Partition) -> Any:
        def its(value: Any) -> Any:
            return value.partition(P) if isinstance(value, On) else value

        return layer(*map(its, args), **{name: its(value) for name, value in options.items()})

    return make


def beside(
    kind: str, sizes: Sequence[Sizes], whole: Any, *args: Any, y_sizes: Any = None, offset: float = 0.0,
    integers: int = 0, **options: Any,
) -> Beside:  # fmt: skip
    """The layer of this kind with these arguments, the partitions of x and, where they differ, of y the first."""
    layer = made(kind, *args, **options)
    P_y = args[1] if isinstance(args[1], On) else None
    name = f"{kind} {sizes} {args} {options}"
    return Beside(name, sizes, layer, whole, args[0], P_y, y_sizes, offset, integers)


def shape_of(sizes: Sequence[Sizes]) -> tuple[int, ...]:
    return tuple(n if isinstance(n, int) else sum(n) for n in sizes)


def cut(whole: np.ndarray, P: On, rank: int, sizes: Sequence[Sizes] | None = None) -> np.ndarray | None:
    """Return the block of the worker `rank`; None where it has none."""
    if rank not in P.ranks:
        return None
    index = np.unravel_index(P.ranks.index(rank), P.shape)
    for d, (i, p) in enumerate(zip(index, P.shape, strict=True)):
        if sizes is None or isinstance(sizes[d], int):
            whole = np.array_split(whole, p, axis=d)[i]
        else:
            ends = [slice(*pair) for pair in pairwise(accumulate(sizes[d], initial=0))]
            whole = whole[(slice(None),) * d + (ends[i],)]
    return whole


def check_beside(cases: Sequence[Beside], tolerance: float = 1e-12) -> None:
    """Check that outputs, and gradients of sum(c * sin(y)) by x and parameters, are the blocks of the whole ones."""
    P = dj.Partition()
    layers = {case.name: case.layer(P) for case in cases}
    assert len(layers) == len(cases)
    specs = {name: layer.param_specs() for name, layer in layers.items()}
    expected = P.broadcast_data(_whole(cases, specs) if P.rank == 0 else None)
    params, xs, cs = {}, {}, {}
    for case in cases:
        params[case.name] = jax.tree.map(lambda spec, whole: block_of(whole, spec), specs[case.name],
                                         case.params(specs[case.name]))  # fmt: skip
        mine = cut(case.x, case.P_x, P.rank, case.sizes)
        batch = expected[case.name]["y"].shape[:1]
        xs[case.name] = np.zeros((*batch, 0), case.x.dtype) if mine is None else mine
        cs[case.name] = cut(expected[case.name]["c"], case.P_y or case.P_x, P.rank, case.y_sizes)

    def loss(both: Any) -> Any:
        params, floats = both
        ys = {case.name: layers[case.name](params[case.name], {**xs, **floats}[case.name]) for case in cases}
        parts = [jnp.sum(jnp.sin(ys[name]) * (1 if c is None else c)) for name, c in cs.items()]
        return sum(parts), ys

    floats = {case.name: xs[case.name] for case in cases if not case.integers}
    (value, ys), (of_params, of_x) = dj.jit(dj.value_and_grad(loss, has_aux=True))((params, floats))
    np.testing.assert_allclose(value, sum(each["value"] for each in expected.values()), rtol=1e-11)
    for case in cases:
        want = expected[case.name]
        mine = cut(want["y"], case.P_y or case.P_x, P.rank, case.y_sizes)
        if mine is None:
            assert ys[case.name].size == 0, case.name
        else:
            close(ys[case.name], mine, tolerance, f"y of {case.name}")
        if not case.integers:
            mine = cut(want["x"], case.P_x, P.rank, case.sizes)
            close(of_x[case.name], xs[case.name] if mine is None else mine, tolerance, f"gradient of x in {case.name}")
        jax.tree.map(
            lambda spec, got, whole, name=case.name: close(
                got, block_of(whole, spec), tolerance, f"gradient of parameters of {name}"
            ),
            *(specs[case.name], of_params[case.name], want["params"]),
        )


def close(got: Any, want: Any, tolerance: float, what: str) -> None:
    assert np.shape(got) == np.shape(want), f"{what}: {np.shape(got)}, not {np.shape(want)}"
    scale = max(1.0, float(np.max(np.abs(want), initial=0)))
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale, err_msg=what)


def _whole(cases: Sequence[Beside], specs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of the sequential layers, by case; in one program, too."""
    params = {case.name: case.params(specs[case.name]) for case in cases}
    floats = {case.name: case.x for case in cases if not case.integers}

    def forward(params: Any, floats: Any) -> Any:
        return {case.name: case.whole(params[case.name], {case.name: case.x, **floats}[case.name]) for case in cases}

    cs = {}

    def losses(params: Any, floats: Any) -> Any:
        ys = forward(params, floats)
        cs.update({case.name: case.draw("c", ys[case.name].shape) for case in cases})
        parts = {name: jnp.sum(cs[name] * jnp.sin(y)) for name, y in ys.items()}
        return sum(parts.values()), (parts, ys)

    of_all = jax.jit(jax.value_and_grad(losses, (0, 1), has_aux=True))
    (_, (values, ys)), (of_params, of_x) = jax.tree.map(np.asarray, of_all(params, floats))
    return {
        case.name: {
            "y": ys[case.name],
            "c": cs[case.name],
            "value": float(values[case.name]),
            "params": of_params[case.name],
            "x": of_x.get(case.name),
        }
        for case in cases
    }

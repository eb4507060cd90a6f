"""`dj.map_overlap`: stencils on blocks, and their gradients, are those of the whole, which numpy pads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_grids import Draw, grid, one_of

import distdl_jax as dj

NUMPY = {"periodic": "wrap", "reflect": "symmetric", "nearest": "edge"}
CASES = 8


@dataclass(frozen=True)
class Case:
    """A stencil of `weights`, by dimension and offset, of a tensor whose blocks have the lengths `lengths`."""

    P: dj.CartesianPartition
    x: np.ndarray
    dy: np.ndarray
    lengths: list[np.ndarray]
    depth: list[tuple[int, int]]
    boundary: list[Any]
    weights: list[np.ndarray]
    is_linear: bool

    @classmethod
    def drawn(cls, draw: Draw, world: dj.Partition, is_linear: bool) -> Case:
        dims = int(draw.integers(1, 4))
        P = grid(draw, world, dims)
        lengths = [draw.multinomial(draw.integers(1, 9), np.full(p, 1 / p)) for p in P.shape]
        shape = tuple(int(each.sum()) for each in lengths)
        depth = [tuple(draw.integers(0, min(n, 4) + 1, 2).tolist()) for n in shape]
        number = 0.0 if is_linear else float(draw.standard_normal())
        boundary = [one_of(draw, "none", number, *NUMPY) for _ in shape]
        weights = [draw.standard_normal(left + right + 1) for left, right in depth]
        x, dy = draw.standard_normal((2, *shape))
        return cls(P, x, dy, lengths, depth, boundary, weights, is_linear)

    def stencil(self, x: Any, xp: Any = jnp) -> Any:
        """Multiply by a banded matrix along each dimension after the other: for jax.numpy and numpy."""
        for d, ((left, _), weights) in enumerate(zip(self.depth, self.weights, strict=True)):
            n = x.shape[d]
            bands = sum(w * np.eye(n, k=k - left) for k, w in enumerate(weights))
            x = xp.moveaxis(xp.tensordot(bands, x, (1, d)), 0, d)
            x = x if self.is_linear else xp.tanh(x)
        return x

    def padded(self, x: Any, xp: Any) -> tuple[Any, tuple[slice, ...]]:
        """Return the whole with what is around it, and where it is in that."""
        inside = []
        for d, (pair, boundary) in enumerate(zip(self.depth, self.boundary, strict=True)):
            n, pair = x.shape[d], (0, 0) if boundary == "none" else pair
            widths = [pair if e == d else (0, 0) for e in range(x.ndim)]
            how = {"mode": NUMPY[boundary]} if isinstance(boundary, str) and boundary != "none" else {}
            x = xp.pad(x, widths, **(how or {"constant_values": 0.0 if boundary == "none" else boundary}))
            inside.append(slice(pair[0], pair[0] + n))
        return x, tuple(inside)

    def whole(self, x: Any, xp: Any) -> Any:
        x, inside = self.padded(x, xp)
        return self.stencil(x, xp)[inside]

    def block(self, whole: np.ndarray) -> np.ndarray:
        if not self.P.active:
            return np.zeros((0,) * whole.ndim)
        ends = [np.concatenate([[0], np.cumsum(each)]) for each in self.lengths]
        return whole[tuple(slice(e[i], e[i + 1]) for e, i in zip(ends, self.P.index, strict=True))]

    def mapped(self, x: Any) -> Any:
        return dj.map_overlap(self.stencil, x, self.P, self.depth, self.boundary)


def cases(world_size: int, is_linear: bool) -> list[Case]:
    draw = np.random.default_rng((world_size, is_linear))
    return [Case.drawn(draw, dj.Partition(), is_linear) for _ in range(CASES)]


@pytest.mark.simulated(1, 2, 3, 4)
def test_blocks_and_gradients_are_those_of_the_whole(world_size: int) -> None:
    drawn = cases(world_size, is_linear=False)

    @dj.jit
    def program(xs: Any) -> Any:
        def loss(xs: Any) -> Any:
            ys = [case.mapped(x) for case, x in zip(drawn, xs, strict=True)]
            parts = [jnp.sum(y * case.block(case.dy)) for case, y in zip(drawn, ys, strict=True) if case.P.active]
            return sum(parts, jnp.zeros(())), ys

        return dj.value_and_grad(loss, has_aux=True)(xs)

    (_, ys), gradients = program([jnp.asarray(case.block(case.x)) for case in drawn])
    for number, (case, y, gradient) in enumerate(zip(drawn, ys, gradients, strict=True)):
        if not case.P.active:
            assert y.size == gradient.size == 0
            continue
        text = f"case {number}: {case.P.shape}, {case.lengths}, {case.depth}, {case.boundary}"
        np.testing.assert_allclose(y, case.block(case.whole(case.x, np)), atol=1e-13, err_msg=text)
        of_whole = jax.jit(jax.grad(lambda x, case=case: jnp.sum(case.whole(x, jnp) * case.dy)))(case.x)
        np.testing.assert_allclose(gradient, case.block(np.asarray(of_whole)), atol=1e-12, err_msg=text)


@pytest.mark.simulated(1, 2, 3, 4)
def test_the_transpose_of_a_linear_stencil_is_its_adjoint(world_size: int) -> None:
    """<F x, dy> = <x, F* dy>, summed over all workers."""
    drawn = cases(world_size, is_linear=True)
    xs, dys = ([jnp.asarray(case.block(getattr(case, name))) for case in drawn] for name in ("x", "dy"))

    @dj.jit
    def program(xs: Any, dys: Any) -> Any:
        ys, pullback = jax.vjp(lambda xs: [case.mapped(x) for case, x in zip(drawn, xs, strict=True)], xs)
        (back,) = pullback([jnp.reshape(dy, y.shape) for dy, y in zip(dys, ys, strict=True)])
        return [jnp.sum(y.ravel() * dy.ravel()) for y, dy in zip(ys, dys, strict=True)], [
            jnp.sum(x * dx) for x, dx in zip(xs, back, strict=True)
        ]

    pairs = dj.Partition().allgather_data(jax.tree.map(float, program(xs, dys)))
    assert pairs is not None
    left, right = np.sum(pairs, axis=0)
    np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)
    assert np.count_nonzero(left) > CASES // 2


@pytest.mark.simulated(3)
def test_a_function_of_several_results_under_vmap_and_outside_of_its_partition() -> None:
    P = dj.Partition().grid([2], [2, 0])
    whole = np.arange(10.0).reshape(2, 5) ** 2
    blocks = whole[:, :3] if P.rank == 0 else whole[:, 3:]

    def both(x: Any) -> Any:
        return {"difference": jnp.roll(x, -1) - x, "rises": jnp.roll(x, -1) > x}

    def program(x: Any) -> Any:
        return dj.map_overlap(both, x, P, {-1: (0, 1)}, {0: "periodic"})

    x = jnp.asarray(blocks) if P.active else jnp.zeros((2, 0))
    y = dj.jit(jax.vmap(program))(x)
    assert y["rises"].dtype == bool and y["difference"].dtype == float
    if P.active:
        want = np.roll(whole, -1, 1) - whole
        np.testing.assert_array_equal(y["difference"], want[:, :3] if P.rank == 0 else want[:, 3:])
        np.testing.assert_array_equal(y["rises"], y["difference"] > 0)
    else:
        assert y["difference"].size == y["rises"].size == 0


@pytest.mark.simulated(2)
def test_what_does_not_fit_is_refused_on_all_workers() -> None:
    P = dj.Partition().grid([1, 2])
    x = jnp.ones((3, 4 - P.rank), np.int32)

    def mapped(f: Any = lambda x: x, x: Any = x, P: Any = P, depth: Any = 1, boundary: Any = "none") -> Any:
        return dj.map_overlap(f, x, P, depth, boundary)

    for options, error, words in (
        ({"f": 3}, dj.InvalidTypeError, r"`f` \(=3\)"),
        ({"P": 3}, dj.InvalidTypeError, r"`P` \(=3\)"),
        ({"depth": "two"}, dj.InvalidTypeError, r"`depth` \(='two'\) must be integers, or pairs"),
        ({"depth": (1, True)}, dj.InvalidTypeError, r"`depth` \(=\(1, True\)\)"),
        ({"depth": (1, 1, 1)}, dj.InvalidArgumentError, r"`depth` .* must have 2 entries"),
        ({"depth": {2: 1}}, dj.InvalidArgumentError, r"`depth` .* dimensions from -2 to 1 as its keys"),
        ({"depth": -1}, dj.InvalidArgumentError, r"`depth` \(=-1\) must be .*0 or more"),
        ({"depth": [1, (1, 2, 3)]}, dj.InvalidArgumentError, r"`depth` .*0 or more"),
        ({"depth": {0: 4}}, dj.PlanError, r"`depth` \(=\(4, 4\)\) must be at most 3 in dimension 0"),
        (
            {"boundary": "mirror"},
            dj.InvalidArgumentError,
            "must be one of none, periodic, reflect, nearest, or a number",
        ),
        ({"boundary": None}, dj.InvalidTypeError, r"`boundary` \(=None\)"),
        ({"boundary": 0.5}, dj.InvalidArgumentError, r"`boundary` \(=0.5\) must be a number that `x`, of int32"),
        ({"boundary": 2**40}, dj.InvalidArgumentError, "of int32, can hold"),
        ({"f": lambda x: x[1:]}, dj.PlanError, r"must return arrays of the shape of its argument, here \(3, .*"),
        ({"x": jnp.ones(3)}, dj.PlanError, "as many dimensions as its partition"),
    ):
        with pytest.raises(error, match=words):
            mapped(**options)
    assert mapped(boundary=7).shape == x.shape


def test_arguments_that_differ_between_workers_are_refused() -> None:
    def program() -> None:
        P = dj.Partition().grid([2])
        dj.map_overlap(jnp.abs, jnp.ones(3), P, depth=1 + P.rank)

    with pytest.raises(dj.PlanError, match=r"depth \(\(1, 1\),\)"):
        dj.simulate(2, program)

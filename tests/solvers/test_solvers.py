"""Conjugate gradients on split tensors beside dense algebra and JAX's cg, and fixed points beside the same iteration in
plain JAX, with all derivatives."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refused
from jax import lax
from jax.scipy.sparse import linalg
from matrix.partitions import On, on
from sequential import cut

import distdl_jax as dj
from distdl_jax import nn

N = 6
TOLERANCE = 1e-11


class Case(NamedTuple):
    """A system of N unknowns: the lengths of their blocks, whose they are, and whether they are complex."""

    sizes: Any
    P_x: On
    dtype: Any = float
    preconditioned: bool = False

    @property
    def matrix(self) -> np.ndarray:
        root = self.draw(0, N)
        return root @ root.conj().T / N

    def draw(self, seed: int, *columns: int) -> np.ndarray:
        parts = np.random.default_rng(seed).standard_normal((2, N, *columns))
        return parts[0] + 1j * parts[1] if self.dtype is complex else parts[0]

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is added to the matrix's diagonal, the right side, and what the solution is multiplied with."""
        return 1 + np.random.default_rng(1).random(N), self.draw(2), self.draw(3)


CASES = (
    Case(([4, 0, 2],), on(3, ranks=(2, 0, 1)), complex),
    Case((N,), on(2, ranks=(2, 1)), float, True),
)


def loss_of(solve: Callable[..., Any], scale: Any) -> Callable[..., Any]:
    def loss(d: Any, b: Any) -> Any:
        x = solve(d, b)
        return jnp.sum((scale * jnp.sin(x)).real)

    return loss


def derivatives(loss: Callable[..., Any], grad: Callable[..., Any], d: Any, b: Any) -> Any:
    """The gradient by what the operator closes over and by the right side, and a second derivative."""
    first = grad(loss, argnums=(0, 1))

    def again(d: Any, b: Any) -> Any:
        of_d, of_b = first(d, b)
        return jnp.sum(jnp.cos(of_d)) + jnp.sum(jnp.sin(of_b.real) * of_b.imag if jnp.iscomplexobj(b) else of_b**2)

    return first(d, b), grad(again, argnums=(0, 1))(d, b)


def operator(case: Case, P: dj.Partition, rank: int) -> Callable[[Any, Any], Any]:
    """The matrix and a diagonal, times this worker's block: each gathers the unknowns, and has its rows."""
    rows = cut(case.matrix, On((*case.P_x.shape, 1), case.P_x.ranks), rank, (*case.sizes, N))
    P_x = case.P_x.partition(P)
    return lambda d, x: d * x + (0 if rows is None else rows @ dj.functional.all_gather(x, P_x, axes=0))


def blocks_of(case: Case, rank: int) -> list[np.ndarray]:
    blocks = (cut(array, case.P_x, rank, case.sizes) for array in case.arrays)
    return [np.zeros(0, x.dtype) if block is None else block for block, x in zip(blocks, case.arrays, strict=True)]


@pytest.mark.simulated(3)
def test_solutions_and_derivatives_equal_dense_algebra() -> None:
    P = dj.Partition()

    def in_one_place() -> Any:
        results = []
        for case in CASES:
            matrix, (d, b, scale) = case.matrix, case.arrays

            def dense(d: Any, b: Any, matrix: Any = matrix) -> Any:
                return jnp.linalg.solve(matrix + jnp.diag(d), b)

            third, _ = linalg.cg(lambda x, m=matrix, d=d: m @ x + d * x, b, tol=0.0, maxiter=3)
            results.append((dense(d, b), third, derivatives(loss_of(dense, scale), jax.grad, d, b)))
        return results

    @dj.jit
    def program(arrays: Any) -> Any:
        results = []
        for case, (d, b, scale) in zip(CASES, arrays, strict=True):
            apply, P_x = operator(case, P, P.rank), case.P_x.partition(P)

            def solve(d: Any, b: Any, apply: Any = apply, P_x: Any = P_x, case: Case = case, **options: Any) -> Any:
                M = (lambda r: r / (1 + d)) if case.preconditioned else None
                return dj.solvers.cg(partial(apply, d), b, P_x, tol=1e-14, M=M, **options)

            third, _ = dj.solvers.cg(partial(apply, d), b, P_x, tol=0.0, maxiter=3)
            x, info = solve(d, b)
            loss = loss_of(lambda d, b, solve=solve: solve(d, b)[0], scale)
            results.append(((x, third, derivatives(loss, dj.grad, d, b)), info))
        return results

    wanted = P.broadcast_data(jax.device_get(jax.jit(in_one_place)()) if P.rank == 0 else None, root=0)
    for case, (got, info), want in zip(
        CASES, program([blocks_of(case, P.rank) for case in CASES]), wanted, strict=True
    ):
        active = P.rank in case.P_x.ranks
        assert (bool(info.converged), 2 <= int(info.steps) <= 2 * N) == (active, active)
        for mine, whole in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            block = cut(whole, case.P_x, P.rank, case.sizes) if active else np.zeros(0)
            np.testing.assert_allclose(mine, block, TOLERANCE, TOLERANCE, err_msg=str(case))


@pytest.mark.simulated(2)
def test_trees_and_operators_on_other_workers() -> None:
    """Worker 1 holds nothing of the unknowns, but multiplies one of them; only worker 0 has a loss."""
    P = dj.Partition()
    P_0, P_1 = P.grid([1], [0]), P.grid([1], [1])
    matrix = np.diag([2.0, 3.0, 4.0]) + 0.5
    holds = P.rank == 0
    b = {"u": jnp.arange(1.0, 4.0) if holds else jnp.zeros(0), "v": jnp.ones((2, 2)) if holds else jnp.zeros(0)}

    def A(weight: Any, x: Any) -> Any:
        there = dj.functional.repartition(x["u"], P_0, P_1, preserve_batch=False)
        back = dj.functional.repartition(
            (weight * matrix) @ there if not holds else there, P_1, P_0, preserve_batch=False
        )
        return {"u": back, "v": 3 * x["v"]}

    def loss(weight: Any, b: Any) -> Any:
        x, info = dj.solvers.cg(lambda x: A(weight, x), b, P, tol=1e-14)
        return jnp.sum(x["u"] ** 2) + jnp.sum(x["v"]) * info.steps if holds else 0.0

    @dj.jit
    def program(weight: Any, b: Any) -> Any:
        return dj.grad(loss, argnums=(0, 1))(weight, b), dj.jvp(lambda w: loss(w, b), (weight,), (weight,))

    (of_weight, of_b), (value, slope) = program(np.float64(2.0), b)
    u = np.linalg.solve(2 * matrix, np.arange(1.0, 4.0))
    if holds:
        np.testing.assert_allclose(of_b["u"], np.linalg.solve(2 * matrix, 2 * u), 1e-12)
        np.testing.assert_allclose(slope, -2 * u @ u, 1e-12)
        assert value - u @ u == pytest.approx(4 / 3 * round((value - u @ u) * 3 / 4))
    else:
        np.testing.assert_allclose(of_weight, -u @ u, 1e-12)


@pytest.mark.simulated(2)
def test_implicit_steps_under_transformations() -> None:
    """Two steps of the heat equation in a scan of a checkpointed step, mapped over right sides."""
    P = dj.Partition().grid([2])
    first = P.rank == 0

    def wide(x: Any, ends: tuple[bool, bool]) -> Any:
        return jnp.pad(x, tuple(map(int, ends)), mode="edge")

    def laplace(x: Any, widened: Callable[[Any], Any]) -> Any:
        w = widened(x)
        return 2 * x - w[:-2] - w[2:]

    def after(solve: Callable[..., Any], widened: Callable[[Any], Any], k: Any, u: Any) -> Any:
        @jax.checkpoint
        def step(u: Any, _: None) -> Any:
            return solve(lambda v: v + k * laplace(v, widened), jnp.sin(u)), None

        return lax.scan(step, u, length=2)[0]

    def losses(solve: Callable[..., Any], widened: Callable[[Any], Any], k: Any, us: Any) -> Any:
        return jax.vmap(lambda u: jnp.sum(after(solve, widened, k, u) ** 2))(us)

    def split(x: Any) -> Any:
        return wide(dj.functional.halo_exchange(x, P, ((1, 1),)), (first, not first))

    def shared(k: Any, us: Any) -> Any:
        return jnp.sum(losses(lambda A, b: dj.solvers.cg(A, b, P, tol=1e-14)[0], split, dj.replicated(k, P), us))

    def alone(k: Any, us: Any) -> Any:
        return jnp.sum(losses(lambda A, b: linalg.cg(A, b, tol=1e-14)[0], lambda x: wide(x, (True, True)), k, us))

    us = np.random.default_rng(0).standard_normal((3, 5))
    mine = us[:, :3] if first else us[:, 3:]
    (value, (of_k, of_us)), (want, (want_k, want_us)) = (
        dj.jit(dj.value_and_grad(shared, argnums=(0, 1)))(0.7, mine),
        jax.jit(jax.value_and_grad(alone, argnums=(0, 1)))(0.7, us),
    )
    np.testing.assert_allclose([value, of_k], [want, want_k], 1e-11)
    np.testing.assert_allclose(of_us, want_us[:, :3] if first else want_us[:, 3:], 1e-11, 1e-12)


@pytest.mark.simulated(2)
def test_single_precision_and_the_end_of_the_steps() -> None:
    P = dj.Partition().grid([2])
    b = jnp.ones(2, jnp.float32) + P.rank
    x, info = dj.solvers.cg(lambda x: jnp.float32(2) * x, b, P, 0 * b)
    assert (x.dtype, info.residual.dtype, int(info.steps)) == (jnp.float32, jnp.float32, 1)
    diagonal = jnp.arange(1.0, 3) + 2 * P.rank
    x, info = dj.solvers.cg(lambda x: diagonal.astype(x.dtype) * x, b, P, maxiter=2)
    assert (bool(info.converged), int(info.steps)) == (False, 2)
    half, _ = dj.solvers.cg(lambda x: diagonal.astype(x.dtype) * x, b.astype(jnp.bfloat16), P)
    np.testing.assert_allclose(half.astype(float), b / diagonal, 0.02)
    x, info = dj.solvers.cg(lambda x: x, 0 * b, P)
    assert (bool(info.converged), int(info.steps), x.tolist()) == (True, 0, [0, 0])


def test_refusals() -> None:
    """In one sentence on every worker, without an agreement."""

    def cg(**options: Any) -> Any:
        given = {"A": lambda x: x, "b": jnp.ones(2), **options}
        return lambda P: dj.solvers.cg(P_x=P.grid([2]), **given)

    def fixed_point(**options: Any) -> Any:
        given = {"f": lambda p, z: z, "params": 1.0, "x0": jnp.ones(2), **options}
        return lambda P: dj.solvers.fixed_point(P_x=P.grid([2]), **given)

    kind, value = dj.InvalidTypeError, dj.InvalidArgumentError
    refused(
        2,
        ("`A` (an array of shape (2, 2)) must be a function of this", kind, cg(A=np.eye(2))),
        ("`M` (=3) must be a function", kind, cg(M=3)),
        ("`tol` (=-1) must be a number, 0 or more", value, cg(tol=-1)),
        ("`maxiter` (=-1) must be 0 or more", value, cg(maxiter=-1)),
        ("`f` (=3) must be a function", kind, fixed_point(f=3)),
        ("`atol` (='a') must be a number, 0 or more", value, fixed_point(atol="a")),
        ("`maxiter` (=1.5) must be an integer", kind, fixed_point(maxiter=1.5)),
    )


@pytest.mark.simulated(2)
def test_arguments_of_one_worker_are_refused_by_all() -> None:
    P = dj.Partition().grid([2])
    mine = P.rank == 1
    integers = np.ones(2, np.int32 if mine else float)
    for sentence, options in (
        (r"`A` must return blocks like `b`, float64\[2\], but is float64\[1\]", {"A": lambda x: x[: 2 - mine]}),
        (r"`A` .* but is complex128\[2\]", {"A": lambda x: 1j * x}),
        (r"`x0` must be like `b`, float64\[2\], but is float64\[3\]", {"x0": jnp.ones(2 + mine)}),
        (r"`b` must hold floating or complex numbers, but .* int32\[2\]", {"b": integers}),
        (r"`b` must be an array, .* but workers pass \[1, 2\]", {"b": [np.ones(2)] * (1 + mine)}),
    ):
        given = {"A": lambda x: x, "b": jnp.ones(2), "P_x": P} | options
        with pytest.raises(dj.InvalidArgumentError, match=sentence):
            dj.solvers.cg(**given)


COUPLING = np.random.default_rng(0).standard_normal((N, N)) / 8
Z_SIZES, P_Z = ([2, 0, 4],), on(3, ranks=(2, 0, 1))


@pytest.mark.simulated(3)
def test_fixed_points_and_derivatives_equal_many_steps() -> None:
    """By parameters, one of which is an integer, and by what the function closes over."""
    P = dj.Partition()
    P_x, rows = P_Z.partition(P), cut(COUPLING, On((3, 1), P_Z.ranks), P.rank, (*Z_SIZES, N))
    arrays = np.random.default_rng(1).standard_normal((3, N))
    mine = [cut(array, P_Z, P.rank, Z_SIZES) for array in arrays]

    def contraction(product: Callable[[Any], Any], k: Any, b: Any) -> Callable[[Any, Any], Any]:
        return lambda params, z: jnp.tanh(jnp.cos(k) * product(z) + params["b"]) / params["two"]

    def solve(k: Any, b: Any) -> Any:
        f = contraction(lambda z: rows @ dj.functional.all_gather(z, P_x, axes=0), k, b)
        return dj.solvers.fixed_point(f, {"b": b, "two": 2}, jnp.zeros_like(b), P_x, tol=1e-15)

    def unrolled(k: Any, b: Any) -> Any:
        f = contraction(lambda z: COUPLING @ z, k, b)
        return lax.fori_loop(0, 40, lambda _, z: f({"b": b, "two": 2}, z), jnp.zeros_like(b))

    @dj.jit
    def program(k: Any, b: Any, scale: Any) -> Any:
        z, info = solve(k, b)
        return (z, derivatives(loss_of(lambda k, b: solve(k, b)[0], scale), dj.grad, k, b)), info

    def in_one_place(k: Any, b: Any, scale: Any) -> Any:
        return unrolled(k, b), derivatives(loss_of(unrolled, scale), jax.grad, k, b)

    wanted = P.broadcast_data(jax.device_get(jax.jit(in_one_place)(*arrays)) if P.rank == 0 else None, root=0)
    got, info = program(*mine)
    assert bool(info.converged) and 5 < int(info.steps) < 40
    for block, whole in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(block, cut(whole, P_Z, P.rank, Z_SIZES), 1e-12, 1e-13)


@pytest.mark.simulated(2)
def test_a_deep_equilibrium_model_of_layers() -> None:
    """Its weights are on worker 0, and broadcast in each step; one worker alone has a loss."""
    P = dj.Partition()
    layers = [
        nn.DistributedConv1d(P.grid([1, 1, n]), in_channels=2, out_channels=2, kernel_size=3, padding=1) for n in (2, 1)
    ]
    params = jax.tree.map(lambda w: w / 2, layers[0].init(jax.random.key(0), float))
    whole = dj.gather(params, layers[0].param_specs())
    x = np.random.default_rng(0).standard_normal((1, 2, 5))
    own = slice(0, 3) if P.rank == 0 else slice(3, 5)

    def step(layer: Any, x: Any, params: Any, z: Any) -> Any:
        return jnp.tanh(layer(params, z) + x)

    def loss(params: Any, x: Any) -> Any:
        z, _ = dj.solvers.fixed_point(lambda p, z: step(layers[0], x, p, z), params, 0 * x, P, tol=1e-15)
        return jnp.sum(z**2) if P.rank == 1 else 0.0

    def unrolled(params: Any, x: Any) -> Any:
        z = lax.fori_loop(0, 60, lambda _, z: step(layers[1], x, params, z), 0 * x)
        return jnp.sum(z[..., 3:] ** 2)

    value, (of_params, of_x) = dj.jit(dj.value_and_grad(loss, argnums=(0, 1)))(params, x[..., own])
    of_params = dj.gather(of_params, layers[0].param_specs())
    if P.rank == 0:
        want, (of_whole, want_x) = jax.jit(jax.value_and_grad(unrolled, argnums=(0, 1)))(whole, x)
        np.testing.assert_allclose(value, want, 1e-12)
        np.testing.assert_allclose(of_x, want_x[..., own], 1e-11, 1e-13)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-11, 1e-13), of_params, of_whole)

"""Derivatives along a direction: what the matrix of transformations doesn't ask, and what is refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matrix.partitions import on

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn
from distdl_jax.transforms.linearity import depends_on_first

X = np.arange(1.0, 4.0)


def partitions() -> tuple[dj.CartesianPartition, dj.CartesianPartition]:
    """Worker 1 alone, and all workers in a line."""
    P = dj.Partition()
    one = P.grid([1], [1])
    return one, P.grid([P.size])


def moving() -> Callable[[Any], Any]:
    """X of worker 1 to sin(3 x^2) on all three: a broadcast, and a sum over all."""
    one, line = partitions()

    def f(x: Any) -> Any:
        y = F.broadcast(x**2, one, line, preserve_batch=False)
        return jnp.sin(F.all_sum_reduce(y, line, axes_reduce=0))

    return f


def here(dtype: Any = float) -> tuple[jax.Array, jax.Array]:
    """This worker's part of X, and of a direction: nothing but on worker 1."""
    x = jnp.asarray(X if dj.Partition().rank == 1 else np.zeros(0), dtype)
    return x, jnp.cos(x).astype(dtype)


def near(got: Any, want: Any, rtol: float = 1e-13) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), got, want)


def plain(whole: Callable[[Any], Any], x: Any, v: Any) -> tuple[tuple[Any, Any], Any]:
    """JAX's own, of one worker: value and tangent, and the Hessian of the sum times v, in one compiled program."""

    def program(x: Any, v: Any) -> Any:
        return jax.jvp(whole, (x,), (v,)), jax.jvp(jax.grad(lambda x: jnp.sum(whole(x))), (x,), (v,))[1]

    return jax.jit(program)(x, v)  # type: ignore[no-any-return]


@pytest.mark.world(3)
@pytest.mark.simulated(3)
def test_workers_whose_part_is_empty_constant_or_unused() -> None:
    """Outputs that are used on one worker only, losses that are constant on the rest: all move the same."""
    f, (x, v), rank = moving(), here(), dj.Partition().rank
    mine = slice(None) if rank == 1 else slice(0)

    def share(x: Any) -> Any:
        value = jnp.sum(f(x))
        return value if rank == 0 else 0.0

    def used_on_one(x: Any) -> Any:
        y = f(x)
        return y if rank == 2 else jnp.zeros(0)

    (want, want_tangent), hessian = plain(lambda x: jnp.sin(3 * x**2), X, np.cos(X))
    both = dj.jit(lambda x, v: dj.jvp(used_on_one, (x,), (v,)))(x, v)
    near(both, (want, want_tangent) if rank == 2 else (np.zeros(0), np.zeros(0)), 1e-14)
    near(dj.jit(lambda x, v: dj.hvp(share, (x,), (v,)))(x, v), hessian[mine])


@pytest.mark.simulated(3)
def test_constants_that_jax_makes_of_empty_blocks() -> None:
    """Indexing, which has no derivative where there is nothing; in a loop, a nested jit, unused."""
    (one, line), rank, (x, v) = partitions(), dj.Partition().rank, here()
    order = jnp.array([2, 0, 1]) if rank == 1 else jnp.zeros(0, int)

    @jax.jit
    def inner(z: Any, a: Any) -> Any:
        return F.all_sum_reduce(jnp.sin(a * F.broadcast(z, one, line, preserve_batch=False)), line, axes_reduce=0) / 3

    def f(x: Any) -> Any:
        y = lax.scan(lambda y, a: (y + inner(x[order] ** 2, a), None), jnp.zeros(3), jnp.arange(3.0))[0]
        return y if rank == 0 else jnp.zeros(3)

    def whole(x: Any) -> Any:
        return sum(jnp.sin(a * x[jnp.array([2, 0, 1])] ** 2) for a in range(3))

    both, product, derivative = dj.jit(
        lambda x, v: (dj.jvp(f, (x,), (v,)), dj.hvp(lambda x: jnp.sum(f(x)), (x,), (v,)), dj.linearize(f, x)[1](v))
    )(x, v)
    (want, want_tangent), hessian = plain(whole, X, np.cos(X))
    near((*both, derivative), tuple(each * (rank == 0) for each in (want, want_tangent, want_tangent)))
    near(product, hessian if rank == 1 else np.zeros(0), 1e-12)


@pytest.mark.simulated(3)
def test_pytrees_integers_and_aux() -> None:
    """As in jax.jvp: floating and complex leaves vary, others have tangents of dtype float0; aux passes through."""
    f, (x, v), zero = moving(), here(), np.zeros((), jax.dtypes.float0)

    def fun(tree: Any, n: Any) -> Any:
        y = f(tree["x"]) ** n * tree["scale"]
        return {"y": y, "n": 2 * n}, {"aux": y.shape}

    primals, tangents = ({"x": x, "scale": 2.0}, 3), ({"x": v, "scale": 1.0}, zero)
    value, tangent, aux = dj.jvp(fun, primals, tangents, has_aux=True)

    def whole(x: Any, scale: Any) -> Any:
        return jnp.sin(3 * x**2) ** 3 * scale

    want = jax.jit(lambda: jax.jvp(whole, (X, 2.0), (np.cos(X), 1.0)))()
    near((value["y"], tangent["y"]), want)
    assert (value["n"], tangent["n"].dtype, aux) == (6, jax.dtypes.float0, {"aux": (3,)})
    same, derivative, aux = dj.linearize(fun, *primals, has_aux=True)
    jax.tree.map(np.testing.assert_array_equal, (same, aux), (value, {"aux": (3,)}))
    jax.tree.map(np.testing.assert_array_equal, derivative(*tangents), tangent)

    def share(tree: Any, scale: Any) -> Any:
        return jnp.sum(f(tree["x"])) * scale / 3

    both = dj.hvp(share, ({"x": x}, 2.0), ({"x": v}, 1.0), argnums=(0, 1))
    assert both[0].keys() == {"x"} and both[1].shape == ()
    np.testing.assert_array_equal(dj.hvp(share, ({"x": x}, 2.0), ({"x": v}, 1.0), argnums=1), both[1])


@pytest.mark.simulated(3)
def test_dtypes() -> None:
    """The tangent has the value's dtype; small integers, so that nothing is rounded."""
    (one, line), rank, dtypes = partitions(), dj.Partition().rank, ("bfloat16", "float32", "complex64")
    turn = {dtype: 1j if dtype == "complex64" else 1.0 for dtype in dtypes}
    xs = {dtype: (X if rank == 1 else X[:0]) * turn[dtype] for dtype in dtypes}

    def broadcast(x: Any) -> Any:
        return F.broadcast(x, one, line, preserve_batch=False)

    @dj.jit
    def program(xs: Any) -> Any:
        results = {}
        for dtype, x in xs.items():
            value, tangent = dj.jvp(lambda x: F.all_sum_reduce(broadcast(x * x), line, axes_reduce=0), (x,), (2 * x,))
            results[dtype] = (value, tangent, *dj.linear_transpose(broadcast, x)(value))
        return results

    for dtype, (value, tangent, adjoint) in program(
        {name: jax.device_put(np.asarray(x, name)) for name, x in xs.items()}
    ).items():
        assert value.dtype == tangent.dtype == adjoint.dtype == dtype
        squares = (X * turn[dtype]) ** 2
        np.testing.assert_array_equal(np.asarray(value, complex), 3 * squares)
        np.testing.assert_array_equal(np.asarray(tangent, complex), 12 * squares)
        np.testing.assert_array_equal(np.asarray(adjoint, complex), 9 * squares if rank == 1 else [])


@pytest.mark.simulated(4)
def test_jax_grad_of_a_derivative() -> None:
    """Of copies of empty blocks, which JAX makes constants of on some workers only: all run all adjoints.

    Of what dj.jvp and dj.linearize give.
    """
    P = dj.Partition()
    spec = dj.TensorSpec((2, 5), on(1, 2, 2, ranks=(1, 3, 0, 2)).partition(P), (1,))
    whole = np.arange(10.0).reshape(2, 5) / 7
    x = jnp.asarray(whole if P.rank == 3 else np.zeros(0))

    def moved(x: Any) -> Any:
        return jnp.sin(dj.scatter([jnp.sin(x)], [spec], 3)[0])

    def along(x: Any) -> Any:
        return dj.jvp(moved, (x,), (jnp.cos(x),))[1] + dj.linearize(moved, x)[1](x)

    def two(x: Any) -> Any:  # copies of each element
        return 2 * jnp.sum(jax.jvp(lambda x: jnp.sin(jnp.sin(x)), (x,), (jnp.cos(x) + x,))[1] ** 2)

    got = jax.jit(jax.grad(lambda x: jnp.sum(along(x) ** 2)))(x)
    near(got, jax.jit(jax.grad(two))(whole) if P.rank == 3 else np.zeros(0), 1e-12)


@pytest.mark.simulated(3)
def test_replicated_values() -> None:
    """A tangent is copied like its value, a Hessian is that of one variable; in a nested jit that was used before."""
    P, x = dj.Partition(), np.arange(6.0).reshape(2, 3) / 5
    mine = jax.device_put(x[:, P.rank])
    params = {"scale": jnp.float64(1.5), "shift": jnp.float64(-0.25)}
    v = {"scale": jnp.float64(2.0), "shift": jnp.float64(-1.0)}

    @jax.jit
    def part(params: Any) -> Any:
        params = dj.replicated(params, P)
        total = F.all_sum_reduce(jnp.sin(params["scale"] * mine), P, axes_reduce=0)
        return jnp.cos(params["shift"] * mine) * total

    def whole(params: Any) -> Any:
        total = jnp.sin(params["scale"] * x).sum(1, keepdims=True)
        return jnp.cos(params["shift"] * x) * total

    gradient = jax.grad(lambda params: jnp.sum(part(params)))
    near(gradient(params), jax.jit(jax.grad(lambda params: jnp.sum(whole(params))))(params))
    (value, tangent), product = jax.jit(
        lambda params, v: (dj.jvp(part, (params,), (v,)), dj.hvp(lambda params: jnp.sum(part(params)), (params,), (v,)))
    )(params, v)
    (want, want_tangent), hessian = plain(whole, params, v)
    near(value, want[:, P.rank])
    near(tangent, want_tangent[:, P.rank], 1e-12)
    again = jax.grad(lambda params: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient(params), v))) / 3)(params)
    near((product, again), (hessian, hessian), 1e-12)


@pytest.mark.simulated(3)
def test_jax_jvp_names_what_to_call() -> None:
    """Wherever the movement is: a TypeError on all workers, before anything moves forward."""
    f, (x, v), rank = moving(), here(), dj.Partition().rank

    def loop(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            y = f(x)
            return (y if rank == 1 else y[:0]), None

        return lax.scan(body, x, None, 2)[0]

    programs: list[Callable[[], Any]] = [
        lambda: jax.jvp(f, (x,), (v,)),
        lambda: jax.jit(lambda x, v: jax.jvp(f, (x,), (v,)))(x, v),
        lambda: jax.linearize(f, x)[1](v),
        lambda: jax.jacfwd(f)(x),
        lambda: jax.hessian(lambda x: jnp.sum(f(x)))(x),
        lambda: jax.jvp(jax.grad(lambda x: jnp.sum(f(x))), (x,), (v,)),
        lambda: jax.jvp(jax.checkpoint(f), (x,), (v,)),
        lambda: jax.jvp(loop, (x,), (v,)),
    ]
    for program in programs:
        with pytest.raises(TypeError, match=r"Use dj\.jvp\(fun, primals, tangents\)"):
            program()


@pytest.mark.simulated(2)
def test_what_jax_can_not_transpose_names_what_to_write() -> None:
    """jax.linear_transpose, and a rule forward in which tangents move, under dj.grad, jax.grad and dj.jvp."""
    P, x = dj.Partition(), jnp.array([1.0, 2.0])

    def total(x: Any) -> Any:
        return F.all_sum_reduce(x, P, axes_keep=())

    @jax.custom_jvp
    def cubes(x: Any) -> Any:
        return total(x**3)

    cubes.defjvp(lambda primals, tangents: (cubes(*primals), total(3 * primals[0] ** 2 * tangents[0])))
    programs: list[Callable[[], Any]] = [
        lambda: jax.linear_transpose(total, x)(x),
        lambda: jax.jit(jax.grad(lambda x: jnp.sum(cubes(x))))(x),
        lambda: dj.grad(lambda x: jnp.sum(cubes(x)))(x),
        lambda: dj.jvp(cubes, (x,), (x,)),
    ]
    for program in programs:
        with pytest.raises(
            TypeError, match=r"call dj\.linear_transpose; instead of a jax\.custom_jvp .* jax\.custom_vjp"
        ):
            program()


@pytest.mark.simulated(3)
def test_what_does_not_fit_is_refused_on_every_worker() -> None:
    f, (x, v), rank, (one, line) = moving(), here(), dj.Partition().rank, partitions()

    def broadcast(x: Any) -> Any:
        return F.broadcast(x, one, line, preserve_batch=False)

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: dj.jvp(f, (x,), (v[:-1] if rank == 1 else v,)), r"shape \(3,\) at \[0\], but has .* shape \(2,\)"),
        (lambda: dj.jvp(f, (x,), (v.astype("float32"),)), "must hold float64 at .* float32 there"),
        (lambda: dj.hvp(f, (x,), ([v],)), "`tangents` must have the structure"),
        (lambda: dj.hvp(f, (x,), (v,), argnums=1), r"`argnums` \(=1\) must name arguments among 1 `primals`"),
        (lambda: dj.jvp(f, x, (v,)), "`primals` must be a tuple or a list of arguments, but is an array of shape"),
        (lambda: dj.linearize(f, x)[1](v, v), "`tangents` must have the structure"),
        (lambda: dj.linear_transpose(f, jnp.arange(3)), r"`primals` must hold floating or complex arrays, but .*int"),
        (lambda: dj.linear_transpose(broadcast, x)(v[:0]), "the transpose's argument must hold an array of shape"),
        (lambda: dj.linear_transpose(f, x), "`fun` must be linear"),
        (lambda: dj.linear_transpose(lambda x: jnp.sin(x) if rank == 2 else -x, X), "`fun` must be linear"),
    ]
    for program, sentence in refused:
        with pytest.raises(dj.DistDLError, match=sentence):
            program()


LINEAR: dict[str, Callable[[Any], Any]] = {
    "product": lambda x: 2 * x @ jnp.arange(12.0).reshape(3, 4) - 1,
    "scan": lambda x: lax.scan(lambda c, a: (c * jnp.sin(a), c), x, jnp.arange(3.0))[0],
    "scan in checkpoint": lambda x: jax.checkpoint(lambda x: lax.scan(lambda c, a: (c + a * x, c), x, jnp.ones(3))[1])(
        x
    ),
    "cond": lambda x: lax.cond(jnp.asarray(True), lambda x: 3 * x, lambda x: x[::-1], x),
    "jit": jax.jit(lambda x: jnp.cumsum(x)[jnp.array([0, 2])]),
    "convolution": lambda x: jnp.convolve(x, jnp.arange(4.0)),
    "network": lambda x: nn.DistributedConv1d(
        dj.planning_world(1).grid([1, 1, 1]), in_channels=1, out_channels=2, kernel_size=3, bias=False
    )({"weight": jnp.arange(6.0).reshape(2, 1, 3)}, x.reshape(1, 1, 3)),
}
NOT_LINEAR: dict[str, Callable[[Any], Any]] = {
    "square": lambda x: x * x,
    "scan": lambda x: lax.scan(lambda c, _: (c * x, None), x, length=2)[0],
    "cond": lambda x: lax.cond(x[0] > 0, lambda x: x, jnp.negative, x),
    "one branch": lambda x: lax.cond(jnp.asarray(True), lambda x: x, lambda x: x * x, x),
    "the other branch": lambda x: lax.cond(jnp.asarray(True), lambda x: x * x, lambda x: x, x),
    "jit": jax.jit(jnp.abs),
    "checkpoint": jax.checkpoint(lambda x: x * jnp.sum(x)),
}


@pytest.mark.parametrize(
    ("functions", "not_linear"), [(LINEAR, False), (NOT_LINEAR, True)], ids=["linear", "not linear"]
)
def test_linear_functions_are_recognised(functions: dict[str, Callable[[Any], Any]], not_linear: bool) -> None:
    for name, fun in functions.items():
        assert depends_on_first(lambda x, dy, fun=fun: jax.vjp(fun, x)[1](dy), X, fun(X)) == not_linear, name

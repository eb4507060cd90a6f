"""`TRANSFORMATIONS`: what a program may do with an operator, each a function of it.

The same function runs on every worker, with the library's operator and that worker's arrays, and in one process, with
the reference and one vector of all workers' numbers. What is differentiated is in both the sum over all workers.

Arguments: the operator F, its input x, the weights c of its output, and the number 3, unknown to the compiler. Results
are named: "y..." has the shape of F's output, "dx..." that of its input, both with the dimensions of `lead` in front.

`F.coupled(x, y)` is each worker's x, scaled by what it finds in its y; `F.derivatives` has `jvp`, `hvp` and
`linear_transpose` for F.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

Operator = Any


class Transformation(NamedTuple):
    """`lead` are the dimensions that the operator's input has in front."""

    function: Callable[[Operator, Any, Any, Array], dict[str, Any]]
    lead: tuple[int, ...] = ()


def bent(x: Any) -> Any:
    """Something that is not linear."""
    return jax.tree.map(lambda a: lax.sin(a), x)


def inner(c: Any, y: Any) -> Array:
    """The inner product."""
    return sum((jnp.sum(a * b) for a, b in zip(jax.tree.leaves(c), jax.tree.leaves(y), strict=True)), jnp.zeros(()))


def loss(F: Callable[[Any], Any], c: Any) -> Callable[[Any], Array]:
    """Not linear before and behind the operator."""
    return lambda x: inner(c, bent(F(bent(x))))


def _there_and_back(function: Callable[[Any], Any], x: Any, c: Any) -> dict[str, Any]:
    """The value, and the gradient of its product with c."""

    def scalar(x: Any) -> tuple[Array, Any]:
        y = function(x)
        return inner(c, y), y

    dx, y = jax.grad(scalar, has_aux=True)(x)
    return {"y": y, "dx": dx}


def _two_calls(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    G = jax.jit(F)
    return {"y inner": jax.jit(lambda x: G(x))(x), "y outer": G(bent(x))}


def _last_axis(F: Operator) -> Callable[[Any], Any]:
    def moved(x: Any, source: int, target: int) -> Any:
        return jax.tree.map(lambda a: jnp.moveaxis(a, source, target), x)

    return lambda x: moved(jax.vmap(F, in_axes=-1, out_axes=-1)(moved(x, 0, -1)), -1, 0)


def _vmap(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    first = jax.tree.map(lambda a: a[0], x)
    unbatched = jax.vmap(lambda scale: scale * F(first))(jnp.arange(3.0))
    return {"y": jax.vmap(F)(x), "y along the last axis": _last_axis(F)(x), "y unbatched": unbatched}


def _step(F: Operator, total: Any, x: Any) -> tuple[Any, Any]:
    """One step of a loop: what a worker gives to the operator depends on what it got before."""
    y = F(F.coupled(x, total))
    return bent(total) + y, y


def _scan(step: Callable[[Any, Any], tuple[Any, Any]], x: Any, c: Any) -> tuple[Any, Any]:
    return lax.scan(step, jnp.zeros_like(c), x)


def _scan_grad(step: Callable[[Any, Any], tuple[Any, Any]], c: Any) -> Callable[[Any], Any]:
    def scalar(x: Any) -> Array:
        total, ys = _scan(step, x, c)
        return inner(c, total) + jnp.sum(c * bent(ys))

    return jax.grad(scalar)


def _while_loop(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
        return state[0] + 1, _step(F, state[1], x)[0]

    return {"y": lax.while_loop(lambda state: state[0] < n, body, (jnp.zeros_like(n), jnp.zeros_like(c)))[1]}


def _fori_loop(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    return _there_and_back(
        lambda x: lax.fori_loop(0, 3, lambda i, total: _step(F, total, x)[0], jnp.zeros_like(c)), x, c
    )


def _invariant(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    """An operator whose input is the same in every step: JAX takes out of a loop what depends on nothing in it."""

    def scalar(x: Any) -> Array:
        def step(total: Any, i: Array) -> tuple[Any, Any]:
            return bent(total) + F(x) * i, None

        return inner(c, lax.scan(step, jnp.zeros_like(c), jnp.arange(3.0))[0])

    return {"dx": jax.grad(scalar)(x), "dx recomputed": jax.grad(jax.checkpoint(scalar))(x)}


def _unused(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    """Results that nobody uses: in the program, and on the way back."""

    def scalar(x: Any) -> Array:
        def step(total: Any, x: Any) -> tuple[Any, Any]:
            F(bent(x))
            return _step(F, total, x)

        F(x)
        return inner(c, _scan(step, jax.tree.map(lambda a: jnp.stack([a, a]), x), c)[0])

    return {"dx": jax.grad(scalar)(x)}


def _cond(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    """One branch with its derivative, the other without."""

    def branches(x: Any, n: Array) -> Any:
        return lax.cond(n > 2, lambda x: F(bent(x)), lambda x: F(x) ** 2, x)

    return _there_and_back(lambda x: branches(x, n), x, c) | {"y other": branches(x, n - 1)}


def _switch(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    """The operator in two of three branches, one of them in a branch of its own."""

    def branches(x: Any, n: Array) -> Any:
        def again(x: Any) -> Any:
            return lax.cond(n > 1, lambda x: F(bent(x)), F, x)

        return lax.switch(n - 1, [lambda x: jnp.sin(F(x)), lambda x: jnp.zeros_like(c), again], x)

    return _there_and_back(lambda x: branches(x, n), x, c) | {"y other": branches(x, n - 2)}


def _while_with_derivative(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    """A while loop, which JAX doesn't differentiate, whose derivative is another one."""

    def times(first: Any, term: Callable[[], Any]) -> Any:
        return lax.fori_loop(0, n, lambda _, total: jax.tree.map(lambda a, b: bent(a) + b, total, term()), first)

    @jax.custom_vjp
    def repeated(x: Any) -> Any:
        return times(jnp.zeros_like(c), lambda: F(x))

    def adjoint(x: Any, dy: Any) -> tuple[Any]:
        return (times(jax.tree.map(jnp.zeros_like, x), lambda: jax.vjp(F, x)[1](dy)[0]),)

    repeated.defvjp(lambda x: (repeated(x), x), adjoint)
    return {"y": repeated(x), "dx": jax.grad(lambda x: inner(c, repeated(x)))(x)}


def _nested_scan(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    """A branch in a scan in a scan."""

    def nested(x: Any) -> Any:
        def inside(total: Any, i: Array) -> tuple[Any, None]:
            y = lax.cond(i > 0, F, lambda x: jnp.ones_like(c), F.coupled(x, total))
            return bent(total) + y, None

        def outside(total: Any, _: Array) -> tuple[Any, None]:
            return lax.scan(inside, bent(total), jnp.arange(2))[0], None

        return lax.scan(outside, jnp.zeros_like(c), jnp.arange(2))[0]

    return _there_and_back(nested, x, c)


def _reverse_over_reverse(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    def norm(x: Any) -> Array:
        gradient = jax.grad(loss(F, c))(x)
        return inner(gradient, gradient)

    return {"dx": jax.grad(norm)(x)}


def _derivatives(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    """Along a direction, transposed, and the Hessian times a vector."""
    u = jax.tree.map(jnp.cos, x)
    y, dy = F.derivatives.jvp(lambda x: bent(F(bent(x))), (x,), (u,))
    return {
        "y": y,
        "y along u": dy,
        "dx transposed": F.derivatives.linear_transpose(F, x)(c)[0],
        "dx hessian": F.derivatives.hvp(loss(F, c), (x,), (u,)),
    }


def _derivatives_of_derivatives(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    def along(x: Any) -> Any:
        return F.derivatives.jvp(lambda x: bent(F(bent(x))), (x,), (jax.tree.map(jnp.cos, x),))[1]

    u = jax.tree.map(jnp.sin, x)
    return {"y": F.derivatives.jvp(along, (x,), (u,))[1], "dx": jax.grad(lambda x: inner(c, along(x)))(x)}


def _derivatives_of_loops(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    """In both directions through a scan of checkpoints, for a batch."""

    def along(x: Any) -> Any:
        u = jax.tree.map(jnp.cos, x)
        gradient = _scan_grad(jax.checkpoint(partial(_step, F)), c)
        dy = F.derivatives.jvp(lambda x: _scan(partial(_step, F), x, c)[0], (x,), (u,))[1]
        return {"y": dy, "dx": F.derivatives.jvp(gradient, (x,), (u,))[1]}

    return jax.vmap(along)(x)


def _deepest(F: Operator, x: Any, c: Any, n: Array) -> dict[str, Any]:
    return {"dx": jax.vmap(_scan_grad(jax.checkpoint(partial(_step, F)), c))(x)}


TRANSFORMATIONS = {
    "eager": Transformation(lambda F, x, c, n: {"y": F(x)}),
    "jit": Transformation(lambda F, x, c, n: {"y": F(x)}),
    "jit of jit": Transformation(_two_calls),
    "grad": Transformation(lambda F, x, c, n: {"dx": jax.grad(loss(F, c))(x)}),
    "vmap": Transformation(_vmap, (3,)),
    "vmap of vmap": Transformation(lambda F, x, c, n: {"y": jax.vmap(jax.vmap(F))(x)}, (2, 3)),
    "vmap of grad": Transformation(lambda F, x, c, n: {"dx": jax.vmap(jax.grad(loss(F, c)))(x)}, (3,)),
    "grad of vmap": Transformation(
        lambda F, x, c, n: {"dx": jax.grad(lambda x: jnp.sum(c * bent(jax.vmap(F)(bent(x)))))(x)}, (3,)
    ),
    "checkpoint": Transformation(lambda F, x, c, n: {"dx": jax.grad(jax.checkpoint(loss(F, c)))(x)}),
    "scan": Transformation(lambda F, x, c, n: {"y": _scan(partial(_step, F), x, c)[1]}, (3,)),
    "grad of scan": Transformation(lambda F, x, c, n: {"dx": _scan_grad(partial(_step, F), c)(x)}, (3,)),
    "grad of scan of checkpoint": Transformation(
        lambda F, x, c, n: {"dx": _scan_grad(jax.checkpoint(partial(_step, F)), c)(x)}, (3,)
    ),
    "while_loop": Transformation(_while_loop),
    "fori_loop": Transformation(_fori_loop),
    "grad of scan of what does not change": Transformation(_invariant),
    "unused results": Transformation(_unused),
    "cond": Transformation(_cond),
    "switch": Transformation(_switch),
    "while_loop with a derivative": Transformation(_while_with_derivative),
    "nested scan": Transformation(_nested_scan),
    "reverse over reverse": Transformation(_reverse_over_reverse),
    "vmap of grad of scan of checkpoint": Transformation(_deepest, (2, 3)),
}

DERIVATIVES = {
    "derivatives": Transformation(_derivatives),
    "derivatives of derivatives": Transformation(_derivatives_of_derivatives),
    "vmap of derivatives of loops": Transformation(_derivatives_of_loops, (2, 3)),
}
"""Those along a direction: the first, and in a long run all."""

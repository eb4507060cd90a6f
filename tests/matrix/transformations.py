"""`TRANSFORMATIONS`: what a program may do with an operator, each a function of it.

The same function runs on every worker with the library's operator and that worker's arrays, and once in one process
with the reference on all workers' arrays, in tuples: `each` and `inner` take both. What is differentiated is in both the
sum over all workers. Arguments: the operator, its input, the weights c of its output, and the number 3, unknown to
the compiler. A result is a list of arrays or, in the reference, of tuples of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

Operator = Callable[[Any], Any]


class Transformation(NamedTuple):
    """`lead` are the dimensions that the operator's input has in front."""

    function: Callable[[Operator, Any, Any, Array], list[Any]]
    lead: tuple[int, ...] = ()


def each(function: Callable[..., Any], *trees: Any) -> Any:
    """`function` of one worker's arguments, or of every worker's."""
    return tuple(map(function, *trees)) if isinstance(trees[0], tuple) else function(*trees)


def inner(c: Any, y: Any) -> Array:
    """The inner product on this worker, or on all."""
    return sum((jnp.sum(a * b) for a, b in zip(jax.tree.leaves(c), jax.tree.leaves(y), strict=True)), jnp.zeros(()))


def sin(x: Any) -> Any:
    return jax.tree.map(jnp.sin, x)


def loss(F: Operator, c: Any) -> Callable[[Any], Array]:
    """Not linear before or behind the operator."""
    return lambda x: inner(c, sin(F(sin(x))))


def _two_calls(F: Operator, x: Any, c: Any, n: Array) -> list[Any]:
    G = jax.jit(F)
    return [jax.jit(lambda x: G(x))(x), G(sin(x))]


def _last_axis(F: Operator) -> Operator:
    def moved(x: Any, source: int, target: int) -> Any:
        return jax.tree.map(lambda a: jnp.moveaxis(a, source, target), x)

    return lambda x: moved(jax.vmap(F, in_axes=-1, out_axes=-1)(moved(x, 0, -1)), -1, 0)


def _vmap(F: Operator, x: Any, c: Any, n: Array) -> list[Any]:
    first = jax.tree.map(lambda a: a[0], x)
    unbatched = jax.vmap(lambda scale: jax.tree.map(lambda y: scale * y, F(first)))(jnp.arange(2.0))
    return [jax.vmap(F)(x), _last_axis(F)(x), unbatched]


def _step(F: Operator, total: Any, x: Any) -> tuple[Any, Any]:
    """One step of a loop: what a worker feeds to the operator depends on what it got before."""
    y = F(each(lambda x, total: jax.tree.map(lambda a: a * (1 + 0.1 * jnp.sum(total)), x), x, total))
    return each(lambda total, y: jnp.cos(total) + y, total, y), y


def _scan(F: Operator, x: Any, c: Any, n: Array) -> list[Any]:
    return list(lax.scan(lambda total, x: _step(F, total, x), jax.tree.map(jnp.zeros_like, c), x))


def _scan_loss(F: Operator, c: Any) -> Callable[[Any], Array]:
    def of(x: Any) -> Array:
        total, ys = _scan(F, x, c, jnp.zeros(()))
        return inner(c, total) + inner(c, sin(ys))

    return of


def _while_loop(F: Operator, x: Any, c: Any, n: Array) -> list[Any]:
    def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
        i, total = state
        return i + 1, _step(F, total, x)[0]

    return [lax.while_loop(lambda state: state[0] < n, body, (jnp.zeros_like(n), jax.tree.map(jnp.zeros_like, c)))[1]]


def _fori(F: Operator, x: Any, c: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, total: _step(F, total, x)[0], jax.tree.map(jnp.zeros_like, c))


def _fori_loop(F: Operator, x: Any, c: Any, n: Array) -> list[Any]:
    return [_fori(F, x, c), jax.grad(lambda x: inner(c, _fori(F, x, c)))(x)]


def _cond(F: Operator, x: Any, c: Any, n: Array) -> list[Any]:
    def branches(x: Any, n: Array) -> Any:
        return lax.cond(n > 2, lambda x: F(sin(x)), lambda x: jax.tree.map(jnp.cos, F(x)), x)

    return [branches(x, n), jax.grad(lambda x: inner(c, branches(x, n)))(x), branches(x, n - 1)]


def _reverse_over_reverse(F: Operator, x: Any, c: Any, n: Array) -> list[Any]:
    def norm(x: Any) -> Array:
        gradient = jax.grad(loss(F, c))(x)
        return inner(gradient, gradient)

    return [jax.grad(norm)(x)]


TRANSFORMATIONS = {
    "eager": Transformation(lambda F, x, c, n: [F(x)]),
    "jit": Transformation(lambda F, x, c, n: [F(x)]),
    "jit of jit": Transformation(_two_calls),
    "grad": Transformation(lambda F, x, c, n: [jax.grad(loss(F, c))(x)]),
    "vmap": Transformation(_vmap, (3,)),
    "vmap of vmap": Transformation(lambda F, x, c, n: [jax.vmap(jax.vmap(F))(x)], (2, 3)),
    "vmap of grad": Transformation(lambda F, x, c, n: [jax.vmap(jax.grad(loss(F, c)))(x)], (3,)),
    "grad of vmap": Transformation(lambda F, x, c, n: [jax.grad(loss(jax.vmap(F), c))(x)], (3,)),
    "checkpoint": Transformation(lambda F, x, c, n: [jax.grad(jax.checkpoint(loss(F, c)))(x)]),
    "scan": Transformation(_scan, (3,)),
    "grad of scan": Transformation(lambda F, x, c, n: [jax.grad(_scan_loss(F, c))(x)], (3,)),
    "grad of scan of checkpoint": Transformation(
        lambda F, x, c, n: [jax.grad(_scan_loss(jax.checkpoint(F), c))(x)], (3,)
    ),
    "while_loop": Transformation(_while_loop),
    "fori_loop": Transformation(_fori_loop),
    "cond": Transformation(_cond),
    "reverse over reverse": Transformation(_reverse_over_reverse),
    "vmap of grad of scan of checkpoint": Transformation(
        lambda F, x, c, n: [jax.vmap(jax.grad(_scan_loss(jax.checkpoint(F), c)))(x)], (2, 3)
    ),
}

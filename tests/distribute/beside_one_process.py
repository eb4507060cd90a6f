"""A network on blocks, beside one process: the loss, its gradients inside and outside, and steps of Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distdl_jax as dj
from distdl_jax import TensorSpec


class Network(NamedTuple):
    """A function of parameters and an array, with drawn parameters, the array's shape, and the grids that cut it."""

    f: Callable[[Any, Any], Any]
    params: Any
    shape: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]


NETWORKS: dict[str, Callable[[], Network]] = {}


def network(build: Callable[[], Network]) -> Callable[[], Network]:
    """Register a network."""
    NETWORKS[build.__name__] = build
    return build


def problem(net: Network, grid: tuple[int, ...], gather: int | None = 2**20, steps: int = 3) -> str | None:
    """Return how the network differs from that of one process; None if it doesn't."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=net.shape))

    def loss(p: Any, x: Any) -> Any:
        y = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(net.f(p, x))])
        return jnp.mean((y - jnp.cos(jnp.arange(y.size))) ** 2)

    optimizer = optax.adam(1e-2, eps=1e-3)

    def step(p: Any, state: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(p, x)
        updates, state = optimizer.update(gradient, state, p)
        return optax.apply_updates(p, updates), state, value

    of_both = jax.jit(jax.value_and_grad(loss, (0, 1)))(net.params, x)
    trained = [net.params, optimizer.init(net.params)]
    for _ in range(steps):
        *trained, last = jax.jit(step)(*trained, x)

    def program() -> str | None:
        spec = TensorSpec(net.shape, dj.Partition().grid(grid))
        block = spec.block(x)
        expected = of_both[0], (of_both[1][0], spec.block(of_both[1][1]))
        inside = dj.distribute(jax.value_and_grad(loss, (0, 1)), (None, spec), (None, (None, spec)), gather=gather)
        outside = dj.value_and_grad(dj.distribute(loss, (dj.VARIABLE, spec), dj.PARTS, gather=gather), (0, 1))
        found: list[Any] = [net.params, optimizer.init(net.params)]
        for way, f in (("inside", inside), ("outside", outside)):
            if text := _difference(jax.jit(f)(net.params, block), expected):
                return f"{way}: {text}"
        run = jax.jit(dj.distribute(step, (None, None, spec), gather=gather))
        for _ in range(steps):
            *found, value = run(*found, block)
        text = _difference([found, value], [trained, last]) if steps else None
        return text and f"after {steps} steps: {text}"

    return next((text for text in dj.simulate(int(np.prod(grid)), program) if text), None)


def _difference(found: Any, expected: Any) -> str | None:
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        error = np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0) if np.shape(a) == np.shape(b) else np.inf
        if not error <= 1e-10 * max(1, np.max(np.abs(b), initial=0)):
            return f"{jax.tree_util.keystr(path)}: {error:.1e}"
    return None

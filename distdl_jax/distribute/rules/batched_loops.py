"""A loop under `jax.vmap`, whose predicate has a value for each element: those that are done keep theirs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from distdl_jax.distribute.interpreter import Site
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.tracing.jaxprs import While


def elementwise_loop(site: Site, loop: While, xs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the results of a loop that goes on as long as it does for any element."""
    first, second = loop.condition_constants, loop.condition_constants + loop.body_constants
    condition, body = jaxpr_as_fun(loop.condition), jaxpr_as_fun(loop.body)

    def plain(*args: Any) -> Any:
        def goes_on(carry: Any) -> Any:
            return condition(*args[:first], *carry)[0]

        def kept(done: Any, new: Any, old: Any) -> Any:
            return jnp.where(lax.broadcast_in_dim(done, new.shape, range(done.ndim)), new, old)

        def step(carry: Any) -> Any:
            return [
                kept(goes_on(carry), new, old)
                for new, old in zip(body(*args[first:second], *carry), carry, strict=True)
            ]

        return lax.while_loop(lambda carry: goes_on(carry).any(), step, list(args[second:]))

    closed = jax.make_jaxpr(plain)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs))
    return site.run.evaluate(closed.jaxpr, closed.consts, xs, site.wanted)

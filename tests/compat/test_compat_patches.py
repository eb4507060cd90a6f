"""The patches of JAX that concern derivatives."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify
from private_parts import what_breaks

from distdl_jax import jax_patches


@what_breaks(jax_patches.count_constants_among_residuals)
def test_residuals_of_second_derivatives_through_a_loop() -> None:
    """The function has a constant of its own, of the shape of its arguments."""
    jax_patches.install_jax_patches()

    @jax.custom_vjp
    def f(x: Any, y: Any) -> Any:
        return jnp.sin(x * y + jnp.arange(3.0))

    def forward(x: Any, y: Any) -> Any:
        return f(x, y), (x, y)

    def backward(residuals: Any, dz: Any) -> Any:
        x, y = residuals
        scaled = dz * jnp.cos(x * y + jnp.arange(3.0))
        return scaled * y, scaled * x

    f.defvjp(forward, backward)

    def in_a_loop(x: Any) -> Any:
        return jnp.sum(lax.scan(lambda x, _: (f(x, jnp.cos(x)), None), x, length=2)[0])

    def without(x: Any) -> Any:
        return jnp.sum(f(f(x, jnp.cos(x)), jnp.cos(f(x, jnp.cos(x)))))

    x = jnp.arange(1.0, 4.0)
    got, want = (jax.jit(jax.grad(lambda x, g=g: jnp.sum(jax.grad(g)(x) ** 2)))(x) for g in (in_a_loop, without))
    np.testing.assert_allclose(got, want, 1e-12)


@what_breaks(jax_patches.count_constants_among_residuals)
def test_residuals_of_a_function_that_is_checked() -> None:
    """An error may be found before it: its two numbers go in front of the arguments."""
    jax_patches.install_jax_patches()

    @jax.custom_vjp
    def product(x: Any, y: Any) -> Any:
        return x * y

    product.defvjp(lambda x, y: (product(x, y), (x, y)), lambda residuals, dz: (dz * residuals[1], dz * residuals[0]))

    def f(x: Any, y: Any) -> Any:
        return product(jnp.tanh(x), y)

    def checked(x: Any, y: Any) -> Any:
        return checkify.checkify(f, errors=checkify.float_checks)(x, y)[1]

    got, want = (jax.grad(g, argnums=(0, 1))(2.0, 3.0) for g in (checked, f))
    np.testing.assert_allclose(got, want, 1e-6)

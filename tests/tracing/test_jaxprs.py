"""The reader of traced programs knows what JAX makes of loops, branches, calls and custom derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap

from distdl_jax.jax_compat import bound_again
from distdl_jax.tracing.jaxprs import Branches, Call, DataFlow, Scan, While, equations, evaluate, structure

X, FACTOR = np.arange(1.0, 4.0), np.array([2.0, 3.0, 5.0])


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy * jnp.cos(x),))


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    return jnp.sin(x)


with_jvp.defjvps(lambda dx, y, x: dx * jnp.cos(x))


@custom_vmap
def with_vmap(x: Any) -> Any:
    return jnp.sin(x)


with_vmap.def_vmap(lambda size, in_batched, x: (jnp.sin(x), True))


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "scan": (lambda x, f: lax.scan(lambda c, y: (c + jnp.sin(f * y), c), x, jnp.stack([x, x]))[0], Scan),
    "while": (lambda x, f: lax.while_loop(lambda c: c[0] < 9.0, lambda c: jnp.sin(c) + f + c, x), While),
    "cond": (lambda x, f: lax.cond(x[0] > 2, lambda x: jnp.sin(x), lambda x: jnp.sin(f * x), x), Branches),
    "jit": (lambda x, f: jax.jit(lambda x: jnp.sin(f * x))(x), "jit"),
    "checkpoint": (lambda x, f: jax.checkpoint(lambda x: jnp.sin(f * x))(x), "checkpoint"),
    "custom_vjp": (lambda x, f: with_vjp(f * x), "custom"),
    "custom_jvp": (lambda x, f: with_jvp(f * x), "custom"),
    "custom_vmap": (lambda x, f: with_vmap(f * x), "custom"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_jax_makes_of_it_is_known(name: str) -> None:
    fun, kind = PROGRAMS[name]
    program = jax.make_jaxpr(fun)(X, FACTOR)
    found = [part for part in map(structure, program.jaxpr.eqns) if part is not None]
    assert any(part.kind == kind if isinstance(part, Call) else type(part) is kind for part in found)
    assert "sin" in {eqn.primitive.name for eqn in equations(program.jaxpr.eqns)}
    assert "sin" not in {eqn.primitive.name for eqn in equations(program.jaxpr.eqns, enter=lambda eqn: False)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_evaluation_gives_what_the_program_gives(name: str) -> None:
    """Equation by equation, and inside calls, whose arguments are those of their bodies."""

    def rule(eqn: Any, args: list[Any]) -> Any:
        part = structure(eqn)
        return evaluate(part.body, args, rule) if isinstance(part, Call) else bound_again(eqn, args)

    fun, _ = PROGRAMS[name]
    (result,) = evaluate(jax.make_jaxpr(fun)(X, FACTOR), [X, FACTOR], rule)
    np.testing.assert_allclose(result, fun(X, FACTOR))


class Arguments(DataFlow[frozenset[str]]):
    """The arguments that a value depends on."""

    of_literals = of_constants = frozenset[str]()
    unknown = frozenset(["?"])

    def equation(self, eqn: Any, args: list[frozenset[str]]) -> list[frozenset[str]]:
        found = self.through_bodies(eqn, args)
        return [frozenset().union(*args)] * len(eqn.outvars) if found is None else found

    def join(self, one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
        return one | other


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_facts_go_through_bodies(around: Any) -> None:
    """A scan hands what it carries from place to place; only a second pass shows where the first argument comes to."""

    def fun(x: Any, y: Any, z: Any) -> Any:
        def step(c: Any, _: None) -> Any:
            first, second, third = c
            return (first, first + second, second + third), None

        carried, _ = lax.scan(step, (x, y, 0.0), None, length=3)
        return *carried, lax.cond(True, lambda y: (y, z), lambda y: (z, z), y)[0]

    program = jax.make_jaxpr(around(fun))(1.0, 2.0, 3.0)
    facts = Arguments().run(program.jaxpr, [frozenset([name]) for name in "xyz"])
    assert [sorted(fact) for fact in facts] == [["x"], ["x", "y"], ["x", "y"], ["y", "z"]]

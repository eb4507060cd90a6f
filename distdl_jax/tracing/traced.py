"""A traced function: its program, which can be read and evaluated again, without its Python code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from distdl_jax.jax_compat import is_transformed
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.known_values import know_same

T = TypeVar("T")


class Traced:
    """`fun(*args, **kwargs)`, traced as a function of the positional arguments at `places`.

    `fun` is called once. Its result may contain anything: leaves that don't depend on JAX's values are unchanged.

    - `as_call`: in a trace, whether the program becomes one call, which costs nothing when traced again.
    - `places`: the positions of the arguments whose leaves the program takes.
    - `program`: from the leaves of these arguments to the JAX leaves of the result.
    """

    places: Sequence[int]
    program: ClosedJaxpr

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        places: Sequence[int],
        as_call: bool = False,
    ) -> None:
        self.places = places
        leaves, structure = jax.tree.flatten([args[place] for place in places])

        def flat(*traced: Any) -> list[Any]:
            values = list(args)
            for leaf, tracer in zip(leaves, traced, strict=True):
                know_same(leaf, tracer)
            for place, value in zip(places, jax.tree.unflatten(structure, traced), strict=True):
                values[place] = value
            # JAX sets the mesh, even if there is none, for an equation that it evaluates again. If it is set from the
            # start, everything traced here (movements, functions under jit) is found there, and not traced twice.
            with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
                results, self._structure = jax.tree.flatten(fun(*values, **kwargs))
            self._constants = [None if isinstance(leaf, Tracer) else [leaf] for leaf in results]
            return [leaf for leaf in results if isinstance(leaf, Tracer)]

        # Evaluated eagerly, a movement that is one call is compiled once; its parts would each be compiled every time.
        eagerly = not isinstance(jax.numpy.zeros(()), Tracer)
        values = {} if trace_context.values is None else trace_context.values
        with trace_context.set(movements_as_calls=eagerly, values=values):
            self.program = jax.make_jaxpr(jax.jit(flat) if as_call and not eagerly else flat)(*leaves)

    def leaves(self, args: Sequence[Any]) -> list[Any]:
        """Return the leaves of the arguments at `places`, the inputs of the program."""
        return jax.tree.leaves([args[place] for place in self.places])

    @property
    def first_is_traced(self) -> bool:
        """Whether the first leaf of the result is the program's first result, and not a constant."""
        return bool(self._constants) and self._constants[0] is None

    def result(self, values: Sequence[Any]) -> Any:
        """Return the result of `fun`, with the program's `values` in place of the traced leaves."""
        rest = iter(values)
        return jax.tree.unflatten(
            self._structure, [next(rest) if constant is None else constant[0] for constant in self._constants]
        )


def one_program(static_argnums: tuple[int, ...]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that compiles a function as a whole when it is called eagerly.

    Within another program or a derivative the function is called directly.
    """

    def decorate(fun: Callable[..., T]) -> Callable[..., T]:
        compiled: Any = jax.jit(fun, static_argnums=static_argnums)

        @wraps(fun)
        def call(*args: Any) -> T:
            result: T = fun(*args) if is_transformed() else compiled(*args)
            return result

        return call

    return decorate

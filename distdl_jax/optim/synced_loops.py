"""Loops that all workers leave after the same pass, though each decides for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from distdl_jax.partition import Partition
from distdl_jax.primitives import all_sum_reduce

_LOOPS_AND_BRANCHES = ("while", "scan", "cond")


def in_step(fun: Callable[..., Any], workers: Partition) -> Callable[..., Any]:
    """`fun`, in which the scalars that a while loop carries are the first worker's after each pass.

    What workers work out alike from equal numbers may still differ in the last bit, since XLA compiles each worker's
    program for itself, and rounds sums of products once or twice. One worker would then stop, and the others wait.
    """

    def stepped(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = _Evaluation(workers).run(program.jaxpr, program.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return stepped


class _Evaluation:
    """Evaluates a traced program with such loops."""

    def __init__(self, workers: Partition) -> None:
        self._workers = workers

    def run(self, program: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip([*program.constvars, *program.invars], [*consts, *args], strict=True))
        for equation in program.eqns:
            operands = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
            values.update(zip(equation.outvars, self._equation(equation, operands), strict=True))
        return [v.val if isinstance(v, Literal) else values[v] for v in program.outvars]

    def _equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "while":
            return self._loop(params, operands)
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if isinstance(inner, ClosedJaxpr) and name not in _LOOPS_AND_BRANCHES:
            return self.run(inner.jaxpr, inner.consts, operands)
        results = equation.primitive.bind(*operands, **params)
        return results if equation.primitive.multiple_results else [results]

    def _loop(self, params: dict[str, Any], operands: list[Any]) -> Sequence[Any]:
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_condition, of_body, carried = operands[:first], operands[first:second], operands[second:]
        condition, body = jaxpr_as_fun(params["cond_jaxpr"]), jaxpr_as_fun(params["body_jaxpr"])
        return lax.while_loop(
            lambda carried: condition(*of_condition, *carried)[0],
            lambda carried: self._agreed(body(*of_body, *carried)),
            self._agreed(carried),
        )

    def _agreed(self, carried: Sequence[Any]) -> list[Array]:
        """The same with the first worker's scalars, in one message."""
        arrays = [jnp.asarray(x) for x in carried]
        scalars = [x for x in arrays if x.ndim == 0]
        if self._workers.size < 2 or not self._workers.active or not scalars:
            return arrays
        mine = jnp.stack([x.astype(float) for x in scalars])
        told = all_sum_reduce(jnp.where(self._workers.rank == 0, mine, 0), self._workers, axes_keep=())
        agreed = iter(told)
        return [next(agreed).astype(x.dtype) if x.ndim == 0 else x for x in arrays]

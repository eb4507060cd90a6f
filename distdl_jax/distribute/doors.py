"""Derivatives from outside of a distributed function: refused, or summed over the copies of variables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from distdl_jax.distribute.movements import Movements
from distdl_jax.errors import PlanError
from distdl_jax.functional.block_checks import is_differentiable
from distdl_jax.partitions.tensors import TensorSpec


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def undifferentiated(sentence: str, x: Any) -> Any:
    """Return `x`; a derivative through it from outside is an error, `sentence`."""
    return x


def _forward(sentence: str, x: Any) -> tuple[Any, None]:
    return undifferentiated(sentence, x.value), None


def _backward(sentence: str, _: None, dy: Any) -> tuple[Any]:
    if isinstance(dy, SymbolicZero):
        return (None,)
    raise PlanError(sentence)


undifferentiated.defvjp(_forward, _backward, symbolic_zeros=True)


def is_floating(x: Any) -> bool:
    """Say whether an array has derivatives."""
    dtype = jax.typeof(x).dtype
    return isinstance(dtype, np.dtype) and is_differentiable(dtype)


def variables(movements: Movements, axes_of: Sequence[frozenset[int]], xs: Sequence[Any]) -> list[Any]:
    """Return copies of variables, whose gradients are summed over the workers along their axes.

    All gradients with equal axes and dtype are summed in one movement.
    """

    @jax.custom_vjp
    def copies(*xs: Any) -> Any:
        return xs

    def forward(*xs: Any) -> tuple[Any, None]:
        # Of copies again, so that in a derivative of this one their derivatives are summed likewise.
        return copies(*(x.value for x in xs)), None

    def backward(_: None, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        found: list[Any] = [None] * len(cotangents)
        kinds: dict[Any, list[int]] = {}
        for n, (dy, axes) in enumerate(zip(cotangents, axes_of, strict=True)):
            if not isinstance(dy, SymbolicZero):
                kinds.setdefault((axes, np.dtype(dy.dtype)), []).append(n)
        movements.asked_by = "", "gradients of variables"
        for (axes, _), numbers in kinds.items():
            sums = movements.gradients_of_copies([cotangents[n] for n in numbers], axes)
            for n, total in zip(numbers, sums, strict=True):
                found[n] = total
        return tuple(found)

    copies.defvjp(forward, backward, symbolic_zeros=True)
    return list(copies(*map(jnp.asarray, xs)))


CLOSED_OVER = (
    "A derivative is taken from outside of a distributed function, by a value ({}) that it closes over, of which all "
    "workers have copies. Make it an argument, with dj.VARIABLE or dj.COPIES in `in_specs`, or take the derivative "
    "inside."
)


def by_argument(path: str, spec: TensorSpec | None) -> str:
    """Return the sentence on a derivative by an argument of which workers have copies."""
    words = "dj.VARIABLE" if spec is None else "dj.VARIABLE(spec)"
    other = "dj.COPIES" if spec is None else "dj.COPIES(spec)"
    return (
        f"A derivative is taken from outside of a distributed function, by `{path}`, of which workers have copies: it "
        f"is unclear what they mean. Take the derivative inside of the function, or give the argument {words} in "
        f"`in_specs` (one variable, such as a parameter: the sum over the copies), or {other} (a value computed from "
        "other workers' data: each copy's own term)."
    )

"""JAX's rules for a `lax.while_loop`, corrected for loops that move data.

JAX has no adjoint of a while loop. Where no derivative depends on the loop (behind a `lax.stop_gradient`, in a
comparison), it needs none: JAX drops the loop of the tangents. But a loop whose operations have an effect, as messages
do, it does not drop, and refuses it. And `jax.checkpoint` fails at an effect with a result in a loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from distdl_jax.errors import InvalidTypeError

_own: list[tuple[dict[Any, Any], Any]] = []
"""JAX's rules that are replaced: their registry, and the rule."""

_installing = threading.Lock()


def install_loop_rules() -> None:
    """Replace two of JAX's rules, if they are its own; loops without effects go by JAX's rules as before."""
    with _installing:  # workers of dj.simulate are threads
        if not _own:
            _replace(ad.primitive_transposes, _transposed)
            _replace(pe.partial_eval_jaxpr_custom_rules, _checkpointed)


def remove_loop_rules() -> None:
    """Put JAX's own rules back."""
    while _own:
        rules, own = _own.pop()
        rules[lax.while_p] = own


def _replace(rules: dict[Any, Any], make: Any) -> None:
    own = rules[lax.while_p]
    _own.append((rules, own))
    rules[lax.while_p] = make(own)


def _transposed(refuse: Any) -> Any:
    def rule(cotangents: Sequence[Any], *args: Any, **params: Any) -> Any:
        if all(type(cotangent) is ad.Zero for cotangent in cotangents):
            return [ad.Zero(arg.aval) if ad.is_undefined_primal(arg) else None for arg in args]
        return refuse(cotangents, *args, **params)

    return rule


def _checkpointed(without_effects: Any) -> Any:
    def rule(saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any) -> Any:
        if not eqn.effects:
            return without_effects(saveable, unknown, instantiated, eqn)
        if any(unknown):
            raise InvalidTypeError(
                "In jax.checkpoint, a lax.while_loop that moves data must not be differentiated: put "
                "jax.lax.stop_gradient on what goes into it, or the loop outside of jax.checkpoint."
            )
        # As JAX's rule for single operations with effects: it runs once, and its results are saved.
        return eqn, None, [False] * len(eqn.outvars), [False] * len(eqn.outvars), []

    return rule

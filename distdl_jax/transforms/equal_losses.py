"""Whether the workers' losses are parts of one, or copies of one that count once for each: found by their values.

With `DISTDL_JAX_DEBUG=1` each call compares them, in the program. Otherwise the first call of a `dj.jit`ted function
does: its losses are results that the caller doesn't see, and are compared when the program has run. A loss in the body
of a loop, or of another jitted function, can't be such a result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import isfinite
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state

from distdl_jax.errors import CopiesWarning
from distdl_jax.functional.all_sum_reduce import AllSum
from distdl_jax.functional.movement import move
from distdl_jax.partitions.partition import Partition
from distdl_jax.settings import current_settings
from distdl_jax.source_lines import user_warning
from distdl_jax.tracing.context import LossesOfTrace, trace_context
from distdl_jax.tracing.jaxprs import DataFlow
from distdl_jax.tracing.marks import is_part_of_sum, is_start_of_movement
from distdl_jax.tracing.traced import Traced
from distdl_jax.transports.agreement import agree
from distdl_jax.watchdog.watch.deadlock import workers_text


@dataclass(frozen=True, eq=False)
class _Loss:
    """A traced loss: the name of its function, its workers, its program, and a function that warns at its line."""

    name: str
    workers: Partition
    traced: Traced
    warn: Callable[[str], None]

    def compare(self, value: Array) -> None:
        """Warn on the first worker if the workers' values are copies. Collective in `workers`."""
        world, team = self.workers.world, self.workers.ranks
        values = agree(world, team, f"the values of {self.name}", lambda: float(value))
        if not copies_among(values):
            return
        parts = agree(world, team, f"what the values of {self.name} are", lambda: _is_part(self.traced))
        if not any(parts.values()):
            self.warn_if_copies(values)

    def warn_if_copies(self, values: Mapping[int, float]) -> None:
        """Warn on the first worker if the values, by world rank, are copies."""
        copies = copies_among(values)
        if copies and self.workers.world.rank == self.workers.ranks[0]:
            self.warn(
                f"{self.name} returns the same loss, to the last bit, on {workers_text(copies)}. The workers' losses "
                "are added up, so the value counts once for each of them, and so does its gradient. Return this "
                "worker's part, from before a sum over the workers; or dj.part(loss, P), which divides a value that "
                "all workers of P hold by their number, in place of a division of your own. If it is intended, "
                "warnings.simplefilter('ignore', dj.CopiesWarning) turns this off."
            )


def note_loss(name: str, value: Array, workers: Partition, traced: Traced | None) -> None:
    """Compare this worker's loss with those of the others when it is known: in each call, or in the first one.

    Collective in `workers`. `traced`: the loss function; None if it can't be traced.
    """
    here = trace_context.losses
    if workers.size == 1 or not workers.active or traced is None or not (here or current_settings().debug):
        return
    is_real = jnp.issubdtype(jnp.result_type(value), jnp.floating)
    loss = _Loss(name, workers, traced, user_warning(CopiesWarning))
    if current_settings().debug:
        mine = (is_real, _is_part(traced))
        kinds = agree(workers.world, workers.ranks, f"the loss of {name}", lambda: mine)
        if all(is_real and not is_part for is_real, is_part in kinds.values()):
            _compare_in_program(loss, value)
    elif here is not None:
        is_result = is_real and here.trace == get_opaque_trace_state()
        if all(agree(workers.world, workers.ranks, f"the loss of {name}", lambda: is_result).values()):
            here.found.append((loss, value))


def _compare_in_program(loss: _Loss, value: Array) -> None:
    """Share the values in an all-sum-reduction of 64 bits a worker, and compare them as the program runs."""
    team = loss.workers.ranks
    x = jnp.asarray(lax.stop_gradient(value))
    words = lax.bitcast_convert_type(x if x.dtype.itemsize > 4 else x.astype(np.float32), np.uint32).ravel()
    own = jnp.zeros((len(team), 2), np.uint32).at[team.index(loss.workers.world.rank), : words.size].set(words)
    rows = move(loss.workers.world, AllSum(team, differentiable=False), own)

    def compare(is_wide: bool, rows: Any) -> None:
        table = np.asarray(rows)
        values = table.view(np.float64)[:, 0] if is_wide else np.ascontiguousarray(table[:, 0]).view(np.float32)
        loss.warn_if_copies(dict(zip(team, values.tolist(), strict=True)))

    jax.debug.callback(partial(compare, words.size > 1), rows)


def copies_among(values: Mapping[int, float]) -> tuple[int, ...]:
    """Return the workers, ascending, with a loss other than 0, if each of these losses is another worker's, too.

    A 0 is that of a worker without data. NaN, and infinities, tell nothing.

    >>> copies_among({0: 2.5, 1: 2.5, 2: 0.0}), copies_among({0: 2.5, 1: 2.5, 2: 1.0})
    ((0, 1), ())
    """
    counts = Counter(value for value in values.values() if value != 0)
    if not counts or min(counts.values()) == 1 or not all(map(isfinite, values.values())):
        return ()
    return tuple(sorted(worker for worker, value in values.items() if value != 0))


def _is_part(traced: Traced) -> bool:
    """Return whether a loss is computed from a part of a sum, a result of `dj.part` or of a loss of `distdl_jax.nn`."""
    jaxpr: Any = traced.program.jaxpr
    return traced.first_is_traced and _Parts().run(jaxpr, [False] * len(jaxpr.invars))[0]


class _Parts(DataFlow[bool]):
    """Whether a value is computed from a part of a sum: without a movement in between, which may have summed it."""

    of_literals = of_constants = unknown = False

    def equation(self, eqn: Any, args: list[bool]) -> list[bool]:
        is_part = is_part_of_sum(eqn) or (any(args) and not is_start_of_movement(eqn))
        return self.through_bodies(eqn, args) or [is_part] * len(eqn.outvars)

    def join(self, one: bool, other: bool) -> bool:
        return one or other


# --- losses as results that the caller doesn't see --------------------------------------------------------------------


class WithLosses:
    """The result of a function, with the losses in it: a pytree in which the result has the paths that it has alone."""

    def __init__(self, result: Any, values: Any, losses: Sequence[_Loss]) -> None:
        self.result, self.values, self.losses = result, values, tuple(losses)

    def compare(self) -> None:
        """Warn of losses that count more than once; collective among the workers of each."""
        for loss, value in zip(self.losses, self.values, strict=True):
            loss.compare(value)


class _NoKey:
    def __str__(self) -> str:
        return ""


def _flattened(x: WithLosses) -> tuple[tuple[tuple[Any, Any], ...], tuple[_Loss, ...]]:
    return ((_NoKey(), x.result), (_NoKey(), x.values)), x.losses


def _unflattened(losses: tuple[_Loss, ...], children: Any) -> WithLosses:
    result, values = children
    return WithLosses(result, values, losses)


jax.tree_util.register_pytree_with_keys(WithLosses, _flattened, _unflattened)


def returning_losses(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, to be traced, with the result of `fun`, and its losses, if it has any."""

    @wraps(fun)
    def traced(*args: Any, **kwargs: Any) -> Any:
        here = LossesOfTrace(get_opaque_trace_state(), [])
        with trace_context.set(losses=here):
            result = fun(*args, **kwargs)
        if not here.found:
            return result
        losses, values = zip(*here.found, strict=True)
        return WithLosses(result, values, losses)

    return traced


def without_losses(result: Any) -> Any:
    """Return the result of a function alone."""
    return result.result if isinstance(result, WithLosses) else result

"""What was agreed on while a function was traced, to be taken as it was when one worker traces the function again.

A worker whose caches were cleared traces alone what all have agreed on before. Nobody will meet it; nor need they, for
its arguments are as they were then.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from distdl_jax.errors import PlanError

MOST_SIGNATURES = 64
"""Of how many signatures of one function the agreements are kept."""


class OthersArePast(BaseException):
    """Raised in the wait for an agreement that the others have made before, and will not make again."""


class Agreed(NamedTuple):
    """One agreement: of which workers, for what, what this one said, and what was decided (pickled)."""

    team: tuple[int, ...]
    purpose: str
    contribution: Any
    decision: bytes


@dataclass
class Agreements:
    """Those of one trace.

    - `before`: those of an earlier trace of the same signature, if there was one.
    - `alone`: whether the others are known to be past: then these are taken.
    """

    before: tuple[Agreed, ...] | None = None
    alone: bool = False
    made: list[Agreed] = field(default_factory=list)

    def agree(
        self,
        team: tuple[int, ...],
        purpose: str,
        contribution: Any,
        meet: Callable[[], Any],
        fail: Callable[[str], Any],
    ) -> Any:
        """What is decided, by `meet`, or as before; `fail` where this worker now says something else."""
        if not self.alone:
            try:
                decision = meet()
                self.made.append(Agreed(team, purpose, contribution, pickle.dumps(decision)))
                return decision
            except OthersArePast:
                self.alone = True
        earlier = self.before[len(self.made)] if self.before and len(self.made) < len(self.before) else None
        if earlier is None or earlier[:3] != (team, purpose, contribution):
            fail(
                f"A worker traces a function anew, at {purpose}, with arguments as before, but what it communicates "
                "has changed, and the others are past that call. What a function takes from outside its arguments must "
                "change on all workers at once."
            )
            raise PlanError(purpose)
        self.made.append(earlier)
        return pickle.loads(earlier.decision)


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """What a trace depends on: structure, shapes and dtypes, and arguments that are no arrays; None where that can't be
    compared."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    parts = tuple(_part(leaf) for leaf in leaves)
    try:
        hash(parts)
    except TypeError:
        return None
    return structure, parts


def _part(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        aval = jax.typeof(leaf)
        return aval.shape, str(aval.dtype), aval.weak_type
    return leaf

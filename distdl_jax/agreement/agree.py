"""The one agreement: every worker contributes, the first decides, and where one raises, all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from distdl_jax.errors import DistDLError
from distdl_jax.idle_workers import say_who_is_idle
from distdl_jax.world import Workers, World

T = TypeVar("T")


class _Failed(NamedTuple):
    """The decision of a team of which a worker raised."""

    worker: int
    error: DistDLError


def agree(
    world: World,
    team: Workers,
    label: str,
    contribute: Callable[[], T],
    decide: Callable[[dict[int, T]], Any] = dict,
) -> Any:
    """Return what the first worker of `team` decides on all contributions, by world rank; default: all of them.

    Collective in `team` (world ranks, in the same order on all workers), for use while tracing. `label` says what the
    agreement is for, in the same words on all workers. Where `contribute` raises a `DistDLError` on some worker, all
    workers of the team raise it, so that none waits for ever. `decide` must not raise.
    """
    say_who_is_idle(world)
    mine: T | DistDLError
    try:
        mine = contribute()
    except DistDLError as error:
        mine = error

    def decide_unless_failed(contributions: dict[int, Any]) -> Any:
        failures = (_Failed(w, contributions[w]) for w in team if isinstance(contributions[w], DistDLError))
        return next(failures, None) or decide(contributions)

    decision = (
        world.agree(team, label, mine, decide_unless_failed)
        if len(team) > 1
        else decide_unless_failed({world.rank: mine})
    )
    if isinstance(decision, _Failed):
        worker, failure = decision
        raise failure if worker == world.rank else type(failure)(f"On worker {worker}: {failure}")
    return decision

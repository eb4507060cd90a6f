"""The one agreement: every worker contributes, the first decides, and where one raises, all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from distdl_jax.errors import DistDLError, PlanError
from distdl_jax.tracing.world import Workers, World
from distdl_jax.transports.agreement.arguments import calls, differing_calls
from distdl_jax.transports.idle_workers import say_who_is_idle

T = TypeVar("T")


class _Failed(NamedTuple):
    """The decision of a team of which a worker raised; of no worker, where their programs differ."""

    worker: int | None
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
    workers of the team raise it, so that none waits for ever; and a `PlanError` where the functions that they are in
    got other plain arguments. `decide` must not raise.
    """
    if world.records:
        return world.known(label, contribute())  # type: ignore[attr-defined]
    say_who_is_idle(world)
    mine: T | DistDLError
    try:
        mine = contribute()
    except DistDLError as error:
        mine = error

    def decide_unless_failed(contributions: dict[int, Any]) -> Any:
        values = {worker: value for worker, (value, _) in contributions.items()}
        failures = (_Failed(w, values[w]) for w in team if isinstance(values[w], DistDLError))
        if failed := next(failures, None):
            return failed
        difference = differing_calls({worker: calls for worker, (_, calls) in contributions.items()})
        return _Failed(None, PlanError(difference)) if difference else decide(values)

    contribution = mine, calls()
    decision = (
        world.agree(team, label, contribution, decide_unless_failed)
        if len(team) > 1
        else decide_unless_failed({world.rank: contribution})
    )
    if isinstance(decision, _Failed):
        worker, failure = decision
        raise failure if worker in (world.rank, None) else type(failure)(f"On worker {worker}: {failure}")
    return decision

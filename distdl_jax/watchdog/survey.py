"""The survey: what goes on beyond one world, asked from world to world through the workers that belong to several.

Who waits in one world may wait for a worker that waits in another one, for somebody who compiles. So before a clock
ends the job, its coordinator asks, beyond its own world, what each worker does and how long it has compiled. The
question spreads as an echo: whoever is asked for the first time asks on, and answers once all whom it has asked have
answered; asked again, it answers at once. So whoever began knows, in the end, of all who can be reached, as they were
after it had begun. Where somebody has been silent for half of the limit, what is known by then goes on beforehand, so
that he is named who keeps the others waiting; the answers themselves are awaited. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distdl_jax.plans.decomposition import Workers
from distdl_jax.watchdog.deadlock import workers_text

OVERDUE = 0.5
"""After which part of the limit what is known goes on to who asked."""

AGAIN = 0.125
"""For which part of the limit answers are awaited where the last survey was given up."""

NOT_HEARD_FROM = "was not heard from"


class Survey(NamedTuple):
    """Which one: the members of the world that has begun it, and its number there."""

    world: Workers
    number: int


class Compiled(NamedTuple):
    """For how many seconds a worker had compiled, and its watch been awake."""

    seconds: float = 0.0
    awake: float = 0.0


@dataclass(frozen=True)
class Doing:
    """What is known of one worker; of others by their ranks in COMM_WORLD.

    - `compiled`: how long it has.
    - `waits`: whether it waits, in any of its worlds. `waits_for`: for whom; `perhaps`: for whom it may, where that is
      not known.
    - `what`: what it does, in words, where it does not wait.
    """

    compiled: Compiled = field(default=Compiled())
    waits: bool = False
    waits_for: frozenset[int] = frozenset()
    perhaps: frozenset[int] = frozenset()
    what: str = ""

    def describe(self) -> str:
        """What it is doing, after "worker 3 "."""
        if not self.waits:
            return self.what
        return f"waits for {workers_text(tuple(sorted(self.waits_for))) if self.waits_for else 'others'}"

    def and_also(self, other: Doing) -> Doing:
        """What two worlds know of it together: who was heard from in one is not silent."""
        return Doing(
            max(self.compiled, other.compiled, key=lambda compiled: compiled.awake),
            self.waits or other.waits,
            self.waits_for | other.waits_for,
            self.perhaps | other.perhaps,
            self.what if self.what not in ("", NOT_HEARD_FROM) else other.what or self.what,
        )


NOT_ASKED = Doing(what="could not be asked")
"""What is known of a worker that no survey has reached."""

Known = Mapping[int, Doing]
"""By rank in COMM_WORLD."""


def merged(*known: Known) -> dict[int, Doing]:
    """What all of them know."""
    together: dict[int, Doing] = {}
    for workers in known:
        for worker, doing in workers.items():
            together[worker] = together[worker].and_also(doing) if worker in together else doing
    return together


def held_up_by(asker: int, known: Known) -> tuple[int, ...]:
    """Who does not wait, of those that the worker waits for, or that these wait for; all where nobody is left."""
    seen: set[int] = set()
    about: set[int] = set()
    ahead = [asker]
    is_certain = True
    while ahead:
        if (worker := ahead.pop()) in seen:
            continue
        seen.add(worker)
        doing = known.get(worker, Doing())
        if not doing.waits:
            about.add(worker)
        elif doing.waits_for:
            ahead.extend(doing.waits_for)
        elif doing.perhaps:
            is_certain = False
            ahead.extend(doing.perhaps)
    return tuple(sorted(about if about and is_certain else seen))


def at_fault(asker: int, known: Known, is_complete: bool) -> tuple[int, ...]:
    """Who holds up the worker. Where not all have answered, or could be asked: who was not heard from, if anybody."""
    about = held_up_by(asker, known)
    if is_complete and known.keys() >= set(about):
        return about
    return tuple(sorted(w for w, doing in known.items() if doing.what == NOT_HEARD_FROM and not doing.waits)) or about


def lines_of(workers: Iterable[int], known: Known) -> list[str]:
    """What each of them does."""
    return [f"worker {worker} {known.get(worker, NOT_ASKED).describe()}" for worker in workers]


@dataclass(frozen=True)
class Poll:
    """A coordinator's part in a survey: for which of its workers (None: it has begun it itself), since when, whose
    answers it awaits, who has said something, what is known by now, and whether that goes on before all have answered.
    """

    survey: Survey
    asker: int | None
    began_at: float
    awaited: frozenset[int]
    heard: frozenset[int] = frozenset()
    known: Known = field(default_factory=dict)
    is_overdue: bool = False

    def with_answer(self, worker: int, known: Known, is_last: bool) -> Poll:
        """One of them has answered, or told what it knows by now."""
        awaited = self.awaited - {worker} if is_last else self.awaited
        return replace(self, awaited=awaited, heard=self.heard | {worker}, known=merged(self.known, known))

    def overdue_at(self, limit: float) -> float:
        """When what is known goes on, if not all answer before."""
        is_due = self.asker is not None and self.awaited and not self.is_overdue
        return self.began_at + OVERDUE * limit if is_due else float("inf")


def again(before: Poll | None, survey: Survey, asked: frozenset[int], now: float, limit: float) -> Poll:
    """That of the coordinator that begins a survey: where somebody was silent for the limit in the one `before`, it has
    an eighth of that, and what was known then."""
    if before is None or not before.awaited:
        return Poll(survey, None, now, asked)
    return Poll(survey, None, now - (1 - AGAIN) * limit, asked, known=before.known)


@dataclass(frozen=True)
class Errand:
    """A worker's part in a survey: in which world it was asked, in which others it asks, what it was told there, and
    whether that is to go on before all of it is."""

    survey: Survey
    world: Workers
    awaited: frozenset[Workers]
    known: Known = field(default_factory=dict)
    is_over: bool = False
    is_news: bool = False


@dataclass(frozen=True)
class Relay:
    """What a worker of several worlds does for surveys. Worlds are known by their members.

    - `errands`: the last one for each world that begins surveys. `again`: those asked for once more, and where.
    """

    errands: Mapping[Workers, Errand] = field(default_factory=dict)
    again: tuple[tuple[Survey, Workers], ...] = ()

    def asked(self, survey: Survey, world: Workers, others: Iterable[Workers]) -> tuple[Relay, frozenset[Workers]]:
        """It was asked in `world`; in which of its `others` it is to ask."""
        before = self.errands.get(survey.world)
        if before is not None and before.survey.number >= survey.number:
            return replace(self, again=(*self.again, (survey, world))), frozenset()
        errand = Errand(survey, world, frozenset(others))
        return replace(self, errands={**self.errands, survey.world: errand}), errand.awaited

    def told(self, survey: Survey, world: Workers, known: Known, is_last: bool = True) -> Relay:
        """What is known in `world`, in which it has asked."""
        errand = self.errands.get(survey.world)
        if errand is None or errand.survey != survey or errand.is_over:
            return self
        awaited = errand.awaited - {world} if is_last else errand.awaited
        errand = replace(errand, awaited=awaited, known=merged(errand.known, known), is_news=not is_last)
        return replace(self, errands={**self.errands, survey.world: errand})

    def answers(self, world: Workers, going_on: Set[Workers]) -> tuple[Relay, list[tuple[Survey, Known, bool]]]:
        """What it can say in `world` by now, and whether that is all; `going_on`: those of its worlds whose workers
        have not all left."""
        if not self.again and all(errand.is_over for errand in self.errands.values()):
            return self, []
        posts: list[tuple[Survey, Known, bool]] = [(survey, {}, True) for survey, at in self.again if at == world]
        errands = dict(self.errands)
        for began, errand in self.errands.items():
            if errand.world != world or errand.is_over:
                continue
            if not errand.awaited & going_on:
                posts.append((errand.survey, errand.known, True))
                errands[began] = replace(errand, known={}, is_over=True)
            elif errand.is_news:
                posts.append((errand.survey, errand.known, False))
                errands[began] = replace(errand, is_news=False)
        again = tuple((survey, asked_in) for survey, asked_in in self.again if asked_in != world)
        return replace(self, errands=errands, again=again), posts

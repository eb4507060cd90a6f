"""Whom the plan of a function can't do without."""

import pytest
from played_coordinator import LIMITS

from distdl_jax.watchdog.programs.ir import Loop, Operation
from distdl_jax.watchdog.programs.matching import find_mismatch
from distdl_jax.watchdog.watch import dependencies
from distdl_jax.watchdog.watch.coordinator import Coordinator


def test_equal_programs_cost_what_one_costs(monkeypatch):
    """Of a thousand workers with one and the same program, one is looked at."""
    looked_at, walk = [], dependencies.dependencies_of
    monkeypatch.setattr(dependencies, "dependencies_of", lambda *of: looked_at.append(of) or walk(*of))
    workers = tuple(range(1000))
    program = (Operation("allreduce", workers), Operation("bcast", workers, root=3))
    programs = dict.fromkeys(workers, program)
    coordinator = Coordinator(tuple(range(1000)), LIMITS)
    coordinator.remember("f", programs)
    assert len(looked_at) == 1 and coordinator.plans["f"][7].required == set(workers)
    assert dependencies.takes_all(programs) and find_mismatch(programs) is None
    reduction = (Operation("reduce", workers, root=3),)
    coordinator.remember("reduced", dict.fromkeys(workers, reduction))
    reduced = coordinator.plans["reduced"]
    assert len(looked_at) == 3 and reduced[3].required == set(workers) and not reduced[4].required


@pytest.mark.parametrize(
    ("teams", "all_must"),
    [
        ([(0, 1, 2)], True),
        ([(0, 1), (1, 2)], True),
        ([(0, 1)], False),
        ([(0, 1), (2, 3)], False),
        ([(0, 3), (1, 2)], False),
    ],
)
def test_whom_a_plan_binds_together(teams, all_must):
    """Found by way of others, too, and not by what the data decide."""
    size = 1 + max(map(max, teams)) if len(teams) > 1 else 3
    programs = {w: tuple(Operation("allreduce", team) for team in teams if w in team) for w in range(size)}
    assert dependencies.takes_all(programs) == all_must
    assert not dependencies.takes_all({w: (Loop(None, program),) for w, program in programs.items()})

"""The solver finds what a search of all choices finds: on chains, residuals, skips, with and without limit."""

import itertools

import numpy as np
import pytest

from distdl_jax.advice.solver import Problem, solve

GRAPHS = {
    "chain": [(0, 1), (1, 2), (2, 3), (3, 4)],
    "residual": [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4)],
    "nested skips": [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 4), (0, 5)],
    "every pair": list(itertools.combinations(range(4), 2)),
}


def drawn(edges: list[tuple[int, int]], seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    states = rng.integers(1, 5, 1 + max(v for _, v in edges))
    times, memories = ([rng.random(n) for n in states] for _ in range(2))
    return Problem(times, memories, {(u, v): rng.random((states[u], states[v])) for u, v in edges})


def all_choices(problem: Problem, limit: float) -> list[tuple[float, tuple[int, ...]]]:
    every = itertools.product(*(range(len(times)) for times in problem.times))
    return sorted((problem.time(choice), choice) for choice in every if problem.memory(choice) <= limit)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("graph", GRAPHS)
def test_best_choices(graph: str, seed: int) -> None:
    """The ten best choices, and the bound, equal those of a search of all."""
    problem = drawn(GRAPHS[graph], seed)
    solution, expected = solve(problem), all_choices(problem, np.inf)[:10]
    assert [problem.time(choice) for choice in solution.choices] == pytest.approx([time for time, _ in expected])
    assert solution.choices[0] == expected[0][1]
    assert solution.bound == pytest.approx(expected[0][0])


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("graph", GRAPHS)
def test_best_choices_within_a_limit(graph: str, seed: int, share: float) -> None:
    """With a limit between the least memory and the fastest choice's, the choices are still the best that fit."""
    problem = drawn(GRAPHS[graph], seed)
    fastest = problem.memory(solve(problem).choices[0])
    least = solve(problem).least_memory
    limit = least + share * (fastest - least) + 1e-12
    solution, expected = solve(problem, limit), all_choices(problem, limit)[:10]
    assert [problem.time(choice) for choice in solution.choices] == pytest.approx([time for time, _ in expected])
    assert solution.bound == pytest.approx(expected[0][0])
    assert all(problem.memory(choice) <= limit for choice in solution.choices)


def test_nothing_fits() -> None:
    """A limit below the least memory leaves no choice, and the least is what a search of all finds."""
    problem = drawn(GRAPHS["residual"], 0)
    least = min(problem.memory(choice) for _, choice in all_choices(problem, np.inf))
    assert solve(problem, least - 1e-6).choices == ()
    assert solve(problem, least - 1e-6).least_memory == pytest.approx(least)


def test_forced_state() -> None:
    """The fastest choice with a node in a given state equals that of a search of all."""
    problem = drawn(GRAPHS["nested skips"], 3)
    for state in range(len(problem.times[2])):
        time, choice = next(each for each in all_choices(problem, np.inf) if each[1][2] == state)
        assert solve(problem.forced(2, state)).choices[0] == choice
        assert solve(problem.forced(2, state)).bound == pytest.approx(time)

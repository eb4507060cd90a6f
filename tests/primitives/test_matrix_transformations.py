"""Every primitive under every transformation gives on every worker what the reference gives, to rounding in float64.

On four workers; in a long run on one, too, where nothing travels (the tests of dtypes and of programs always are).
Each transformation takes one case of every operator, and the next one the next case; in a long run all take all. One
compiled program holds them; a failure names the cases.
"""

import pytest
from launcher.examples import LONG
from matrix.cases import PRIMITIVES, of_world
from matrix.programs import compare, expected, transformed
from matrix.transformations import DERIVATIVES, TRANSFORMATIONS

TOLERANCE = 1e-12
WORLDS = (1, 4) if LONG > 1 else (4,)


def test_case_names_are_unique() -> None:
    """Results are looked up by name."""
    assert len({case.name for case in PRIMITIVES}) == len(PRIMITIVES)


def check(name: str, world_size: int) -> None:
    transformation = TRANSFORMATIONS[name]
    cases = of_world(world_size, turn=None if LONG > 1 else list(TRANSFORMATIONS).index(name))
    want = expected(cases, transformation)
    compare(transformed(cases, transformation, jit=name != "eager"), want, TOLERANCE)


@pytest.mark.primitives
@pytest.mark.world(*WORLDS)
@pytest.mark.simulated(4)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformation(name: str, world_size: int) -> None:
    check(name, world_size)


@pytest.mark.primitives
@pytest.mark.simulated(4)
@pytest.mark.parametrize("name", [*DERIVATIVES] if LONG > 1 else [*DERIVATIVES][:1])
def test_derivatives(name: str, world_size: int) -> None:
    """Along a direction, where JAX's own forward mode is the reference; of `replicated`, see test_derivatives.py."""
    cases = [case for case in of_world(world_size, turn=None if LONG > 1 else 0) if case.linear]
    compare(transformed(cases, DERIVATIVES[name]), expected(cases, DERIVATIVES[name]), TOLERANCE)


@pytest.mark.world(12)
def test_twelve_workers() -> None:
    """The last transformation nests most of the others; forward and adjoint are compared exactly elsewhere."""
    check([*TRANSFORMATIONS][-1], 12)

"""Every primitive under every transformation gives on every worker what the reference gives, to rounding in float64.

On four workers; in a long run on one, too, where nothing travels (the tests of dtypes and of programs always are).
One compiled program holds all cases of a world; a failure names the cases.
"""

import pytest
from launcher.examples import LONG
from matrix.cases import PRIMITIVES, of_world
from matrix.dense import Reference
from matrix.programs import compare, reference, transformed
from matrix.transformations import DERIVATIVES, TRANSFORMATIONS

import distdl_jax as dj

TOLERANCE = 1e-12
WORLDS = (1, 4) if LONG > 1 else (4,)


def test_case_names_are_unique() -> None:
    """Results are looked up by name."""
    assert len({case.name for case in PRIMITIVES}) == len(PRIMITIVES)


def check(name: str, world_size: int) -> None:
    transformation = TRANSFORMATIONS[name]
    want = reference(world_size, every_partition=LONG > 1 or not transformation.costly)
    got = transformed(want.cases, transformation, jit=name != "eager")
    compare(got, want.results(transformation, dj.Partition().rank), TOLERANCE)


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
    every_partition = LONG > 1 and name == "derivatives"
    want = Reference(tuple(case for case in of_world(world_size, every_partition=every_partition) if case.linear))
    got = transformed(want.cases, DERIVATIVES[name])
    compare(got, want.results(DERIVATIVES[name], dj.Partition().rank), TOLERANCE)


@pytest.mark.world(12)
def test_twelve_workers() -> None:
    """The last transformation nests most of the others; forward and adjoint are compared exactly elsewhere."""
    check([*TRANSFORMATIONS][-1], 12)

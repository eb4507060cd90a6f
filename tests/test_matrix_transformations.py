"""Every primitive under every transformation gives on every worker what the reference gives, to rounding in float64.

One compiled program holds all cases of a world; a failure names the cases.
"""

import pytest
from matrix.cases import PRIMITIVES, of_world
from matrix.programs import compare, reference, transformed
from matrix.transformations import TRANSFORMATIONS
from mpi4py import MPI

TOLERANCE = 1e-12


def test_case_names_are_unique() -> None:
    """Results are looked up by name."""
    assert len({case.name for case in PRIMITIVES}) == len(PRIMITIVES)


@pytest.mark.primitives
@pytest.mark.world(1, 4)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformation(name: str, world_size: int) -> None:
    cases, transformation = of_world(world_size), TRANSFORMATIONS[name]
    got = transformed(cases, transformation, jit=name != "eager")
    compare(got, reference(world_size).results(transformation, MPI.COMM_WORLD.rank), TOLERANCE)


@pytest.mark.world(12)
@pytest.mark.parametrize("name", ["grad", "vmap of grad of scan of checkpoint"])
def test_twelve_workers(name: str) -> None:
    cases, transformation = of_world(12), TRANSFORMATIONS[name]
    compare(transformed(cases, transformation), reference(12).results(transformation, MPI.COMM_WORLD.rank), TOLERANCE)

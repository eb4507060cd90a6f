"""Every primitive under every transformation gives on every worker what the reference gives, to rounding in float64.

On four workers, or on two where a program takes long to trace; in a long run on both, on one, too, where nothing
travels, and on twelve, where large teams talk in another way (forward and adjoint are always compared there, on
threads; such teams over MPI are in test_messages.py).
Each transformation takes one case of every operator, and the next one the next case; in a long run all take all. One
compiled program holds them; a failure names the cases.
"""

import jax
import pytest
from launcher.examples import LONG
from matrix.cases import PRIMITIVES, of_world
from matrix.programs import compare, expected, transformed
from matrix.transformations import DERIVATIVES, TRANSFORMATIONS

TOLERANCE = 1e-12
PARTS = 8 if LONG > 1 else 1
WORLDS = (1, 2, 4, 12)
# Every operator several times, forward, backward or both, and in loops: several times as much as in the others.
TAKE_LONG = (
    "grad of scan",
    "grad of scan of checkpoint",
    "fori_loop",
    "grad of scan of what does not change",
    "unused results",
    "cond",
    "reverse over reverse",
    "vmap of grad of scan of checkpoint",
)


def test_case_names_are_unique() -> None:
    """Results are looked up by name."""
    assert len({case.name for case in PRIMITIVES}) == len(PRIMITIVES)


def check(name: str, world_size: int) -> None:
    transformation = TRANSFORMATIONS[name]
    cases = of_world(world_size, turn=None if LONG > 1 else list(TRANSFORMATIONS).index(name))
    want = expected(cases, transformation)
    compare(transformed(cases, transformation, jit=None if name == "eager" else jax.jit), want, TOLERANCE)


@pytest.mark.primitives
@pytest.mark.world(*(WORLDS if LONG > 1 else (4,)))
@pytest.mark.parametrize("name", [name for name in TRANSFORMATIONS if LONG > 1 or name not in TAKE_LONG])
def test_transformation(name: str, world_size: int) -> None:
    check(name, world_size)


@pytest.mark.primitives
@pytest.mark.world(2)
@pytest.mark.parametrize("name", TAKE_LONG if LONG == 1 else ())
def test_transformation_of_two_workers(name: str, world_size: int) -> None:
    assert {case.kind for case in of_world(2)} == {case.kind for case in of_world(4)}
    check(name, world_size)


@pytest.mark.primitives
@pytest.mark.simulated(4)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", [*DERIVATIVES] if LONG > 1 else [*DERIVATIVES][:1])
def test_derivatives(name: str, part: int, world_size: int) -> None:
    """Along a direction, where JAX's own forward mode is the reference; of `replicated`, see test_derivatives.py.

    A case of the second derivatives takes four workers 1.6 s of CPU time to trace and to compile; so in a long run each
    test has some of them.
    """
    cases = [case for case in of_world(world_size, turn=None if LONG > 1 else 0) if case.linear][part::PARTS]
    compare(transformed(cases, DERIVATIVES[name]), expected(cases, DERIVATIVES[name]), TOLERANCE)

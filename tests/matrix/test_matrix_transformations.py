"""Every primitive under every transformation gives on every worker what the reference gives, to rounding in float64.

In a short run each operator meets each transformation once (but see `has_its_turn`), in one of sixteen parts: over MPI,
under jax.jit, on four workers or on two in eight of them, or in four of what takes long, else on two threads, in one of
them under dj.jit (which test_matrix_modes.py has with each operator). It is one case of the operator, and mostly
another one with the next transformation.
In a long run all cases, over MPI: on two workers and four, on one, too, where nothing travels, and on twelve, where
large teams talk in another way (forward and adjoint are always compared there, on threads; such teams over MPI are in
test_messages.py, threads in test_matrix_modes.py).
One compiled program holds the cases; a failure names them.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
import pytest
from launcher.examples import LONG

import distdl_jax as dj
from matrix.cases import PRIMITIVES, of_world
from matrix.programs import compare, expected, transformed
from matrix.samples import share
from matrix.transformations import DERIVATIVES, TRANSFORMATIONS

TOLERANCE = 1e-12
PARTS = 8 if LONG > 1 else 1
WORLDS = (1, 2, 4, 12)
# A program for each operation; or every operator several times, in loops: several times as much as in the others.
TAKE_LONG = (
    "eager",
    "grad of scan",
    "grad of scan of checkpoint",
    "fori_loop",
    "grad of scan of what does not change",
    "unused results",
    "cond",
    "switch",
    "while_loop with a derivative",
    "nested scan",
    "reverse over reverse",
    "vmap of grad of scan of checkpoint",
)


def has_its_turn(kind: str, turn: int) -> bool:
    """In a short run the largest and the smallest, which are one operator, share the transformations, and the mean,
    which is a sum and a division, has half of them."""
    return LONG > 1 or kind not in ("all_max", "all_min", "all_mean") or (turn // 2 % 2 == 0) == (kind == "all_max")


def parts(name: str) -> dict[str, tuple[int, ...]]:
    """Which of the sixteen parts of a transformation run where, in a short run."""
    takes_long = name in TAKE_LONG
    four = () if takes_long else (0, 8)
    two = (0, 4, 8, 12) if takes_long else (2, 4, 6, 10, 12, 14)
    ours = () if name == "eager" else (7,)
    threads = tuple(sorted({*range(16)} - {*four, *two, *ours}))
    return {"four workers": four, "two workers": two, "threads": threads, "our jit": ours}


def test_the_parts_are_all_there() -> None:
    assert all(sorted(chain(*parts(name).values())) == list(range(16)) for name in TRANSFORMATIONS)


def test_every_operator_meets_our_jit_or_another_one_does() -> None:
    """Under each transformation dj.jit has an operator, whoever's turn it is."""
    for turn, name in enumerate(TRANSFORMATIONS):
        chosen = share(of_world(2, turn), turn, parts(name)["our jit"], of=16)
        assert name == "eager" or any(has_its_turn(case.kind, turn) for case in chosen), name


def test_case_names_are_unique() -> None:
    """Results are looked up by name."""
    assert len({case.name for case in PRIMITIVES}) == len(PRIMITIVES)


def check(name: str, world_size: int, parts: tuple[int, ...], jit: Callable[..., Any] = jax.jit) -> None:
    transformation, turn = TRANSFORMATIONS[name], list(TRANSFORMATIONS).index(name)
    # Eight turns later an operator comes back to as many workers, with another case.
    cases = share(of_world(world_size, None if LONG > 1 else turn + turn // 8), turn, parts, of=16)
    cases = [case for case in cases if has_its_turn(case.kind, turn)]
    if not cases:
        return
    want = expected(cases, transformation)
    compare(transformed(cases, transformation, jit=None if name == "eager" else jit), want, TOLERANCE)


@pytest.mark.primitives
@pytest.mark.world(*(WORLDS if LONG > 1 else (4,)))
@pytest.mark.parametrize("name", [name for name in TRANSFORMATIONS if LONG > 1 or parts(name)["four workers"]])
def test_transformation(name: str, world_size: int) -> None:
    check(name, world_size, parts(name)["four workers"])


@pytest.mark.primitives
@pytest.mark.world(2)
@pytest.mark.parametrize("name", TRANSFORMATIONS if LONG == 1 else ())
def test_transformation_of_two_workers(name: str, world_size: int) -> None:
    assert {case.kind for case in of_world(2)} == {case.kind for case in of_world(4)}
    check(name, world_size, parts(name)["two workers"])


@pytest.mark.primitives
@pytest.mark.world(2, 3)
@pytest.mark.parametrize("name", ["cond", "switch", "while_loop with a derivative", "nested scan"])
def test_layers_with_and_without_neighbours(name: str, world_size: int) -> None:
    """What a layer runs in a branch or loop is compiled otherwise than elsewhere, and, on a worker without a neighbour
    on one side, otherwise than on the others; so over MPI, in a short run too."""
    transformation = TRANSFORMATIONS[name]
    cases = [case for case in of_world(world_size) if case.kind in ("conv", "average_pool", "layer")]
    compare(transformed(cases, transformation), expected(cases, transformation), TOLERANCE)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("name", TRANSFORMATIONS if LONG == 1 else ())
def test_transformation_of_two_threads(name: str, world_size: int) -> None:
    check(name, world_size, parts(name)["threads"])


@pytest.mark.simulated(2)
@pytest.mark.parametrize("name", [name for name in TRANSFORMATIONS if LONG == 1 and parts(name)["our jit"]])
def test_transformation_under_our_jit(name: str, world_size: int) -> None:
    check(name, world_size, parts(name)["our jit"], dj.jit)


@pytest.mark.primitives
@pytest.mark.simulated(4 if LONG > 1 else 2)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", [*DERIVATIVES] if LONG > 1 else [*DERIVATIVES][:1])
def test_derivatives(name: str, part: int, world_size: int) -> None:
    """Along a direction, where JAX's own forward mode is the reference; of `replicated`, see test_derivatives.py.

    A case of the second derivatives takes four workers 1.6 s of CPU time to trace and to compile; so in a long run each
    test has some of them, and a short one has two workers.
    """
    cases = [case for case in of_world(world_size, turn=None if LONG > 1 else 0) if case.linear][part::PARTS]
    compare(transformed(cases, DERIVATIVES[name]), expected(cases, DERIVATIVES[name]), TOLERANCE)

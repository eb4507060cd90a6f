"""Every primitive and layer eagerly, under jax.jit and under dj.jit, in worlds of 1 to 4 and 12, over the transport of
threads: in a long run all cases with all dtypes and all transformations, in a short one samples.

In the samples each mode meets each operator, each dtype and each world, and eagerly each transformation. Compiled ones,
and each operator in each world, are in the other files of the matrix, also over MPI.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from launcher.examples import LONG

from matrix.programs import check_exactly, compare, expected, transformed
from matrix.samples import DTYPES, MODES, SMALL, WORLDS, covering, dtypes_in, in_batches, transformations_in
from matrix.transformations import TRANSFORMATIONS

TOLERANCE = 1e-12
ALL = "all"
# In a long run each is a test of its own: all of them take hours, and can be run a part at a time.
ALONE = {"dtype": DTYPES, "transformation": TRANSFORMATIONS} if LONG > 1 else {"dtype": [ALL], "transformation": [ALL]}


def test_each_pair_is_in_a_sample() -> None:
    """Of three factors, two of whose values exclude each other; twice the same; no larger than it has to be."""
    factors = {"a": range(5), "b": "xyz", "c": range(4)}
    pairs = [("a", "b"), ("b", "c"), ("a", "c")]
    rows = covering(factors, pairs, lambda row: (row.get("a"), row.get("c")) != (0, 0))
    for one, other in pairs:
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(factors[one], factors[other])) - ({(0, 0)} if (one, other) == ("a", "c") else set())
    assert len(rows) <= 24  # 19 pairs of a and c, 60 rows in all
    assert rows == covering(factors, pairs, lambda row: (row.get("a"), row.get("c")) != (0, 0))


@pytest.mark.simulated(*WORLDS)
@pytest.mark.parametrize("dtype", ALONE["dtype"])
@pytest.mark.parametrize("mode", MODES)
def test_operators(mode: str, dtype: str, world_size: int) -> None:
    """Forward and adjoint, exactly: values, shapes and dtypes."""
    chosen = [(case, own) for case, own in dtypes_in(mode, world_size) if dtype in (own, ALL)]
    for batch in in_batches(chosen):
        for part in parts(batch):
            check_exactly(part, MODES[mode])


@pytest.mark.simulated(*(WORLDS if LONG > 1 else SMALL[1:3]))
@pytest.mark.parametrize("transformation", ALONE["transformation"])
@pytest.mark.parametrize("mode", MODES if LONG > 1 else ["eager"])
def test_transformations(mode: str, transformation: str, world_size: int) -> None:
    """As in test_matrix_transformations, each with one operator."""
    for name in TRANSFORMATIONS if transformation == ALL else [transformation]:
        cases = [case for case, chosen in transformations_in(mode, world_size) if chosen == name]
        for part in parts(cases):
            want = expected(part, TRANSFORMATIONS[name])
            compare(transformed(part, TRANSFORMATIONS[name], MODES[mode]), want, TOLERANCE)


def parts(cases: Sequence[Any]) -> list[Sequence[Any]]:
    """As many as one program may hold: what it takes to compile grows faster than it."""
    return [cases[start : start + 16] for start in range(0, len(cases), 16)]

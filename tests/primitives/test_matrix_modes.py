"""Every primitive and layer eagerly, under jax.jit and under dj.jit, in worlds of 1 to 4 and 12, over the transport of
threads: in a long run all cases with all dtypes and all transformations, in a short one samples.

In the samples each operator meets each mode and each world that it has a case for, each mode each dtype, each
transformation. There is more under jax.jit, and over MPI, in the other files of the matrix.
"""

from itertools import product

import pytest
from launcher.examples import LONG
from matrix.adjoints import check_exactly
from matrix.covering import covering
from matrix.everything import MODES, SMALL, WORLDS, dtypes_in, in_batches, transformations_in
from matrix.programs import compare, expected, transformed
from matrix.transformations import TRANSFORMATIONS

TOLERANCE = 1e-12


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
@pytest.mark.parametrize("mode", MODES)
def test_operators(mode: str, world_size: int) -> None:
    """Forward and adjoint, exactly: values, shapes and dtypes."""
    for batch in in_batches(dtypes_in(mode, world_size)):
        check_exactly(batch, MODES[mode])


@pytest.mark.simulated(*(WORLDS if LONG > 1 else SMALL))
@pytest.mark.parametrize("mode", MODES)
def test_transformations(mode: str, world_size: int) -> None:
    """As in test_matrix_transformations, each with one operator."""
    for name in TRANSFORMATIONS:
        cases = [case for case, chosen in transformations_in(mode, world_size) if chosen == name]
        if cases:
            want = expected(cases, TRANSFORMATIONS[name])
            compare(transformed(cases, TRANSFORMATIONS[name], MODES[mode]), want, TOLERANCE)

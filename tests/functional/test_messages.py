"""How blocks travel: long ones in pieces, in large teams by MPI's own collectives, at every shape anew.

The limits are lowered so that small blocks meet them. Compiled programs are kept by plan and shape, so these tests use
shapes that no other test has.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import movement_cases as cases
from matrix.case import Case, shapes_out
from matrix.partitions import blocks, on
from matrix.programs import check_exactly, compare, expected, library, transformed
from matrix.ties import there_and_back, untied
from matrix.transformations import TRANSFORMATIONS

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional import collectives
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.transports.mpi import transport
from distdl_jax.transports.mpi.transport import sent_first
from distdl_jax.watchdog.programs.ir import operations


def movements(extra: int) -> list[Case]:
    """Operators on blocks of 11 + `extra` elements or so, among three workers."""
    n = 11 + extra
    return [
        cases.broadcast(on(1, ranks=(2,)), on(3), (n,), world=3),
        cases.broadcast(on(1, ranks=(1,)), on(2, ranks=(2, 0)), (n, 2), world=3),
        cases.sum_reduce(on(3), on(1, ranks=(1,)), (n,), world=3),
        cases.sum_reduce(on(2, ranks=(2, 0)), on(1, ranks=(1,)), (2, n), world=3),
        cases.all_sum_reduce(on(3), (0,), (n,), world=3),
        cases.repartition(on(3), on(3), blocks(on(3), (n, 2 * n, 0), world=3)),
        cases.repartition(on(1, 1, ranks=(1,)), on(1, 2, ranks=(1, 2)), blocks(on(1, 1, ranks=(1,)), 3, n, world=3)),
        cases.halo_exchange(on(3), blocks(on(3), 3 * n, world=3), (n, n // 2)),
        cases.reduce_scatter(on(3), (0,), ((n,),) * 3),
    ]


@pytest.mark.world(3)
@pytest.mark.parametrize(("turn", "dtype"), [*enumerate(["float64", "float16", "complex128", "bool"])])
@pytest.mark.parametrize("largest_tree", [1, 8])
def test_long_messages_travel_in_pieces(
    turn: int, dtype: str, largest_tree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two whole pieces and a rest: nothing is lost or mixed up, whether a team talks by trees or by MPI's collectives.

    What is no broadcast and no sum does not know of trees: each dtype takes it once.
    """
    monkeypatch.setattr(transport, "MAX_ELEMENTS", 5)
    monkeypatch.setattr(collectives, "LARGEST_TREE", largest_tree)
    chosen = movements(2 if largest_tree == 1 else 3)
    others = chosen[5:][(turn + largest_tree // 8) % 2 :: 2]
    check_exactly([(case, dtype) for case in (*chosen[:5], *others)])


@pytest.mark.world(3)
def test_a_long_message_is_as_many_operations_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is the one that counts: 53 elements in pieces of 5 are 11 operations, in pieces of 53 one."""
    total = nn.AllSumReduce(on(3).partition(dj.Partition()), (0,))

    def count(n: int) -> int:
        return str(jax.make_jaxpr(total)(jnp.zeros(n))).count("allreduce_mpi[")

    monkeypatch.setattr(transport, "MAX_ELEMENTS", 5)
    assert count(53) == 11
    monkeypatch.setattr(transport, "MAX_ELEMENTS", 54)
    assert (count(54), count(55)) == (1, 2)


@pytest.mark.primitives
@pytest.mark.world(3)
@pytest.mark.simulated(3)
def test_teams_by_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broadcast and sum-reduce by the transport's collectives stand the deepest transformation, as they do by trees."""
    used_transport = dj.Partition().world.transport
    monkeypatch.setattr(collectives, "LARGEST_TREE", 1)
    some, rank = tuple(movements(31)[:5]), dj.Partition().rank
    for cases_of_teams in (some, movements(-11)[:5]):  # and without elements
        dtypes = ("float16", "bool", "bool", "complex64", "float64")
        check_exactly(list(zip(cases_of_teams, dtypes, strict=True)))
    operators = library(some).values()
    programs = [jax.make_jaxpr(F)(jnp.zeros(case.shapes[rank])) for case, F in zip(some, operators, strict=True)]
    used = {op.kind for program in programs for op, _ in operations(read_program(used_transport, program.jaxpr))}
    assert used == {"bcast", "reduce", "allreduce"}
    for case, F in zip(some, operators, strict=True):
        dy = jnp.zeros(shapes_out(case)[rank])
        assert not untied(there_and_back(F, jnp.zeros(case.shapes[rank]), dy)), case.name
    deepest = TRANSFORMATIONS["vmap of grad of scan of checkpoint"]
    one_of_each = some[::2]
    compare(transformed(one_of_each, deepest), expected(one_of_each, deepest), 1e-12)


@pytest.mark.world(4)
@pytest.mark.simulated(4)
def test_shapes_may_change_between_eager_calls() -> None:
    """A block of another shape on its worker alone: the placeholders of the others are the same in all calls."""
    P = dj.Partition()
    root, all_four = on(1, 1, ranks=(2,)).partition(P), on(2, 2).partition(P)
    spread, add, scatter = nn.Broadcast(root, all_four), nn.SumReduce(all_four, root), nn.Repartition(root, all_four)
    for rows, columns in ((2, 3), (5, 3), (5, 1), (2, 3), (0, 3)):
        whole = np.arange(rows * columns, dtype=float).reshape(rows, columns)
        x = jax.device_put(whole) if root.active else dj.zero_volume_tensor()
        np.testing.assert_array_equal(spread(x), whole)
        total = add(jax.device_put((P.rank + 1) * whole))
        np.testing.assert_array_equal(total, 10 * whole if root.active else np.zeros((rows, 0)))
        i, j = all_four.index
        np.testing.assert_array_equal(scatter(x), np.array_split(np.array_split(whole, 2)[i], 2, axis=1)[j])


@pytest.mark.world(4)
@pytest.mark.simulated(4)
def test_order_of_teams() -> None:
    """Rings: every worker is the root of one team and a member of another, and no order may wait for itself."""
    n = 4
    pairs = [cases.broadcast(on(1, ranks=(i,)), on(2, ranks=((i + 1) % n, (i + 2) % n)), (i + 41,)) for i in range(n)]
    shifted = [
        cases.broadcast(on(n), on(n, ranks=tuple((i + shift) % n for i in range(n))), (47 + shift,))
        for shift in range(1, n)
    ]
    check_exactly([(case, "float64") for case in (*pairs, *shifted)])


@pytest.mark.world(2)
@pytest.mark.parametrize("largest_tree", [0, 8])
def test_what_is_sent_is_sent_before_it_is_read(largest_tree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiled program: others wait for what is sent, and what reads it may take long."""
    monkeypatch.setattr(collectives, "LARGEST_TREE", largest_tree)
    P = dj.Partition()
    root = P.create_partition_inclusive([0])
    x = jnp.ones((9, 9 + largest_tree)) if P.rank == 0 else dj.zero_volume_tensor(9)

    @jax.jit
    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        y = dj.functional.broadcast(2 * x, root, P, preserve_batch=False)
        return y @ y.T, jnp.sin(y), y.sum(0)

    text = f.lower(x).compile().as_text()
    assert all(np.allclose(got, want) for got, want in zip(f(x), f_of_twos(9 + largest_tree), strict=True))
    if P.rank == 0:
        lines = text[text.index("\nENTRY") :].splitlines()
        (ordered,) = [i for i, line in enumerate(lines) if " add-dependency(" in line]
        (sent,) = [i for i, line in enumerate(lines) if 'custom_call_target="mpi_' in line]
        name, argument = (lines[ordered].split(mark)[1].split(",")[0].split()[0] for mark in ("  ", "add-dependency("))
        readers = [i for i, line in enumerate(lines) if f"{name}," in line or f"{name})" in line]
        of_what_is_sent = [i for i, line in enumerate(lines) if f"({argument}," in line or f"({argument})" in line]
        assert sent < ordered < min(readers)
        assert set(of_what_is_sent) == {sent, ordered}


def f_of_twos(columns: int) -> tuple[np.ndarray, ...]:
    """What that program gives."""
    y = np.full((9, columns), 2.0)
    return y @ y.T, np.sin(y), y.sum(0)


@pytest.mark.world(2)
def test_batches_of_what_is_sent_before_it_is_read() -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    for of_columns in (jax.vmap(sent_first, 1, 1), jax.checkpoint(jax.vmap(sent_first, 1, 1))):
        np.testing.assert_array_equal(of_columns(x), x)
        np.testing.assert_array_equal(jax.jit(of_columns)(x), x)

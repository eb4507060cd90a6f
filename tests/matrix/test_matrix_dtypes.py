"""Every primitive moves every dtype exactly, and differentiates the floating and complex ones: adjoint and dtype.

The data are small integers, so that nothing is rounded in any dtype, and equal means equal.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.examples import LONG

import distdl_jax as dj
from distdl_jax import nn
from matrix.case import Case, painted, shapes_out, smooth
from matrix.cases import of_world
from matrix.dense import Reference
from matrix.partitions import blocks, on
from matrix.programs import check_exactly, compare, moved, run, wanted
from matrix.samples import INEXACT, INTEGERS, share, takes


@pytest.mark.primitives
@pytest.mark.world(*((1, 4) if LONG > 1 else (4,)))
@pytest.mark.parametrize("dtype", [*INTEGERS, *INEXACT])
def test_moves_exactly(dtype: str, world_size: int) -> None:
    check_dtype(dtype, world_size, 0)


@pytest.mark.simulated(4 if LONG > 1 else 2)
@pytest.mark.parametrize("dtype", [*INTEGERS, *INEXACT])
def test_threads_move_exactly(dtype: str, world_size: int) -> None:
    check_dtype(dtype, world_size, 1)


def check_dtype(dtype: str, world_size: int, transport: int) -> None:
    """Values, shapes and dtypes, zero-volume results included, forward and, where there is one, adjoint.

    In a short run each operator takes one transport with one dtype, and the other with the next.
    """
    turn = [*INTEGERS, *INEXACT].index(dtype)
    cases = share(of_world(world_size, turn if LONG > 1 else turn // 2), turn, (transport,), of=2)
    check_exactly([(case, dtype) for case in cases if case.exact and takes(case, dtype)])


@pytest.mark.primitives
@pytest.mark.world(*((1, 3, 4, 12) if LONG > 1 else (3,)))
@pytest.mark.simulated(1, 4, 12)
def test_adjoint(world_size: int) -> None:
    """<F x, y> = <x, F* y>, summed over all workers, and both equal to the reference's, on every worker.

    What is not linear (a replicated value is one variable, not four) is compared with the reference alone.
    """
    check_adjoint(of_world(world_size), "float64")


@pytest.mark.primitives
@pytest.mark.world(*((1, 3, 4, 12) if LONG > 1 else (3,)))
@pytest.mark.simulated(*((4, 12) if LONG > 1 else (2,)))
def test_adjoint_of_complex_numbers(world_size: int) -> None:
    """In a short run of one case of each operator."""
    check_adjoint(of_world(world_size, turn=None if LONG > 1 else 0), "complex128")


def check_adjoint(cases: Sequence[Case], dtype: str) -> None:
    rank = dj.Partition().rank
    cases = [case for case in cases if takes(case, dtype)]

    def numbers(kind: str, shapes: Any) -> Any:
        real, imaginary = (smooth(f"{kind} {part}", shapes) for part in ("real", "imaginary"))
        return jax.tree.map(lambda a, b: a + 1j * b, real, imaginary) if dtype == "complex128" else real

    xs = {case.name: numbers(f"{case.name} x", case.shapes) for case in cases}
    dys = {case.name: numbers(f"{case.name} dy", shapes_out(case)) for case in cases}
    got = moved(cases, *({name: each[rank] for name, each in part.items()} for part in (xs, dys)))
    compare(got, wanted(cases, xs, dys), 1e-13)
    products = {}
    for case in cases:
        if not case.linear:
            continue
        constant = Reference((case,)).outputs[0].of(Reference((case,)).constant, rank)
        forward = [(got[case.name]["y"] - constant, dys[case.name][rank])]
        backward = list(zip(jax.tree.leaves(xs[case.name][rank]), jax.tree.leaves(got[case.name]["dx"]), strict=True))
        products[case.name] = tuple(sum(np.sum(a * b) for a, b in side) for side in (forward, backward))
    for name in products:
        one, other = (complex(sum(side)) for side in zip(*dj.Partition().allgather_data(products[name]), strict=True))
        assert abs(one - other) <= 1e-13 * max(1.0, abs(one)), f"{name}: <Fx, y> is {one}, <x, F*y> is {other}"


@pytest.mark.world(4)
@pytest.mark.simulated(4)
@pytest.mark.parametrize(("dtype", "large", "rounded"), [("float16", 2048.0, 2052.0), ("bfloat16", 256.0, 260.0)])
def test_half_precision_sums_round_once(dtype: str, large: float, rounded: float) -> None:
    """large + 1 + 1 + 1 is in the middle of two numbers; adding in half precision would lose the ones.

    Every sum of the library, forward and adjoint: each operator adds up four workers' numbers somewhere.
    """
    P = dj.Partition()
    line, grid, first = (each.partition(P) for each in (on(4), on(2, 2), on(1)))
    mine = jnp.full((1,), large if P.rank == 0 else 1.0, dtype)
    halo = [(i, 1 - i) for i in grid.index]  # two exchanges, one after the other
    forward = {
        "sum_reduce": (nn.SumReduce(line, first), mine),
        "all_sum_reduce": (nn.AllSumReduce(grid, (0, 1)), mine),
        "reduce_scatter": (nn.ReduceScatter(line, (0,)), jnp.tile(mine, 4)),
    }
    summing = {
        "broadcast": (nn.Broadcast(first, line), mine if P.rank == 0 else mine[:0], mine),
        "all_gather": (nn.AllGather(line, (0,)), mine, jnp.tile(mine, 4)),
        "halo_exchange": (nn.HaloExchange(grid, halo), mine.reshape(1, 1), jnp.tile(mine, (2, 2))),
    }

    def program() -> dict[str, Any]:
        sums = {name: F(x) for name, (F, x) in forward.items()}
        return sums | {name: jax.vjp(F, x)[1](dy)[0] for name, (F, x, dy) in summing.items()}

    for name, total in run(program).items():
        assert total.dtype == jnp.dtype(dtype)
        holds_it = name not in ("sum_reduce", "broadcast") or P.rank == 0
        assert total.shape[-1] == holds_it
        assert np.all(np.asarray(total, np.float64) == rounded), f"{name}: {total}"


@pytest.mark.world(4)
@pytest.mark.simulated(4)
def test_widths_of_dtypes_mix_in_one_program() -> None:
    """Messages of different dtypes between the same workers, in one program, do not get mixed up."""
    P = dj.Partition()
    move = nn.Repartition(on(4).partition(P), on(4, ranks=(1, 2, 3, 0)).partition(P))
    dtypes = ["float16", "int64", "bool", "complex64", "uint8", "bfloat16"]
    shapes = blocks(on(4), 8)
    given = [painted(name, shapes, jnp.dtype(name)) for name in dtypes]
    got = run(lambda xs: [move(x) for x in xs], jax.device_put([each[P.rank] for each in given]))
    for name, x, y in zip(dtypes, given, got, strict=True):
        assert y.dtype == jnp.dtype(name)
        np.testing.assert_array_equal(np.asarray(y), x[(P.rank + 3) % 4])

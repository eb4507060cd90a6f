"""Random reshapings, all workers simulated in one process, against numpy's reshape of global numbers."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from launcher.examples import examples
from plans.blocks_of_grids import blocks_of, random_blocks
from simulator import adjoint, simulate

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.reshaping import Reshaping

NOTHING = ((3, 0, 2), (0, 5))


def random_shape(rng: np.random.Generator, total: int) -> tuple[int, ...]:
    lengths = []
    for _ in range(int(rng.integers(0, 4))):
        lengths.append(int(rng.choice([n for n in range(1, total + 1) if total % n == 0])))
        total //= lengths[-1]
    return tuple(rng.permutation([*lengths, total]).tolist())


def random_grid(rng: np.random.Generator, shape: tuple[int, ...], pool: list[int]) -> ProductGrid:
    """Draw a grid, balanced or cut anywhere, over some of the workers `pool`."""
    cells = [int(rng.integers(1, 4)) for _ in shape]
    while prod(cells) > len(pool):
        cells[int(rng.integers(len(cells)))] = 1
    ranges = tuple(random_blocks(rng, n, p, 0.6) for n, p in zip(shape, cells, strict=True))
    return ProductGrid(tuple(rng.permutation(pool).tolist()[: prod(cells)]), ranges)


def test_random_reshapings() -> None:
    """Every element gets to its place in its worker's block, and back; none twice, and no message to oneself."""
    rng = np.random.default_rng(0)
    for n in range(examples(80)):
        total = int(rng.choice([1, 7, 12, 24, 36, 60, 72]))
        shapes = NOTHING if n % 20 == 0 else (random_shape(rng, total), random_shape(rng, total))
        x_grid, y_grid = (random_grid(rng, shape, list(range(9))) for shape in shapes)
        x = 1 + np.arange(prod(shapes[0])).reshape(shapes[0])
        reshaping = Reshaping(x_grid, y_grid)
        xs, ys = blocks_of(x_grid, x), blocks_of(y_grid, x.reshape(shapes[1]))
        plans = {rank: (reshaping.plan(rank),) for rank in range(10)}
        given, wanted = (
            {r: blocks[r].reshape(shape(r)) if r in blocks else np.zeros(shape(r), int) for r in plans}
            for blocks, shape in ((xs, reshaping.in_shape), (ys, reshaping.out_shape))
        )
        for found, want in ((simulate(plans, given), wanted), (simulate(adjoint(plans), wanted), given)):
            for rank in plans:
                np.testing.assert_array_equal(found[rank], want[rank], err_msg=f"{shapes} on worker {rank}")
        for (plan,) in plans.values():
            assert plan.covers_output and plan.reverse().covers_output


def test_pieces_are_few_where_blocks_are_aligned() -> None:
    """Whatever is in front of a dimension, and behind it, is taken at once."""
    images = ProductGrid.balanced((8, 64, 32, 32), (1, 1, 2, 2), range(4))
    flat = ProductGrid.balanced((8, 64 * 32 * 32), (1, 4), range(4))
    sent = Reshaping(images, flat).plan(0).sends
    assert [len(message.pieces) for message in sent] == [1, 1, 1]
    assert [message.size for message in sent] == [8 * 16 * 16 * 16] * 3


def test_it_takes_as_many_elements() -> None:
    grids = [ProductGrid.balanced((n,), (2,), range(2)) for n in (5, 6)]
    with pytest.raises(InvalidArgumentError, match="the same number of elements"):
        Reshaping(*grids)

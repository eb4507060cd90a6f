"""Blocks tile, boxes intersect as sets do, and the rooms below MPI stay pure."""

import ast
import subprocess
import sys
from itertools import pairwise, product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distdl_jax.plans
from distdl_jax.plans.decomposition import (
    ProductGrid,
    balanced_box,
    balanced_range,
    balanced_ranges,
    balanced_sizes,
    box_shape,
    index_of,
    intersect,
    ranges_of_sizes,
    rank_of,
)
from distdl_jax.validation import checked_integer

PLANS = sorted(Path(distdl_jax.plans.__file__).parent.glob("*.py"))
deterministic = settings(derandomize=True, database=None, deadline=None)

ranges = st.tuples(st.integers(-4, 8), st.integers(0, 6)).map(lambda r: (r[0], r[0] + r[1]))
box_pairs = st.integers(1, 3).flatmap(lambda d: st.tuples(*[st.tuples(*[ranges] * d)] * 2))
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@deterministic
@given(st.integers(0, 200), st.integers(1, 40))
def test_balanced_blocks_follow_each_other_and_the_first_are_larger_by_one(n, p):
    sizes = balanced_sizes(n, p)
    assert sum(sizes) == n and sizes == tuple(sorted(sizes, reverse=True)) and max(sizes) - min(sizes) <= 1
    assert sum(size == n // p + 1 for size in sizes) == n % p
    blocks = [balanced_range(n, p, i) for i in range(p)]
    assert blocks[0][0] == 0 and blocks[-1][1] == n and all(a[1] == b[0] for a, b in pairwise(blocks))
    assert tuple(stop - start for start, stop in blocks) == sizes
    assert balanced_ranges(n, p) == ranges_of_sizes(sizes) == tuple(blocks)


@deterministic
@given(box_pairs)
def test_intersection_holds_the_points_of_both_boxes(boxes):
    def points(box):
        return set(product(*(range(start, stop) for start, stop in box)))

    common = intersect(*boxes)
    assert points(common) == points(boxes[0]) & points(boxes[1])
    assert prod(box_shape(common)) == len(points(common))


@deterministic
@given(shapes)
def test_ranks_and_indices_are_row_major_and_inverse(shape):
    indices = list(product(*(range(p) for p in shape)))
    assert [rank_of(index, shape) for index in indices] == list(range(len(indices)))
    assert [index_of(rank, shape) for rank in range(len(indices))] == indices


@deterministic
@given(shapes.flatmap(lambda p: st.tuples(st.just(p), st.tuples(*[st.integers(0, 7)] * len(p)))))
def test_grid_boxes_are_the_balanced_boxes_and_lines_vary_one_index(case):
    shape, extent = case
    ranks = tuple(range(100, 100 + prod(shape)))
    grid = ProductGrid.balanced(extent, shape, ranks)
    assert grid.tiles and grid.extent == extent and grid.shape == shape
    for cell, index in enumerate(product(*(range(p) for p in shape))):
        assert grid.cell_of[ranks[cell]] == cell and grid.index(cell) == index
        assert grid.box(cell) == balanced_box(extent, shape, index)
        for d, p in enumerate(shape):
            line = [rank_of((*index[:d], i, *index[d + 1 :]), shape) for i in range(p)]
            assert grid.line(cell, d) == tuple(100 + c for c in line)


def test_what_tiles_a_tensor():
    """From 0 on, without a gap and without an overlap, in every dimension."""
    for ranges, tiles in (
        (((0, 2), (2, 2), (2, 3)), True),
        (((1, 2), (2, 2), (2, 3)), False),
        (((0, 1), (2, 2), (2, 3)), False),
        (((0, 2), (1, 2), (2, 3)), False),
    ):
        assert ProductGrid(tuple(range(3)), (ranges, ((0, 4),))).tiles == tiles
        assert ProductGrid(tuple(range(3)), (((0, 4),), ranges)).tiles == tiles


def test_grids_of_equal_meaning_are_equal_and_hash_alike():
    grids = [ProductGrid.balanced((5, 4), (2, 2), range(4)) for _ in range(2)]
    assert grids[0].shape == (2, 2)  # a cached property must not count
    assert grids[0] == grids[1] and hash(grids[0]) == hash(grids[1]) and len(set(grids)) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balanced_sizes(-1, 2), r"`n` \(=-1\) must be 0 or more"),
        (lambda: balanced_sizes(3, 0), r"`p` \(=0\) must be 1 or more"),
        (lambda: balanced_range(3, 2, 2), r"`i` \(=2\) must be a worker's index, 0 to 1"),
        (lambda: balanced_box((3,), (2, 1), (0, 0)), "must have the same number of dimensions"),
        (lambda: ranges_of_sizes((2, -1)), r"`sizes` \(=\(2, -1\)\)"),
        (lambda: rank_of((2,), (2,)), r"`index` \(=\(2,\)\) is not a cell"),
        (lambda: index_of(6, (2, 3)), r"`rank` \(=6\) must be 0 to 5"),
        (lambda: ProductGrid((0, 0), (((0, 1), (1, 2)),)), r"`ranks` holds \[0\] more than once"),
        (lambda: ProductGrid((0,), (((0, 1), (1, 2)),)), r"`ranks` \(of length 1\)"),
        (lambda: ProductGrid((0,), (((2, 1),),)), r"`ranges` holds \(2, 1\) in dimension 0"),
        (lambda: checked_integer("n", True), r"`n` \(=True\) must be an integer"),
        (lambda: checked_integer("n", 2, 3), r"`n` \(=2\) must be 3 or more"),
        (lambda: ProductGrid((0,), ()), r"1 or more dimensions"),
        (lambda: ProductGrid.balanced((3, 3), (1,), (0,)), "must have the same number of dimensions"),
    ],
)
def test_wrong_arguments_are_named_with_their_values(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plans_import_only_plans_and_the_standard_library(path):
    """What is imported for types alone does not count. Classes of workers are arrays, so that many take no loop."""
    forbidden = {"jax", "jaxlib", "mpi4py", "mpi4jax", "distdl_jax", *(["numpy"] if path.stem != "alike" else [])}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            assert (
                module.startswith(("distdl_jax.plans.", "distdl_jax.errors", "distdl_jax.validation"))
                or module.split(".")[0] not in forbidden
            ), f"{path.name} imports {module}"


def test_plans_load_neither_jax_nor_mpi():
    modules = [f"distdl_jax.plans.{path.stem}" for path in PLANS if path.stem != "__init__"]
    program = f"import sys, {', '.join(modules)}\nassert not {{'jax', 'mpi4py'}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", program], check=True)

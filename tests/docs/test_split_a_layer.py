"""Each line of docs/how-to/split-a-layer.md makes the layer of its row, which agrees with its like on one worker."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from blocks import block_of
from jobs import ROOT
from launcher.settings import long_run
from matrix.partitions import On, on
from sequential import Beside, check_beside, close, cut

import distdl_jax as dj
from distdl_jax import nn

PAGE = (ROOT / "docs" / "how-to" / "split-a-layer.md").read_text()
OPTIONS = {name: eval(text) for name, text in re.findall(r"`([FCA]) = ({.*?})`", PAGE)}
LENGTHS = (2, 4, 8, 8, 4)  # of x: samples, channels, rows, columns, and one more


class Row(NamedTuple):
    """A row of a table: the shapes of its partitions, None if it has none, and which of them are derived."""

    split: str
    shapes: dict[str, tuple[int, ...] | None]
    derived: set[str]
    workers: int
    line: str

    @property
    def kind(self) -> str:
        return self.line.split("(")[0].removeprefix("nn.Distributed")

    def on(self, name: str) -> On | None:
        return None if self.shapes[name] is None else on(*self.shapes[name])

    def layer(self, P: dj.Partition) -> Any:
        """Make the layer of partitions that are not in brackets."""
        shapes = {name: self.shapes[name] for name in self.shapes if name not in self.derived}
        grids = {name: shape and P.grid(shape) for name, shape in shapes.items()}
        return eval(self.line, {"nn": nn, **OPTIONS, **grids})

    def whole(self, *args: Any) -> Any:
        """Call the layer as it is on this worker alone."""
        P = dj.Partition()
        grids = {name: shape and P.grid([1] * len(shape), [P.rank]) for name, shape in self.shapes.items()}
        return eval(self.line, {"nn": nn, **OPTIONS, **grids})(*args)


def rows() -> Iterator[Row]:
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 2 and cells[1].startswith("`nn."):
            given = dict(zip(("P_x", "P_y", "P_W"), [*cells[2:], "-", "-"], strict=False))
            shapes = {name: tuple(map(int, re.findall(r"\d+", cell))) or None for name, cell in given.items()}
            derived = {name for name, cell in given.items() if cell.startswith("(")}
            workers = math.prod(shapes["P_W"] or shapes["P_x"] or ())
            yield Row(cells[0], shapes, derived, workers, cells[1].strip("`"))


ROWS = list(rows())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}, {row.split}")
def test_the_partitions_are_those_of_the_row(row: Row) -> None:
    P = dj.planning_world(row.workers)
    layer = row.layer(P)
    for name, shape in row.shapes.items():
        if shape is not None:
            assert getattr(layer, name).shape == shape
    used = {rank for name in row.shapes for rank in getattr(getattr(layer, name, None), "ranks", ())}
    assert used == set(range(row.workers))


def beside(row: Row) -> Beside:
    P_x = row.on("P_x")
    assert P_x is not None
    lengths = list(LENGTHS[: len(P_x.shape)])
    if row.kind in ("Linear", "Pointwise", "LayerNorm", "RMSNorm"):
        lengths[-1] = 6
    elif row.kind == "MultiHeadAttention":
        lengths[-1] = 8
    P_y = row.on("P_y")
    if row.kind == "GlobalAvgPool":
        P_y = on(1, 2, 1, 1, ranks=(0, 2))
    integers = 10 if row.kind == "Embedding" else 0
    return Beside(f"{row.kind} {row.split}", lengths, row.layer, row.whole, P_x, P_y, integers=integers)


@pytest.mark.simulated(4, 8)
def test_layers_beside_their_like_on_one_worker(world_size: int) -> None:
    """Outputs; in a long run gradients, too, which take three times as long to compile."""
    rows = [row for row in ROWS if row.workers == world_size and not row.kind.endswith("Loss")]
    cases = [beside(row) for row in rows]
    if long_run():
        check_beside(cases)
        return
    P = dj.Partition()
    layers = [row.layer(P) for row in rows]
    specs = [layer.param_specs() for layer in layers]
    params = [case.params(spec) for case, spec in zip(cases, specs, strict=True)]
    own = jax.tree.map(lambda spec, whole: block_of(whole, spec), specs, params)
    blocks = [cut(case.x, case.P_x, P.rank) for case in cases]
    xs = [np.zeros((len(case.x), 0), case.x.dtype) if x is None else x for case, x in zip(cases, blocks, strict=True)]
    ys = dj.jit(lambda params, xs: [layer(*each) for layer, *each in zip(layers, params, xs, strict=True)])(own, xs)
    wholes = [np.asarray(case.whole(*each, case.x)) for case, *each in zip(cases, params, strict=True) if P.rank == 0]
    for case, whole, y in zip(cases, P.broadcast_data(wholes), ys, strict=True):
        mine = cut(whole, case.P_y or case.P_x, P.rank)
        if mine is not None:
            close(y, mine, 1e-12, case.name)


@pytest.mark.simulated(4)
def test_losses_beside_their_like_on_one_worker() -> None:
    P, draw = dj.Partition(), np.random.default_rng(0)
    x, target = draw.random((2, 4, 8, 8)), draw.random((2, 4, 8, 8))
    for row in (row for row in ROWS if row.kind.endswith("Loss")):
        P_x = row.on("P_x")
        assert P_x is not None
        value, gradient = dj.jit(dj.value_and_grad(row.layer(P)))(cut(x, P_x, P.rank), cut(target, P_x, P.rank))
        want, of_x = jax.value_and_grad(row.whole)(x, target)
        np.testing.assert_allclose(value, want, rtol=1e-12)
        np.testing.assert_allclose(gradient, cut(of_x, P_x, P.rank), atol=1e-12)

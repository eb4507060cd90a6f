"""Random linear layers, all workers played in one process, against the whole array in numpy: exact, on integers."""

import os
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from playing_layers import cuts, differing, play_product

import distdl_jax as dj
from distdl_jax import nn

CASES = 600 * (10 if os.environ.get("DISTDL_JAX_TEST_LONG", "0") not in ("", "0") else 1)
BATCHES, WORLDS = 6, (12, 12, 4, 30)

Boxes = dict[int, tuple[slice, ...]]


def times(local: Any, x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    assert w.shape == local.weight_shape
    return x @ w.T + (b if local.adds_bias and b.size else 0)


def gradients(local: Any, dy: np.ndarray, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batch = tuple(range(dy.ndim - 1))
    return dy @ w, np.tensordot(dy, x, (batch, batch)), dy.sum(axis=batch)


def lines(n: int, p: int) -> list[slice]:
    ends = pairwise(accumulate((len(part) for part in np.array_split(np.arange(n), p)), initial=0))
    return [slice(*end) for end in ends]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_linear(batch: int) -> None:
    """600 layers on any partitions, the batch split or not, blocks uneven or empty: output and all gradients."""
    for case in range(batch, CASES, BATCHES):
        rng = np.random.default_rng([4, case])
        world = WORLDS[case % len(WORLDS)]
        while True:
            p_n, p_fo, p_fi = (int(p) for p in rng.integers(1, (5, 5, 5)))
            if p_n * p_fo * p_fi <= world:
                break
        grids = {"x": (p_n, p_fi), "y": (p_n, p_fo), "W": (p_n, p_fo, p_fi)}
        ranks = {name: rng.permutation(world)[: np.prod(shape)].tolist() for name, shape in grids.items()}
        grids["W"] = grids["W"][1:] if p_n == 1 and rng.random() < 0.7 else grids["W"]
        n_in, n_out, bias = int(rng.integers(1, 10)), int(rng.integers(1, 10)), bool(rng.random() < 0.7)
        lead = tuple(int(n) for n in rng.integers(0 if rng.random() < 0.1 else 1, 5, int(rng.integers(1, 3))))
        rows = lines(lead[0], p_n)
        if rng.random() < 0.5:
            ends = [0, *sorted(int(n) for n in rng.integers(0, lead[0] + 1, p_n - 1)), lead[0]]
            rows = [slice(*end) for end in pairwise(ends)]

        def layer(P: dj.Partition, grids=grids, ranks=ranks, sizes=(n_in, n_out), bias=bias) -> Any:
            on = {f"P_{name}": P.grid(shape, ranks[name]) for name, shape in grids.items()}
            return nn.DistributedLinear(**on, in_features=sizes[0], out_features=sizes[1], bias=bias)

        def boxes(name: str, n: int, rows=rows, grids=grids, ranks=ranks) -> Boxes:
            cells = zip(ranks[name], np.ndindex(grids[name]), strict=True)
            return {worker: (rows[i], ..., lines(n, grids[name][1])[j]) for worker, (i, j) in cells}

        x, w, b, dy = (
            rng.integers(-5, 6, shape).astype(np.float64)
            for shape in ((*lead, n_in), (n_out, n_in), (n_out,), (*lead, n_out))
        )
        context = f"case {case}: {grids} on {ranks}, {n_in} -> {n_out}, batch {lead} in {rows}, bias {bias}"
        of_x, of_y = boxes("x", n_in), boxes("y", n_out)
        played = play_product(layer, world, cuts(x, of_x), w, b, cuts(dy, of_y), times, gradients)
        y, (dx, dw, db) = x @ w.T + bias * b, gradients(None, dy, x, w)
        assert not differing(played.y, cuts(y, of_y)), context
        assert not differing(played.dx, cuts(dx, of_x)), context
        assert not differing(played.grads[0], cuts(dw, played.params[0])), context
        assert not differing(played.grads[1], cuts(db, played.params[1])), context
        assert sum(w[box].size for box in played.params[0].values()) == w.size, context
        assert sum(b[box].size for box in played.params[1].values()) == bias * b.size, context

"""Values by class of workers: whatever is made of them equals what is made of dictionaries."""

from typing import Any

import numpy as np
import pytest

from distdl_jax.plans.alike import ByClass, derived, of_team, on_grids, representatives


def drawn(rng: np.random.Generator) -> tuple[ByClass[str], dict[int, str]]:
    """Labels on a grid of some workers, in any order: by class, and written out."""
    shape = rng.integers(1, 5, rng.integers(1, 4))
    ranks = (rng.permutation(shape.prod()) if rng.random() < 0.5 else np.arange(shape.prod())) + rng.integers(4)
    labels = [rng.choice(list("abc"), p).tolist() for p in shape]
    cells = ("".join(line[i] for line, i in zip(labels, index, strict=True)) for index in np.ndindex(*shape))
    values = dict(zip(ranks.tolist(), cells, strict=True))
    return ByClass(ranks.tolist(), labels, values.__getitem__), values


def check(values: Any, expected: dict[int, Any]) -> None:
    assert dict(values) == expected and values == expected
    some = [values[worker] for worker in representatives(values)]
    assert set(some) == set(expected.values())
    assert all(worker not in values for worker in (-1, 1000))


@pytest.mark.parametrize("seed", range(60))
def test_values_of_drawn_grids(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = [drawn(rng) for _ in range(3)]
    if seed % 2:
        pairs[1] = pairs[0]
    several, written = zip(*pairs, strict=True)
    union = {worker: value for values in reversed(written) for worker, value in values.items()}
    check(on_grids(*several), union)
    check(derived(lambda worker: several[0][worker] * 2, several[0]), {w: 2 * v for w, v in written[0].items()})
    for other, its in zip(several[1:], written[1:], strict=True):
        assert (several[0] == other) == (written[0] == its)
    both = on_grids(*several)
    pair = {worker: (value, union[worker]) for worker, value in written[1].items()}
    check(derived(lambda worker: (several[1][worker], both[worker]), several[1], both), pair)
    team = tuple(rng.permutation(sorted(written[2]))[:3].tolist())
    check(of_team(both, team), {worker: union[worker] for worker in team})
    assert list(of_team(union, team)) == list(team)

"""JAX's own test harnesses, a function and its arguments each, beside the same function on drawn blocks."""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.internal_test_util import test_harnesses

import distdl_jax as dj
from distdl_jax import PlanError, TensorSpec


def by_group() -> dict[str, list[Any]]:
    """Return the harnesses of each group."""
    groups: dict[str, list[Any]] = {}
    for harness in test_harnesses.all_harnesses:
        groups.setdefault(harness.group_name, []).append(harness)
    return groups


def drawn_grid(rng: random.Random, shape: Sequence[int], workers: int) -> list[int] | None:
    """Return a grid that cuts one or two dimensions, which may be shorter than its workers; None for a whole array."""
    dims = list(range(len(shape)))
    if not dims or rng.random() < 0.15:
        return None
    grid = [1] * len(shape)
    if workers == 4 and len(dims) > 1 and rng.random() < 0.5:
        first, second = rng.sample(dims, 2)
        grid[first] = grid[second] = 2
    else:
        grid[rng.choice(dims)] = workers
    return grid


class Case:
    """A harness on drawn grids, one for each array."""

    def __init__(self, harness: Any, workers: int, seed: int) -> None:
        self.harness, self.workers = harness, workers
        rng = random.Random(f"{harness.fullname} {workers} {seed}")
        self.args = harness.dyn_args_maker(np.random.RandomState(seed))
        self.grids = [drawn_grid(rng, np.shape(x), workers) if hasattr(x, "shape") else None for x in self.args]
        self.text = f"{harness.fullname} on {workers} workers, grids {self.grids}"

    def outcome(self, gather: int | None) -> str:
        """Return "equal", "refused: ..." or "wrong: ..."."""
        if not any(self.grids):
            return "equal"
        try:
            expected = jax.tree.map(
                np.asarray, [_numbers(y) for y in jax.tree.leaves(self.harness.dyn_fun(*self.args))]
            )
        except Exception as error:
            return f"skipped: {error}"

        layouts: list[TensorSpec] = []

        def program() -> list[np.ndarray]:
            P = dj.Partition()
            specs = [
                None if grid is None else TensorSpec(np.shape(x), P.grid(grid))
                for x, grid in zip(self.args, self.grids, strict=True)
            ]
            blocks = [x if spec is None else spec.block(x) for x, spec in zip(self.args, specs, strict=True)]
            f = dj.distribute(self.harness.dyn_fun, tuple(specs), dj.BLOCKS, gather=gather)
            if P.rank == 0:
                layouts.extend(jax.tree.leaves(f.output_specs(*blocks)))
            return [np.asarray(_numbers(y)) for y in jax.tree.leaves(f(*blocks))]

        try:
            of_workers = dj.simulate(self.workers, program)
        except PlanError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"wrong: {type(error).__name__}: {str(error)[:300]}"
        for worker, found in enumerate(of_workers):
            for a, b, spec in zip(found, expected, layouts, strict=True):
                if text := different(a, block_of(b, spec, worker)):
                    return f"wrong: worker {worker}: {text}"
        return "equal"


def block_of(whole: np.ndarray, spec: TensorSpec, worker: int) -> np.ndarray:
    """Return a worker's block of a whole array."""
    box = spec._box(spec.partition.ranks.index(worker))
    return whole[tuple(slice(*each) for each in box)]


def _numbers(y: Any) -> Any:
    if jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(y)
    return y


def different(a: np.ndarray, b: np.ndarray) -> str | None:
    """Return how two arrays differ by more than a few roundings of the larger values."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{a.shape} for {b.dtype}{b.shape}"
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return None if np.array_equal(a, b) else "integers differ"
    eps = float(jnp.finfo(a.dtype).eps)
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(np.isnan(a), np.isnan(b)) or not np.array_equal(
        a[~finite & ~np.isnan(b)], b[~finite & ~np.isnan(b)]
    ):
        return "NaN or infinities differ"
    if not finite.any():
        return None
    error = np.abs(a[finite] - b[finite]).max() / max(1.0, np.abs(b[finite]).max())
    return None if error <= 100 * eps else f"error {error:.1e}"


def reason(refusal: str) -> str:
    """Return why something was refused, without the place, shapes and numbers."""
    text = re.sub(r" of .*? at \S+ ", " ", refusal.removeprefix("refused: "), count=1).split(". Lay ")[0]
    return re.sub(r"\[?[\d, ]*\d\]?|worker \d+|<.*?>", "#", text)[:160]


def cases(rng: random.Random, of_each: int | None, groups: Sequence[str] = ()) -> Iterator[Case]:
    """Yield cases: of each group so many, or all."""
    for group, harnesses in by_group().items():
        if groups and group not in groups:
            continue
        chosen = harnesses if of_each is None else rng.sample(harnesses, min(of_each, len(harnesses)))
        for harness in chosen:
            yield Case(harness, rng.choice([2, 3, 4]), rng.randrange(1000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, help="of each group so many; default: all")
    parser.add_argument("--groups", default="", help="names with commas")
    parser.add_argument("--gather", type=int, help="the limit of whole operands; default: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="first", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    refused: Counter[tuple[str, str]] = Counter()
    drawn = cases(random.Random(options.seed), options.each, [g for g in options.groups.split(",") if g])
    for case in itertools.islice(drawn, options.first, None):
        outcome = case.outcome(options.gather)
        kind = outcome.split(":")[0]
        counts[kind] += 1
        if kind == "refused":
            refused[case.harness.group_name, reason(outcome)] += 1
        if kind == "wrong":
            print(case.text, "\n   ", outcome, flush=True)
        if counts.total() % 100 == 0:
            print("so far:", dict(counts), flush=True)
    for (group, why), count in sorted(refused.items()):
        print(f"refused: {group}: {count}: {why}")
    print(dict(counts))
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()

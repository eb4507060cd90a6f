"""Split images sampled at points, beside what PyTorch gives for whole ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refused
from jobs import ROOT
from matrix.partitions import On, on
from sequential import close, cut

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax.functional.grid_sample import plan_grid_sample
from distdl_jax.plans.shape_dtype import ShapeDtype

RESULTS = dict(np.load(ROOT / "tests/torch_results/functions.npz"))  # see record_functions.py beside it
CASES = {
    "grid_sample 2 bilinear zeros 0 None": on(1, 1, 2, 2),
    "grid_sample 3 bilinear border 1 None": on(1, 2, 1, 2, 1, ranks=(2, 0, 3, 1)),
    "grid_sample 2 bilinear reflection 0 None": on(1, 1, 4, 1),
    "grid_sample 2 nearest reflection 1 None": on(2, 1, 1, 2, ranks=(3, 2, 0, 1)),
    "grid_sample 2 nearest border 0 None": on(1, 1, 1, 2, ranks=(3, 2)),
    "grid_sample 2 bilinear zeros 0 1.5": on(1, 1, 3, 1),
    "grid_sample 2 bilinear reflection 1 2.0": on(1, 1, 1, 4),
}


def check(cases: dict[str, On]) -> None:
    """Output and gradients of image and points; of points that workers along channels share, the whole gradient."""
    P = dj.Partition()
    whole = {name: {key: RESULTS[f"{name}/{key}"] for key in ("x", "grid", "y", "dx", "dgrid")} for name in cases}

    def own(name: str, key: str) -> Any:
        line, array = cases[name], whole[name][key]
        if P.rank not in line.ranks:
            return np.zeros(0)
        if "grid" not in key:
            return cut(array, line, P.rank)
        return cut(np.repeat(array[:, None], line.shape[1], 1), On((*line.shape, 1), line.ranks), P.rank)[:, 0]

    def program(xs: Any, grids: Any, weights: Any) -> Any:
        found = {}
        for name, line in cases.items():
            _, _, mode, padding, aligned, reach = name.split()
            how = {"mode": mode, "padding_mode": padding, "align_corners": aligned == "1"}
            P_x, how["max_displacement"] = line.partition(P), None if reach == "None" else float(reach)

            def sample(x: Any, grid: Any, P_x: Any = P_x, how: Any = how) -> Any:
                return F.grid_sample(x, dj.replicated(grid, P_x, axes=1), P_x, **how)

            y, pullback = jax.vjp(sample, xs[name], grids[name])
            found[name] = (y, *pullback(weights[name]))
        return found

    for of in whole.values():
        of["weights"] = np.cos(np.arange(of["y"].size, dtype=float)).reshape(of["y"].shape)
    arrays = ({name: own(name, key) for name in cases} for key in ("x", "grid", "weights"))
    for name, parts in dj.jit(program)(*arrays).items():
        for key, got in zip(("y", "dx", "dgrid"), parts, strict=True):
            close(got, own(name, key), 1e-12, f"{key} of {name}")


@pytest.mark.simulated(4)
def test_beside_pytorch() -> None:
    """In two and three dimensions, everything split, uneven and empty blocks, any workers."""
    check(CASES)


@pytest.mark.world(2)
def test_over_mpi() -> None:
    name = "grid_sample 2 nearest border 0 None"
    check({name: on(1, 1, 1, 2)})


@pytest.mark.simulated(4)
def test_grids_of_affine_maps_are_those_of_pytorch() -> None:
    P, theta = dj.Partition(), RESULTS["affine_grid/theta"]
    for aligned in (False, True):
        got = F.affine_grid(theta, P.grid([1, 1, 2, 2, 1]), (2, 1, 3, 4, 2), aligned)
        np.testing.assert_allclose(
            got, cut(RESULTS[f"affine_grid/{int(aligned)}"], on(1, 2, 2, 1, 1), P.rank), atol=1e-15
        )


@pytest.mark.simulated(2)
def test_beyond_the_halo_is_nan_and_labels_stay_integers() -> None:
    """A point at the largest displacement is read, however rounded; one that reads beyond the halo is NaN."""
    P_x = dj.Partition().grid([1, 1, 2])
    x = 1 + 5 * P_x.rank + np.arange(5.0, dtype=np.float32)[None, None]  # 1 to 10
    base = F.affine_grid(np.eye(1, 2, dtype=np.float32)[None], P_x, (1, 1, 10))

    def shifted(x: Any, base: Any, by: float) -> Any:
        return F.grid_sample(x, base + np.float32(by / 5), P_x, max_displacement=2)[0, 0]

    # Arguments: of constants alone, XLA of jaxlib 0.12 can't compile the program.
    there, back, far = dj.jit(lambda *args: [shifted(*args, by) for by in (2, -2, 4.5)])(x, base)
    np.testing.assert_allclose(there, [[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]][P_x.rank], atol=1e-5)
    np.testing.assert_allclose(back, [[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]][P_x.rank], atol=1e-5)
    # What is outside of the tensor is 0, however far.
    np.testing.assert_allclose(far, [[5.5, 6.5, 7.5, np.nan, np.nan], [5, 0, 0, 0, 0]][P_x.rank], atol=1e-4)
    labels = F.grid_sample(x.astype(np.int16), base + np.float32(0.8), P_x, "nearest")[0, 0]
    assert labels.dtype == np.int16
    np.testing.assert_array_equal(labels, [[5, 6, 7, 8, 9], [10, 0, 0, 0, 0]][P_x.rank])
    half = F.grid_sample(jnp.asarray(x, jnp.bfloat16), base.astype(jnp.bfloat16), P_x)
    assert half.dtype == jnp.bfloat16


def test_plans_and_refusals() -> None:
    """A bounded displacement moves a halo, whatever the number of workers; bad arguments are refused on all."""

    def blocks(P: dj.Partition, *lengths: int) -> dict[int, ShapeDtype]:
        return dict.fromkeys(P.ranks, ShapeDtype(lengths, np.dtype(np.float32)))

    P = dj.planning_world(1024).grid([1, 1, 1024, 1])
    plan = plan_grid_sample(blocks(P, 1, 3, 4, 8), blocks(P, 1, 4, 8, 2), P, max_displacement=2.5)
    assert plan.output(5).shape == (1, 3, 4, 8)
    assert plan.fetch.output(5).shape == (1, 3, 4 + 2 * 3, 8)
    assert plan_grid_sample(blocks(P, 1, 3, 4, 8), blocks(P, 1, 4, 8, 2), P).fetch.output(5).shape == (1, 3, 4096, 8)

    def planned(P: dj.Partition, *lengths: int, **options: Any) -> Any:
        P = P.grid([1, 1, 2, 1])
        return plan_grid_sample(blocks(P, 1, 3, 4, 8), blocks(P, *lengths), P, **options)

    theta = np.eye(2)[None]
    refused(
        2,
        ("`grid` must be 1 x lengths of 2 feature dimensions x 2 on", dj.PlanError, lambda P: planned(P, 1, 4, 8, 3)),
        ("must be one of 'bilinear', 'nearest'", ValueError, lambda P: planned(P, 1, 4, 8, 2, mode="cubic")),
        ("one for each of 2 feature", ValueError, lambda P: planned(P, 1, 4, 8, 2, max_displacement=-1.0)),
        ("must hold a length for each", ValueError, lambda P: F.affine_grid(theta, P.grid([1, 1, 2]), (2, 3))),
        ("n x 1 x 2", ValueError, lambda P: F.affine_grid(theta, P.grid([1, 1, 2]), (1, 1, 3))),
    )

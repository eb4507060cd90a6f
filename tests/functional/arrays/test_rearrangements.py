"""Rolls, windows and shuffled pixels beside the same of whole tensors, however these are split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refused
from functional.arrays.beside import beside
from matrix.partitions import On, on
from sequential import Beside, check_beside, cut

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax.functional.repartition import plan_roll
from distdl_jax.functional.windows_and_pixels import KINDS, plan_pixels, plan_window_partition
from distdl_jax.plans.shape_dtype import ShapeDtype


def roll(sizes: Any, P_x: On, shift: Any, axis: Any) -> Beside:
    return beside(
        f"roll by {shift} along {axis}",
        sizes,
        P_x,
        lambda x, P: F.roll(x, P, shift, axis),
        lambda x: jnp.roll(x, shift, axis),
        y_sizes=sizes,
    )


def cut_into_windows(x: Any, lengths: dict[int, int]) -> Any:
    """The numbers of windows behind the batch, then what is in a window."""
    shape, counts, rest = [], [], []
    for d, n in enumerate(x.shape):
        if d in lengths:
            counts.append(len(shape))
            shape.append(n // lengths[d])
        rest.append(len(shape))
        shape.append(lengths.get(d, n))
    front = [] if 0 in lengths else [rest.pop(0)]
    return x.reshape(shape).transpose(*front, *counts, *rest)


def windows(sizes: Any, P_x: On, P_y: On, lengths: dict[int, int]) -> Beside:
    arguments = tuple(lengths.values()), tuple(d - len(sizes) for d in lengths)
    return beside(
        f"windows {lengths}",
        sizes,
        P_x,
        lambda x, P: F.window_partition(x, P, *arguments),
        lambda x: cut_into_windows(x, lengths),
        P_y,
    )


def there_and_back(sizes: Any, P_x: On, window: Any, axes: Any = None) -> Beside:
    """With all that is in a window reversed in between, and a roll behind."""

    def reversed_inside(x: Any, P: dj.Partition) -> Any:
        y = F.window_partition(x, P, window, axes)
        return F.roll(F.window_reverse(jnp.flip(y, range(3, y.ndim)), P, axes), P, 1, 1)

    along = [axis % len(sizes) for axis in axes or range(1, len(sizes) - 1)]
    lengths = dict(zip(along, np.broadcast_to(window, len(along)).tolist(), strict=True))

    def whole(x: Any) -> Any:
        for d in range(1, x.ndim):
            windows = x.reshape(*x.shape[:d], -1, lengths.get(d, x.shape[d]), *x.shape[d + 1 :])
            x = jnp.flip(windows, d + 1).reshape(x.shape)
        return jnp.roll(x, 1, 1)

    return beside(f"there and back {lengths}", sizes, P_x, reversed_inside, whole)


def shuffled(x: Any, r: tuple[int, ...], factors_first: bool = False) -> Any:
    """Channels of n x c x features to features, by PyTorch's formula or TensorFlow's."""
    n, c, *lengths = x.shape
    channels = (c // int(np.prod(r)),)
    x = x.reshape(n, *((*r, *channels) if factors_first else (*channels, *r)), *lengths)
    x = jnp.moveaxis(x, len(r) + 1, 1) if factors_first else x
    return x.transpose(_to_features(r)).reshape(n, *channels, *(m * k for m, k in zip(lengths, r, strict=True)))


def unshuffled(y: Any, r: tuple[int, ...], factors_first: bool = False) -> Any:
    small = [m // k for m, k in zip(y.shape[2:], r, strict=True)]
    parts = y.reshape(*y.shape[:2], *(n for pair in zip(small, r, strict=True) for n in pair))
    x = parts.transpose(np.argsort(_to_features(r)))
    return (jnp.moveaxis(x, 1, len(r) + 1) if factors_first else x).reshape(len(y), -1, *small)


def _to_features(r: tuple[int, ...]) -> list[int]:
    """From n x c x factors x features to n x c x features, each with its factor behind it."""
    return [0, 1, *(place for d in range(2, 2 + len(r)) for place in (d + len(r), d))]


def pixels(name: str, sizes: Any, P_x: On, r: Any, channel_axis: int = 1) -> Beside:
    dims = len(sizes) - 2
    factors = tuple(np.broadcast_to(r, dims).tolist())
    first = name in ("depth_to_space", "space_to_depth")
    formula = shuffled if name in ("pixel_shuffle", "depth_to_space") else unshuffled
    return beside(
        f"{name} by {r}, channels in {channel_axis}",
        sizes,
        P_x,
        lambda x, P: getattr(F, name)(x, P, r, channel_axis=channel_axis),
        lambda x: jnp.moveaxis(formula(jnp.moveaxis(x, channel_axis, 1), factors, first), 1, channel_axis),
    )


CASES = (
    roll((5, 7), on(2, 2, ranks=(3, 1, 0, 2)), (-3, 9), (0, -1)),
    roll(([0, 3, 2], 2), on(3, 1), 2, 0),
    roll((2, [3, 0, 1, 4]), on(1, 4), (1, 2), 1),
    roll((2, 3), on(2, 1), -1, (1, 0)),
    windows((2, 4, 6, 3), on(1, 2, 2, 1), on(1, 2, 2, 1, 1, 1), {1: 2, 2: 3}),
    windows((2, 9, 4, 2), on(2, 2, 1, 1, ranks=(3, 1, 2, 0)), on(2, 2, 1, 1, 1, 1, ranks=(3, 1, 2, 0)), {1: 3, 2: 2}),
    windows((1, 2, 4, 6), on(1, 2, 1, 2), on(1, 1, 2, 2, 1, 1, ranks=(0, 2, 1, 3)), {2: 4, 3: 2}),
    windows((6, 2), on(4, 1), on(4, 1, 1), {0: 2}),
    there_and_back((2, 6, 4, 1), on(1, 2, 2, 1), 2),
    there_and_back((1, 2, [1, 5], 4), on(1, 1, 2, 1), (3, 2), (2, -1)),
    pixels("pixel_shuffle", (2, 8, 3, 2), on(1, 2, 2, 1), 2),
    pixels("pixel_shuffle", (1, 3, 2, 18), on(1, 2, 2, 1), 3, 3),
    pixels("pixel_shuffle", (1, 6, 3), on(1, 1, 4), 3),
    pixels("pixel_unshuffle", (1, 2, 6, 4), on(1, 2, 2, 1, ranks=(2, 0, 3, 1)), (3, 2)),
    pixels("pixel_unshuffle", (2, 1, 2, 4, 2), on(1, 1, 2, 2, 1), 2),
    pixels("depth_to_space", (1, 3, 2, 8), on(1, 2, 1, 2), 2, -1),
    pixels("space_to_depth", (1, 6, 4, 2), on(1, 2, 1, 2), (3, 2), -1),
    pixels("space_to_depth", (1, 2, [3, 5], 2), on(1, 1, 2, 1), 2),
)


@pytest.mark.simulated(4)
def test_beside_the_whole() -> None:
    """Values and gradients: even, uneven, unbalanced and empty blocks, channels split, any workers."""
    check_beside(CASES)


@pytest.mark.world(2)
def test_over_mpi() -> None:
    check_beside([case for case in CASES if max(case.P_x.ranks) < 2])


def mask_of_swin(extent: tuple[int, int], window: int, shift: int) -> Any:
    """As the authors' program makes it: regions of the image, numbered, and cut into windows."""
    image, number = np.zeros((1, *extent, 1), int), 0
    parts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for rows in parts:
        for columns in parts:
            image[:, rows, columns] = number
            number += 1
    tokens = cut_into_windows(jnp.asarray(image), {1: window, 2: window}).reshape(1, *(n // window for n in extent), -1)
    return np.asarray(tokens[..., None] == tokens[..., None, :])


@pytest.mark.simulated(4)
def test_mask_of_shifted_windows_and_other_dtypes() -> None:
    """The mask is the authors', on workers without windows too; and integers and bools move."""
    P = dj.Partition()
    P_x, extent = P.grid([1, 2, 2, 1]), (6, 4)
    x = np.zeros((2, 3, 2, 1), bool)
    mask = F.window_mask(x, P_x, 2, 1)
    want = cut(np.repeat(mask_of_swin(extent, 2, 1), 2, 0), on(1, 2, 2, 1, 1), P.rank)
    np.testing.assert_array_equal(mask, np.reshape(want, (-1, 4, 4)))
    # Without a batch, one dimension: of 2 windows on 3 workers, and one outside.
    P_line = P.grid([3, 1])
    mask = F.window_mask(np.zeros((2, 1)) if P_line.active else np.zeros(0), P_line, 3, 2, 0)
    regions = np.array([0, 1, 1])
    whole = np.stack([np.ones((3, 3), bool), regions[:, None] == regions])
    np.testing.assert_array_equal(mask, whole[P.rank : P.rank + 1] if P.rank < 2 else whole[:0])
    whole = np.arange(48).reshape(2, 6, 4, 1) % 5
    names = ("bool", "int8", "bfloat16", "complex64")
    xs = [cut(whole, on(1, 2, 2, 1), P.rank).astype(jnp.dtype(name)) for name in names]
    moved = dj.jit(lambda xs: [F.roll(F.space_to_depth(x, P_x, 2), P_x, 1, 1) for x in xs])(xs)
    want = cut(np.roll(np.asarray(unshuffled(whole.transpose(0, 3, 1, 2), (2, 2))), 1, 2), on(1, 1, 2, 2), P.rank)
    for name, x, y in zip(names, xs, moved, strict=True):
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(np.moveaxis(np.asarray(y, x.dtype), -1, 1), want.astype(x.dtype), name)


def images(lengths: tuple[int, ...], P: dj.Partition) -> dict[int, ShapeDtype]:
    spec = dj.TensorSpec(lengths, P)
    return {worker: ShapeDtype(spec.shape_on(worker), np.dtype(float)) for worker in P.ranks}


def test_no_more_moves_than_has_to() -> None:
    """Nothing where blocks hold whole windows or pixels; of a roll, what crosses a block's edge."""
    P = dj.planning_world(64)
    P_last, P_first = P.grid([1, 8, 8, 1]), P.grid([1, 1, 8, 8])
    whole = [plan_window_partition(images((2, 32, 48, 3), P_last), P_last, 2)]
    whole += [plan_pixels(kind, images((2, 8, 16, 32), P_first), P_first, 2) for kind in KINDS]
    cut_off = plan_window_partition(images((2, 36, 48, 3), P_last), P_last, 6)
    for worker in P.ranks:
        assert all(plan.split.moved.part(worker) is plan.join.moved.part(worker) is None for plan in whole)
    assert any(cut_off.split.moved.part(worker) is not None for worker in P.ranks)
    (step,) = plan_roll(images((1, 32, 48, 3), P_last), P_last, (1, -2), (1, 2)).steps(9)
    assert sorted(message.size for message in step.recvs) == [1 * 2 * 3, 1 * 4 * 3, 3 * 2 * 3]


def test_what_does_not_fit_is_refused_on_all_workers() -> None:
    """And plans need no other worker."""

    def planned(P: dj.Partition, window: Any, axes: Any = None) -> Any:
        return plan_window_partition(images((1, 6, 8, 2), P.grid([1, 2, 2, 1])), P.grid([1, 2, 2, 1]), window, axes)

    assert planned(dj.planning_world(4), 2).output(3).shape == (1, 1, 2, 2, 2, 2)
    refused(
        4,
        ("must divide `x` (of shape 1 x 6 x 8 x 2), but dimension 1 is no", dj.PlanError, lambda P: planned(P, 4)),
        ("one for each of the dimensions (1, 2)", ValueError, lambda P: planned(P, (2, 2, 2))),
        ("1 or more", ValueError, lambda P: planned(P, 0)),
        ("names dimension 4", ValueError, lambda P: planned(P, 2, (1, 4))),
    )
    x = jax.numpy.zeros(3)
    refused(
        2,
        ("must have the same length", ValueError, lambda P: F.roll(x, P.grid([2, 1]), (1, 2), (0, 1, 0))),
        ("must be an integer or a sequence", TypeError, lambda P: F.roll(x, P.grid([2]), 1.5, 0)),
        ("the channels, 1", ValueError, lambda P: F.pixel_shuffle(x, P.grid([2, 1, 1]), 2, (1, 2))),
    )

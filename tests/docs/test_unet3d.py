"""The 3-D example: its solver against numpy, its blocks against whole tensors."""

from itertools import pairwise
from types import ModuleType

import jax
import numpy as np
import pytest
from blocks import block_of
from jobs import ROOT

import distdl_jax as dj


@pytest.fixture(scope="module")
def examples() -> tuple[ModuleType, ModuleType]:
    """Import the modules of the solver and of the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import unet3d
        import wave3d
    return wave3d, unet3d


def leapfrog(u: np.ndarray, c: np.ndarray, size: int, times: list[int]) -> list[np.ndarray]:
    """Solve on the whole volume, in numpy: fourth order in space, steps of 0.2, a sponge of size / 10."""
    depth = np.minimum(np.arange(size), np.arange(size)[::-1])
    line = np.maximum(size / 10 - depth, 0) / (size / 10)
    sponge = 0.2 * 0.4 * np.maximum(np.maximum(line[:, None, None], line[None, :, None]), line[None, None, :]) ** 2
    before, found = u, []
    for start, stop in pairwise([0, *times]):
        for _ in range(start, stop):
            wide = np.pad(u, 2)
            laplacian = 0
            for offset, weight in zip(range(-2, 3), (-1 / 12, 4 / 3, -5 / 2, 4 / 3, -1 / 12), strict=True):
                laplacian += weight * sum(np.roll(wide, -offset, axis) for axis in range(3))[2:-2, 2:-2, 2:-2]
            u, before = (2 * u - (1 - sponge) * before + (0.2 * c) ** 2 * laplacian) / (1 + sponge), u
        found.append(u)
    return found


@pytest.mark.simulated(4)
def test_waves_are_those_of_the_whole_volume(examples: tuple[ModuleType, ModuleType]) -> None:
    """On blocks of 6 + 5 cells along two dimensions, in float64: medium, pulses, and the pressure at two times."""
    (wave3d, _), size, times = examples, 11, (30, 47)
    P = dj.Partition().grid([2, 1, 2])
    alone = dj.Partition().grid([1, 1, 1], [P.rank])
    split, whole = (wave3d.WaveSolver(on, size, "float64") for on in (P, alone))
    c, u = np.asarray(whole.medium(3)), np.asarray(whole.pulses(3))
    assert c.std() > 0.01 and np.abs(u).max() > 0.1
    box = tuple(slice(*bounds) for bounds in dj.TensorSpec((size,) * 3, P).box)
    np.testing.assert_array_equal(split.medium(3), c[box])
    np.testing.assert_allclose(split.pulses(3), u[box], rtol=1e-14)
    found = split.snapshots(split.medium(3), split.pulses(3), times)
    for got, want in zip(found, leapfrog(u, c, size, list(times)), strict=True):
        np.testing.assert_allclose(got, want[box], rtol=0, atol=1e-13)


@pytest.mark.simulated(4)
def test_enlarging_is_exact_where_blocks_do_not_divide(examples: tuple[ModuleType, ModuleType]) -> None:
    """5 voxels over 2 workers are 3 + 2, and twice as many 5 + 5. The transposed convolution, and its adjoint."""
    _, unet3d = examples
    network = unet3d.UNet3d(unet3d.volume_partition(dj.Partition(), 4), (2, 4))
    assert network.P.shape == (1, 1, 2, 2, 1)
    layer = network.convolutions[4]
    specs = (layer.param_specs(), dj.TensorSpec((1, 4, 5, 3, 2), network.P))
    large = dj.TensorSpec((1, 2, 10, 6, 4), network.P)
    draw = np.random.default_rng(0).normal
    whole, dy = jax.tree.map(lambda spec: draw(size=spec.global_shape), specs), draw(size=large.global_shape)

    y, adjoint = jax.vjp(layer, *jax.tree.map(lambda a, spec: jax.device_put(block_of(a, spec)), whole, specs))
    weight, bias, x = whole[0]["weight"], whole[0]["bias"], whole[1]
    want = np.zeros(large.global_shape)
    for place in np.ndindex(2, 2, 2):
        every = (slice(None), slice(None), *(slice(k, None, 2) for k in place))
        want[every] = np.einsum("bidhw,io->bodhw", x, weight[:, :, *place])
    np.testing.assert_allclose(y, block_of(want + bias.reshape(-1, 1, 1, 1), large), rtol=0, atol=1e-13)
    _, of_x = adjoint(jax.device_put(block_of(dy, large)))
    sums = np.einsum("bodkhmwl,iokml->bidhw", dy.reshape(1, 2, 5, 2, 3, 2, 2, 2), weight)
    np.testing.assert_allclose(of_x, block_of(sums, specs[1]), rtol=0, atol=1e-13)

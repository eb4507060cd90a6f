"""Random convolutions and poolings on four and twelve threads: all gradients too, against JAX on the whole array."""

import math
import os
from itertools import accumulate, pairwise

import numpy as np
import pytest
from convolution.draws import Conv, Draw, Pool
from convolution.programs import check
from matrix.partitions import On

from distdl_jax.kernels import problem
from distdl_jax.kernels.cpu import choice, convolution
from distdl_jax.kernels.cpu.onednn.shared_library import version
from distdl_jax.nn import conv_plan
from distdl_jax.settings import Settings

LONG = 10 if os.environ.get("DISTDL_JAX_TEST_LONG", "0") not in ("", "0") else 1
TOGETHER = 8


def drawn(case: int, workers: int) -> Conv | Pool:
    """Two convolutions to one pooling; little work, so that little has to be compiled."""
    draw = Draw([3, case], workers)
    return draw.pool() if case % 3 == 2 else draw.conv()


@pytest.mark.simulated(4, 12)
@pytest.mark.limit(300)
@pytest.mark.parametrize("program", range(2 * LONG))
def test_random_layers(program: int, world_size: int) -> None:
    """8 layers to a program, or 4: blocks of output, input, weight and bias gradients to 1e-12 in float64."""
    together = TOGETHER if world_size == 4 or LONG > 1 else TOGETHER // 2
    check([drawn(case, world_size) for case in range(together * program, together * (program + 1))])


@pytest.mark.simulated(4)
@pytest.mark.limit(300)
@pytest.mark.parametrize("program", range(2 * LONG - 1))
def test_random_layers_of_four_dimensions(program: int) -> None:
    """As above: two convolutions and a pooling."""
    draws = [Draw([22, program, case], 4, dims=(4,)) for case in range(3)]
    check([draws[0].conv(), draws[1].conv(), draws[2].pool()])


@pytest.mark.skipif(version() == "none", reason="oneDNN's convolutions are not compiled here")
@pytest.mark.simulated(4)
@pytest.mark.limit(300)
@pytest.mark.parametrize("program", range(2 * LONG - 1))
def test_random_convolutions_by_onednn(program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 layers in float32, with all that oneDNN can compute by it: exactly, since all numbers are integers."""
    for module in (problem, choice, convolution):
        monkeypatch.setattr(module, "current_settings", lambda: Settings(tuning="off", onednn="always"))
    draws = [Draw([5, case], 4).conv() for case in range(TOGETHER * program, TOGETHER * (program + 1))]
    check(draws, "float32")


def with_large_blocks(seed: int) -> Conv:
    """A convolution with uneven blocks along one or two dimensions, each at least as long as the kernel reaches."""
    rng = np.random.default_rng([7, seed])
    dims = int(rng.integers(1, 4))
    grid = [int(n) for n in rng.permutation([(2, 2, 1), (int(rng.integers(2, 5)), 1, 1)][seed % 2][:dims])]
    circular = bool(rng.random() < 0.4)

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(n) for n in rng.integers(low, high + 1, dims))

    kernel, dilation = each(1, 4), each(1, 2)
    kernel = tuple(max(k, 2) if p > 1 else k for p, k in zip(grid, kernel, strict=True))
    lengths = [[int(n) for n in rng.integers(8, 12, p)] for p in grid]
    pairs = tuple((int(low), int(high)) for low, high in rng.integers(0, 3, (dims, 2)))
    groups = int(rng.choice([1, 1, 2]))
    channels, out_channels = groups * int(rng.choice([1, 3, 8, 16])), groups * int(rng.choice([1, 4, 16]))
    return Conv(
        world=4,
        P_x=On((1, 1, *grid), tuple(range(math.prod(grid)))),
        kernel=kernel,
        stride=tuple(1 if p > 1 and rng.random() < 0.7 else n for p, n in zip(grid, each(1, 2), strict=True)),
        dilation=dilation,
        padding=pairs,
        pairs=pairs,
        batch=2,
        channels=channels,
        sizes=tuple(map(sum, lengths)),
        cuts=([(0, 2)], [(0, channels)], *(list(pairwise(accumulate(its, initial=0))) for its in lengths)),
        P_y=None,
        P_W=None,
        out_channels=out_channels,
        groups=groups,
        bias=bool(rng.random() < 0.5),
        mode="circular" if circular else "zeros",
    )


@pytest.mark.skipif(version() == "none", reason="oneDNN's convolutions are not compiled here")
@pytest.mark.simulated(4)
@pytest.mark.limit(300)
@pytest.mark.parametrize("program", range(5 * LONG - 4))
def test_halos_are_not_joined_to_blocks(program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above; of 8 layers at least 4 hand the block and its neighbours' entries to oneDNN as they are."""
    for module in (problem, choice, convolution):
        monkeypatch.setattr(module, "current_settings", lambda: Settings(tuning="off", onednn="always"))
    found, plan = [], conv_plan.plan_split_halo
    monkeypatch.setattr(conv_plan, "plan_split_halo", lambda movement: found.append(plan(movement)) or found[-1])
    check([with_large_blocks(case) for case in range(TOGETHER * program, TOGETHER * (program + 1))], "float32")
    assert sum(plan is not None for plan in found) >= 4

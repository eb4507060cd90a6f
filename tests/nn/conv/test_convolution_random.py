"""Random convolutions and poolings on four and twelve threads: all gradients too, against JAX on the whole array."""

import os

import pytest
from convolution.draws import Conv, Draw, Pool
from convolution.programs import check

from distdl_jax.kernels.onednn_library import version

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
def test_random_convolutions_by_onednn(program: int) -> None:
    """8 layers in float32, with all that oneDNN can compute by it: exactly, since all numbers are integers."""
    draws = [Draw([5, case], 4).conv() for case in range(TOGETHER * program, TOGETHER * (program + 1))]
    check(draws, "float32")

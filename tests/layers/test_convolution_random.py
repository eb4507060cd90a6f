"""Random convolutions and poolings on twelve threads: forward and all gradients, against JAX on the whole array."""

import os

import pytest
from convolution.draws import Conv, Draw, Pool
from convolution.programs import check

from distdl_jax.nn.local import conv_choice, conv_forms
from distdl_jax.onednn.compiled import version
from distdl_jax.settings import Settings

LONG = 10 if os.environ.get("DISTDL_JAX_TEST_LONG", "0") not in ("", "0") else 1
WORKERS, TOGETHER = 12, 8


def drawn(case: int) -> Conv | Pool:
    """Two convolutions to one pooling; little work, so that little has to be compiled."""
    draw = Draw([3, case], WORKERS)
    return draw.pool() if case % 3 == 2 else draw.conv()


@pytest.mark.simulated(WORKERS)
@pytest.mark.limit(300)
@pytest.mark.parametrize("program", range(5 * LONG))
def test_random_layers(program: int) -> None:
    """40 layers, 8 to a program: blocks of output, input, weight and bias gradients to 1e-12 in float64."""
    check([drawn(case) for case in range(TOGETHER * program, TOGETHER * (program + 1))])


@pytest.mark.skipif(version() == "none", reason="oneDNN's convolutions are not compiled here")
@pytest.mark.simulated(WORKERS)
@pytest.mark.limit(300)
@pytest.mark.parametrize("program", range(2 * LONG - 1))
def test_random_convolutions_by_onednn(program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 layers in float32, with all that oneDNN can compute by it: exactly, since all numbers are integers."""
    for module in (conv_choice, conv_forms):
        monkeypatch.setattr(module, "current_settings", lambda: Settings(tuning="off", onednn="always"))
    draws = [Draw([5, case], WORKERS).conv() for case in range(TOGETHER * program, TOGETHER * (program + 1))]
    check(draws, "float32")

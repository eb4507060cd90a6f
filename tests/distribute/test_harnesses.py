"""A sample of JAX's own harnesses on drawn blocks: equal to one process, or refused in words; never wrong."""

from __future__ import annotations

import random

import jax
import pytest
from distribute.harnesses import cases


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("ignore")
def test_a_sample(seed: int) -> None:
    rng = random.Random(seed)
    with jax.enable_x64(True):
        drawn = rng.sample(list(cases(rng, 1)), 15)
        outcomes = {case.text: case.outcome(None) for case in drawn}
    assert not {text: outcome for text, outcome in outcomes.items() if not outcome.startswith("equal")}

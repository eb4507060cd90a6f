"""Programs that are drawn are never refused, and give what plain JAX gives on the whole tensors, to 1e-10."""

import pytest
from drawn_networks import try_program
from launcher.settings import long_run


@pytest.mark.limit(300)
@pytest.mark.parametrize("seed", range(300 if long_run() else 12))
def test_a_healthy_program_is_not_refused(seed: int) -> None:
    """Under dj.check and dj.jit of dj.value_and_grad, on 1 to 4 simulated workers."""
    try_program(seed)

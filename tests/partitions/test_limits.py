"""Sizes for which there is no memory are refused in a sentence, before anything is allocated."""

import os
import subprocess
import sys

import pytest
from jobs import patience

PROGRAM = """
import resource
import jax, jax.numpy as jnp, numpy as np
import distdl_jax as dj
from distdl_jax import functional as F, nn

HUGE = 2**31
P = dj.planning_world(4)
grid, image = P.grid([1, 2, 2]), dj.TensorSpec((4, 3, 8), P.grid([1, 2, 2]))

def simulated(function):
    return lambda: dj.simulate(1, function)

cases = {
    "`n` of planning_world": lambda: dj.planning_world(HUGE),
    "`n` of simulate": lambda: dj.simulate(HUGE, lambda: 0),
    "`parts`": lambda: dj.graphs.order_nodes([[0.0, 0.0], [1.0, 0.5]], HUGE),
    "`ranks`": lambda: P.create_partition_inclusive(range(HUGE)),
    "`ranks` of grid": lambda: P.grid([4], range(HUGE)),
    "`index`": lambda: grid.slice(0, range(HUGE)),
    "`scale_factor`": lambda: nn.DistributedUpsample(grid, scale_factor=HUGE).output_spec(image),
    "`scale_factor` of nearest": lambda: nn.DistributedUpsample(grid, scale_factor=1e9, mode="nearest")
        .output_spec(image),
    "`size`": lambda: nn.DistributedUpsample(grid, size=HUGE).output_spec(image),
    "`output_size`": lambda: nn.DistributedAdaptiveAvgPool(grid, HUGE),
    "`padding`": lambda: nn.DistributedPad(grid, [(HUGE, 0)]).output_spec(image),
    "`num_layers`": lambda: nn.DistributedGRU(P.grid([2, 1, 2]), 3, 5, HUGE),
    "`n_power_iterations`": lambda: nn.SpectralNorm(nn.DistributedLayerNorm(P.grid([2, 2]), 3),
                                                    n_power_iterations=HUGE),
    "`size` of affine_grid": simulated(
        lambda: F.affine_grid(jnp.ones((1, 1, 2)), dj.Partition().grid([1, 1, 1]), (1, 1, HUGE))),
    "`halos`": simulated(
        lambda: F.halo_exchange(jnp.ones(3), dj.Partition().grid([1]), [(HUGE, HUGE)], periodic=(True,))),
}

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)
for name, work in cases.items():
    try:
        work()
    except (dj.InvalidArgumentError, dj.PlanError) as error:
        print("refused" if name.split()[0] in str(error) and "at most" in str(error) or "1 to" in str(error)
              or "more than" in str(error) else f"{name}: {error}")
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}")
    else:
        print(f"{name}: nothing")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="The program reads what it uses there.")
def test_sizes_beyond_memory_are_refused() -> None:
    """In a process that may take 1 GiB more than it has."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=patience(100))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"refused"}, done.stdout

"""Random operators on twelve workers: forward and adjoint are exactly those of the reference.

On threads, since it is about plans, and twelve processes take long to start. Each program holds many operators; a
failing one is named with all that it takes to make it again.
"""

from dataclasses import replace

import numpy as np
import pytest
from launcher.examples import examples
from matrix.adjoints import check_exactly
from matrix.drawn_cases import (
    WORKERS,
    random_all_sum_reduce,
    random_all_to_all,
    random_halo_exchange,
    random_repartition,
    random_replication,
)

IN_ONE_PROGRAM = 6

GENERATORS = {
    "broadcast and sum_reduce": random_replication,
    "all_sum_reduce": random_all_sum_reduce,
    "repartition": random_repartition,
    "all_to_all": random_all_to_all,
    "halo_exchange": random_halo_exchange,
}


@pytest.mark.simulated(WORKERS)
@pytest.mark.limit(1200)
@pytest.mark.parametrize("name", GENERATORS)
def test_random(name: str) -> None:
    generate = GENERATORS[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    for start in range(0, examples(IN_ONE_PROGRAM), IN_ONE_PROGRAM):
        drawn = [generate(rng) for _ in range(IN_ONE_PROGRAM)]
        check_exactly([(replace(case, name=f"{start + n}: {case}"), "float64") for n, case in enumerate(drawn)])

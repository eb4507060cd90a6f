"""Processor seconds: whose they are, and when a file is over its budget."""

import subprocess
import sys

from launcher.costs import Costs
from launcher.slowdown import USUAL_COST, Slowdown

BURN = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"]


def test_what_a_world_has_cost_is_no_plain_test_s() -> None:
    costs = Costs(Slowdown())
    before = costs.of_plain()
    with costs.reaping():
        subprocess.run(BURN, check=True)
    assert costs.of_plain() - before < 0.2
    subprocess.run(BURN, check=True)
    assert costs.of_plain() - before > 0.25


def test_the_budget_grows_where_starts_cost_more() -> None:
    """By the cheapest of them: others may have more to collect."""
    slowdown = Slowdown()
    for cost in (3 * USUAL_COST, 2 * USUAL_COST):
        slowdown.started(cost)
    assert slowdown.processor == 2
    slowdown.started(USUAL_COST / 2)
    assert slowdown.processor == 1

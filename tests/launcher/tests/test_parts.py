"""Parts of the launcher that need no run of their own: its clock, stacks, and the environment of what it starts."""

import math
import time

from launcher import mpiexec
from launcher.slowdown import USUAL_START, Slowdown, cores
from launcher.stacks import merge, ranks_text, shorten


def test_limits_grow_with_the_slowest_start_of_the_run() -> None:
    slowdown = Slowdown()
    assert slowdown.factor() == 1
    slowdown.starting[2] = 2, time.monotonic() - 3 * USUAL_START * math.ceil(2 / cores())
    assert 3 <= slowdown.factor() < 4  # while the start is under way
    slowdown.end(2)
    assert 3 <= slowdown.factor() < 4
    slowdown.begin(1, 1)
    slowdown.end(1)
    assert 3 <= slowdown.factor() < 4


def test_ranks_in_words() -> None:
    assert ranks_text([2], 4) == "rank 2 of 4"
    assert ranks_text([3, 0, 1], 4) == "ranks 0-1, 3 of 4"
    assert ranks_text(range(4), 4) == "all 4 ranks"


def test_stacks_are_shortened_and_merged() -> None:
    dump = 'Thread 0x00007f (most recent call first):\n  File "/x/launcher/worker.py", line 9 in _leave_with_parent\n\n'
    dump += 'Current thread 0x00008f (most recent call first):\n  File "/x/test_a.py", line 3 in test_a\n'
    dump += '  File "/y/_pytest/python.py", line 1 in call\n'
    short = 'Current thread (most recent call first):\n  File "/x/test_a.py", line 3 in test_a'
    assert shorten(dump) == short
    assert merge({0: short, 1: short, 2: "other"}, 3) == (
        f"--- stack of ranks 0-1 of 3 ---\n{short}\n\n--- stack of rank 2 of 3 ---\nother"
    )


def test_the_environment_of_an_mpi_process_is_not_passed_on() -> None:
    leaked = {"PMI_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "x", "PRTE_X": "y"}
    own = {"PATH": "/bin", "OMPI_MCA_btl": "self,sm", "PRTE_MCA_rmaps": "x"}
    assert mpiexec.clean(leaked | own) == own

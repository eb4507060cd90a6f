"""The launcher, run on small test files in processes of their own: what passes, fails, hangs and dies, and how."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher import mpiexec
from launcher.settings import PREFIX

FOLDER = Path(__file__).parents[2]  # of the package `launcher`
PATIENCE = 900  # seconds for what ends by itself

pytestmark = pytest.mark.limit(PATIENCE)

HEAD = """
import os, signal, sys, time, warnings
import pytest
from mpi4py import MPI
world = MPI.COMM_WORLD
def wait(request):  # without keeping a core busy
    while not request.Test():
        time.sleep(0.02)
"""
IN_TWO = HEAD + "pytestmark = pytest.mark.world(2)\n"

OUTCOMES = """
@pytest.mark.world(1, 2)
def test_sizes(world_size, tmp_path):
    assert world.allreduce(1) == world_size
@pytest.mark.parametrize("k", [1, 2])
def test_parametrised(k):
    assert world.bcast(k) == k
def test_skip():
    pytest.skip("all of us")
def test_skip_on_one():
    if world.rank == 1:
        pytest.skip("just me")
def test_fail_on_one():
    print("I am", world.rank)
    assert world.rank == 0
def test_fail_on_all():
    raise ValueError("together")
def test_pytest_exit():
    if world.rank == 1:
        pytest.exit("bye")
@pytest.fixture
def broken():
    yield
    assert world.rank == 0
def test_teardown_fails(broken):
    pass
def test_last():
    warnings.warn("lukewarm")
    assert world.allreduce(1) == 2
"""
HANG = """
@pytest.mark.limit(3)
def test_hang():
    if world.rank == 0:
        wait(world.irecv(source=1, tag=99))
def test_stuck_after_failure():
    if world.rank == 1:
        raise RuntimeError("without me")
    wait(world.Ibarrier())
def test_next():
    assert world.allreduce(1) == 2
"""
DEATH = """
def test_killed():
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait(world.Ibarrier())
def test_leaves():
    if world.rank == 1:
        os._exit(0)
    wait(world.Ibarrier())
def test_next():
    assert world.allreduce(1) == 2
"""
NOT_COLLECTED = """
if MPI.Is_initialized() and world.rank == 1:
    raise OSError("no such library here")
def test_one(): pass
"""
ENDLESS = """
if MPI.Is_initialized() and world.size == 3 and world.rank == 1:
    time.sleep(1000)
@pytest.mark.world(3)
def test_start_one(): pass
@pytest.mark.world(3)
def test_start_two(): pass
@pytest.mark.world(1)
def test_end():
    import atexit
    atexit.register(time.sleep, 1000)
"""
PLAIN = """
def test_no_mpi_here():
    assert not MPI.Is_initialized()
@pytest.mark.limit(1)
def test_sleeps():
    time.sleep(1000)
@pytest.mark.simulated(3)
def test_threads(world_size):
    assert world_size == 3 and not MPI.Is_initialized()
@pytest.mark.simulated(1)
def test_dies():
    os._exit(3)
@pytest.mark.simulated(2)
def test_after_a_death(): pass
"""
DEAF = """
@pytest.mark.limit(1)
def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(1000)
"""
CHOICE = """
def test_one(): pass
def test_two(): assert False
def test_three(): pass
@pytest.mark.world(1, 2)
def test_four(): pass
"""
MEET = """
def met(own, other):
    open(own, "w").close()
    while not os.path.exists(other):
        time.sleep(0.01)
def test_plain(): met("plain", "one")
@pytest.mark.world(1)
def test_in_one(): met("one", "plain")
"""
WRITES_PIDS = """
def test_long():
    with open(f"pid{world.rank}", "w") as file:
        file.write(f"{os.getpid()}\\n")
    wait(world.irecv(tag=7))
"""


@dataclass
class Run:
    """What a pytest run printed, and what each test came to."""

    status: int
    text: str
    outcomes: dict[str, str]


def start(folder: Path, source: str, *arguments: str, by_hand: bool = False, **settings: str) -> subprocess.Popen[str]:
    (folder / "conftest.py").write_text('pytest_plugins = ["launcher.plugin"]\n')
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    (folder / "test_it.py").write_text(source)
    known = {
        name: value for name, value in mpiexec.clean(os.environ).items() if not name.startswith((PREFIX, "PYTEST_"))
    }
    settings |= {"PYTHONPATH": str(FOLDER), "COLUMNS": "200", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    around = [*mpiexec.command(2), sys.executable, "-m", "pytest", "--in-world"]
    return subprocess.Popen(
        [*(around if by_hand else [sys.executable, "-m", "pytest", "--junitxml=out.xml"]), *arguments],
        cwd=folder,
        env=known | settings,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(folder: Path, source: str, *arguments: str, by_hand: bool = False, **settings: str) -> Run:
    process = start(folder, source, *arguments, by_hand=by_hand, **settings)
    text, _ = process.communicate(timeout=PATIENCE)
    outcomes = {}
    if (folder / "out.xml").exists():
        for case in ET.parse(folder / "out.xml").iter("testcase"):
            results = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            outcomes[case.attrib["name"]] = "+".join(results) or "passed"
    return Run(process.returncode, text, outcomes)


def other_mpiexec(folder: Path) -> Run:
    script = folder / "mpiexec"
    script.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    script.chmod(0o755)
    return run(folder, IN_TWO + CHOICE, "-k", "world2", **{f"{PREFIX}MPIEXEC": str(script)})


def ended(folder: Path, number: signal.Signals) -> Run:
    """A pytest that a signal ends while its ranks wait for ever; the status is 0 if they have gone with it."""
    process = start(folder, IN_TWO + WRITES_PIDS)
    files = [folder / "pid0", folder / "pid1"]
    try:
        _until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
        process.send_signal(number)
        text, _ = process.communicate(timeout=PATIENCE)
        _until(lambda: not any(_runs(int(file.read_text())) for file in files))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return Run(0, text, {})


ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SCENARIOS: dict[str, Callable[[Path], Run]] = {
    "outcomes": lambda folder: run(folder, IN_TWO + OUTCOMES, "-rA", "--durations=3"),
    "hang": lambda folder: run(folder, IN_TWO + HANG),
    "endless": lambda folder: run(folder, HEAD + ENDLESS, **{f"{PREFIX}LIMIT": "40"}),
    "death": lambda folder: run(folder, IN_TWO + DEATH),
    "plain": lambda folder: run(folder, HEAD + PLAIN),
    "deaf": lambda folder: run(folder, HEAD + DEAF),
    "not collected": lambda folder: run(folder, IN_TWO + NOT_COLLECTED),
    "stop": lambda folder: run(folder, IN_TWO + CHOICE, "-x"),
    "choice": lambda folder: run(folder, IN_TWO + CHOICE, "-k", "world1", "test_it.py::test_four"),
    "other mpiexec": other_mpiexec,
    "no mpiexec": lambda folder: run(folder, IN_TWO + CHOICE, **{f"{PREFIX}MPIEXEC": "./none"}),
    "by hand": lambda folder: run(folder, IN_TWO + CHOICE, "--color=no", "-k", "one or two", by_hand=True),
    "meet": lambda folder: run(folder, HEAD + MEET),
    **{number.name: lambda folder, number=number: ended(folder, number) for number in ENDINGS},
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    with ThreadPoolExecutor(max_workers=5) as pool:  # most of the time they wait
        futures: dict[str, Future[Run]] = {}
        for number, (name, make) in enumerate(SCENARIOS.items()):
            futures[name] = pool.submit(make, tmp_path_factory.mktemp(f"scenario{number}"))
        yield lambda name: futures[name].result()


def test_each_test_passes_or_fails_by_all_its_ranks(scenario: Callable[[str], Run]) -> None:
    outcomes = scenario("outcomes").outcomes
    assert list(outcomes)[:2] == ["test_sizes[world1]", "test_sizes[world2]"]
    passed = {name.split("[")[0] for name, outcome in outcomes.items() if outcome == "passed"}
    assert passed == {"test_sizes", "test_parametrised", "test_last"}
    assert outcomes["test_skip[world2]"] == "skipped" and outcomes["test_teardown_fails[world2]"] == "error"
    failed = {name for name, outcome in outcomes.items() if outcome == "failure"}
    assert failed == {f"test_{way}[world2]" for way in ("skip_on_one", "fail_on_one", "fail_on_all", "pytest_exit")}


def test_a_failure_names_its_ranks_and_shows_equal_tracebacks_once(scenario: Callable[[str], Run]) -> None:
    text = scenario("outcomes").text
    assert "the ranks do not agree: passed on rank 0 of 2; skipped on rank 1 of 2" in text
    assert "failed on all 2 ranks" in text and text.count('raise ValueError("together")') == 1
    for words in ("passed on rank 0 of 2; failed on rank 1 of 2", "assert 1 == 0", "Captured stdout call, rank 1 of 2"):
        assert words in text
    assert "I am 0" in text and "I am 1" in text and "lukewarm" in text and "bye" in text


def test_a_hang_fails_with_the_stacks_of_all_ranks_and_the_others_run(scenario: Callable[[str], Run]) -> None:
    result = scenario("hang")
    assert result.outcomes == dict.fromkeys(result.outcomes, "failure") | {"test_next[world2]": "passed"}
    assert re.search(r"test_it.py::test_hang\[world2\] did not end within its limit of [\d.]+ s", result.text)
    assert re.search(r'rank 0 of 2 still there\s+MainThread:\s+File .*test_it.py", line \d+, in test_hang', result.text)
    assert "rank 1 of 2 passed the test" in result.text


def test_ranks_that_wait_after_a_failure_end_before_the_limit(scenario: Callable[[str], Run]) -> None:
    text = scenario("hang").text
    assert "a rank failed, and others were still in the test" in text and "RuntimeError: without me" in text
    assert re.search(r"rank 0 of 2 still there\s+.*\s+File .*, in test_stuck_after_failure", text)


def test_a_rank_that_dies_fails_its_test_alone(scenario: Callable[[str], Run]) -> None:
    result = scenario("death")
    names = ["test_killed[world2]", "test_leaves[world2]"]
    assert result.outcomes == dict.fromkeys(names, "failure") | {"test_next[world2]": "passed"}
    assert "a world of 2 died: exit status" in result.text


def test_a_world_that_does_not_start_fails_its_tests_and_one_that_does_not_end_its_last(
    scenario: Callable[[str], Run],
) -> None:
    result = scenario("endless")
    names = ["test_start_one[world3]", "test_start_two[world3]"]
    assert result.outcomes == {"test_end[world1]": "error"} | dict.fromkeys(names, "failure")
    assert "a world of 1 ran all its tests and did not end" in result.text
    assert "a world of 3 was not ready in time" in result.text and "rank 1 of 3 still there" in result.text


def test_what_a_rank_cannot_import_is_shown(scenario: Callable[[str], Run]) -> None:
    text = scenario("not collected").text
    assert "rank 1 has not collected test_it.py::test_one[world2]" in text and "no such library here" in text


def test_a_plain_test_has_its_limit_and_a_simulated_one_a_process(scenario: Callable[[str], Run]) -> None:
    result = scenario("plain")
    names = ["test_no_mpi_here", "test_threads[simulated3]", "test_after_a_death[simulated2]"]
    failed = dict.fromkeys(["test_sleeps", "test_dies[simulated1]"], "failure")
    assert result.outcomes == dict.fromkeys(names, "passed") | failed
    assert "test_sleeps did not end within its limit" in result.text
    assert "a process without MPI died: exit status 3" in result.text


def test_a_plain_test_that_no_signal_reaches_ends_with_its_stack(scenario: Callable[[str], Run]) -> None:
    assert scenario("deaf").status != 0
    assert re.search(r"test_it.py\", line \d+ in test_deaf", scenario("deaf").text)


def test_selection(scenario: Callable[[str], Run]) -> None:
    assert list(scenario("stop").outcomes.values()) == ["passed", "passed", "failure"]
    assert scenario("choice").outcomes == {"test_four[world1]": "passed"}


def test_a_world_that_is_none_is_refused(scenario: Callable[[str], Run]) -> None:
    assert "asked for 2 ranks, but mpi4py sees 1" in scenario("other mpiexec").text
    assert set(scenario("other mpiexec").outcomes.values()) == {"failure"}
    assert "No such file or directory: './none'" in scenario("no mpiexec").text


def test_a_world_by_hand_ends_at_its_first_failure(scenario: Callable[[str], Run]) -> None:
    text = scenario("by hand").text
    assert "[rank 1] test_it.py::test_two[world2], call" in text and "1 failed, 1 passed" in text


def test_worlds_and_plain_tests_run_at_a_time(scenario: Callable[[str], Run]) -> None:
    assert list(scenario("meet").outcomes.items()) == [("test_plain", "passed"), ("test_in_one[world1]", "passed")]


@pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)
def test_no_rank_outlives_pytest(number: signal.Signals, scenario: Callable[[str], Run]) -> None:
    assert scenario(number.name).status == 0


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        # A rank whose mpiexec was killed with it may stay as a zombie where nobody collects orphans.
        status = Path(f"/proc/{pid}/stat")
        return not status.exists() or ") Z" not in status.read_text()
    return False

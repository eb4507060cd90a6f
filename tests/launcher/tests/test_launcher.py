"""The launcher, run on small test files of its own in a process of its own.

The files need MPI only. They run side by side, because most of them wait for a limit to pass. Limits that have to pass
are multiples of what a good run takes at the same time; the others are there for a launcher that hangs.
"""

import contextlib
import functools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from files import (
    CHOICE,
    DEATH,
    ENDLESS_END,
    ENDLESS_START,
    HANG,
    HEAD,
    HOOKED,
    HOOKS,
    IN_TURN,
    IN_TWO,
    NO_WORLD,
    NOT_COLLECTED,
    OF_A_PARAMETER,
    OUTCOMES,
    PLAIN,
    PLAIN_DEAF,
    SIDE_BY_SIDE,
)
from launcher import mpiexec, settings

FOLDER = Path(__file__).parents[2]  # that of the package `launcher`
PATIENCE = 900  # seconds for what ends by itself
CONFTEST = 'pytest_plugins = ["launcher.plugin"]\n'

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)

pytestmark = pytest.mark.limit(PATIENCE)


@dataclass
class Run:
    """What a pytest run printed, and what each test came to."""

    status: int
    text: str
    outcomes: dict[str, str]
    details: dict[str, str]


def write(folder: Path, source: str, conftest: str = CONFTEST) -> None:
    (folder / "conftest.py").write_text(conftest)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\nmarkers = chosen\n")
    (folder / "test_it.py").write_text(source)


def start(
    folder: Path, source: str, *arguments: str, conftest: str = CONFTEST, **environment: str
) -> subprocess.Popen[str]:
    write(folder, source, conftest)
    env = mpiexec.clean(os.environ) | {"PYTHONPATH": str(FOLDER), "COLUMNS": "200"} | environment
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other packages' plugins, which may take a second to load
    own = (settings.LIMIT, settings.LONG, settings.WORLDS)
    for name in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", *own):
        if name not in environment:
            env.pop(name, None)
    command = [sys.executable, "-m", "pytest", "--junitxml=out.xml", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(folder: Path, source: str, *arguments: str, **options: str) -> Run:
    process = start(folder, source, *arguments, **options)
    text, _ = process.communicate(timeout=PATIENCE)
    outcomes, details = {}, {}
    if (folder / "out.xml").exists():
        for case in ET.parse(folder / "out.xml").iter("testcase"):
            name = case.attrib["name"]
            results = [child for child in case if child.tag in ("failure", "error", "skipped")]
            outcomes[name] = "+".join(child.tag for child in results) or "passed"
            details[name] = "\n".join(f"{child.attrib.get('message', '')}\n{child.text or ''}" for child in results)
    return Run(process.returncode, text, outcomes, details)


def by_hand(folder: Path) -> Run:
    """The developer's way: `mpiexec` around `pytest --in-world`."""
    write(folder, IN_TWO + CHOICE)
    command = [*mpiexec.command(2), sys.executable, "-m", "pytest", "--in-world", "--color=no", "-k", "one or two"]
    env = mpiexec.clean(os.environ) | {"PYTHONPATH": str(FOLDER), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)
    return Run(done.returncode, done.stdout + done.stderr, {}, {})


def other_mpiexec(folder: Path) -> Run:
    script = folder / "mpiexec"
    script.write_text(NO_WORLD)
    script.chmod(0o755)
    return run(folder, IN_TWO + "def test_one(): pass\ndef test_two(): pass\n", **{settings.MPIEXEC: str(script)})


def long_enough(folder: Path) -> str:
    """A limit that a good run does not reach: several times what one takes now."""
    with _measuring:
        return _long_enough(folder.parent)


_measuring = threading.Lock()


@functools.cache
def _long_enough(folder: Path) -> str:
    beside = folder / "good"
    beside.mkdir()
    began = time.monotonic()
    assert run(beside, IN_TWO + "def test_good(): pass\n").status == 0
    return str(math.ceil(4 * (time.monotonic() - began)))


def ended(folder: Path, number: signal.Signals) -> Run:
    """A parent that a signal ends while its ranks wait for ever; the status is 0 if they have gone with it."""
    process = start(folder, IN_TWO + WRITES_PIDS)
    files = [folder / "pid0", folder / "pid1"]
    try:
        _until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
        pids = [int(file.read_text()) for file in files]
        process.send_signal(number)
        text, _ = process.communicate(timeout=PATIENCE)
        _until(lambda: not any(map(_runs, pids)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return Run(0, text, {}, {})


WRITES_PIDS = """
def test_long():
    with open(f"pid{world.rank}", "w") as file:
        file.write(f"{os.getpid()}\\n")
    wait(world.irecv(tag=7))
"""

SCENARIOS: dict[str, Callable[[Path], Run]] = {
    "outcomes": lambda folder: run(folder, IN_TWO + OUTCOMES, "-rA", "--durations=3"),
    "hang": lambda folder: run(folder, IN_TWO + HANG),
    "endless start": lambda folder: run(folder, IN_TWO + ENDLESS_START, **{settings.LIMIT: long_enough(folder)}),
    "endless end": lambda folder: run(folder, IN_TWO + ENDLESS_END, **{settings.LIMIT: long_enough(folder)}),
    "death": lambda folder: run(folder, IN_TWO + DEATH),
    "plain": lambda folder: run(folder, PLAIN),
    "plain and deaf": lambda folder: run(folder, PLAIN_DEAF),
    "not collected": lambda folder: run(folder, IN_TWO + NOT_COLLECTED),
    "stop": lambda folder: run(folder, IN_TWO + CHOICE, "-x"),
    "choice": lambda folder: run(folder, IN_TWO + CHOICE, "-m", "chosen", "-k", "world1", "test_it.py::test_four"),
    "list": lambda folder: run(folder, IN_TWO + CHOICE, "--collect-only", "-q"),
    "other mpiexec": other_mpiexec,
    "no mpiexec": lambda folder: run(folder, IN_TWO + "def test_one(): pass\n", **{settings.MPIEXEC: "./none"}),
    "of a parameter": lambda folder: run(folder, OF_A_PARAMETER),
    "by hand": by_hand,
    "hooks": lambda folder: run(folder, HEAD + HOOKED, conftest=HOOKS),
    "side by side": lambda folder: run(folder, SIDE_BY_SIDE, **{settings.WORLDS: "4"}),
    "in turn": lambda folder: run(folder, IN_TURN, **{settings.WORLDS: "1"}),
    **{f"ended by {number.name}": lambda folder, number=number: ended(folder, number) for number in ENDINGS},
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    pool = ThreadPoolExecutor(max_workers=5)
    futures: dict[str, Future[Run]] = {}
    for number, (name, make) in enumerate(SCENARIOS.items()):
        futures[name] = pool.submit(make, tmp_path_factory.mktemp(f"scenario{number}"))
    yield lambda name: futures[name].result()
    pool.shutdown(cancel_futures=True)


def test_what_all_ranks_pass_passes(scenario: Callable[[str], Run]) -> None:
    outcomes = scenario("outcomes").outcomes
    good = ["test_pass[world2]", "test_parametrised[1-world2]", "test_parametrised[2-world2]", "test_sizes[world1]"]
    good += ["test_sizes[world2]", "test_same_draws[world2]", "test_warns[world2]"]
    assert {name: outcomes.get(name) for name in good} == dict.fromkeys(good, "passed")


def test_what_all_ranks_skip_is_skipped_and_what_some_skip_fails(scenario: Callable[[str], Run]) -> None:
    result = scenario("outcomes")
    assert result.outcomes["test_skip[world2]"] == "skipped"
    assert "all of us" in result.details["test_skip[world2]"]
    assert result.outcomes["test_skip_on_one[world2]"] == "failure"
    assert "passed on rank 0 of 2; skipped on rank 1 of 2" in result.details["test_skip_on_one[world2]"]
    assert "just me" in result.details["test_skip_on_one[world2]"]


def test_a_failure_names_its_ranks_and_shows_equal_tracebacks_once(scenario: Callable[[str], Run]) -> None:
    result = scenario("outcomes")
    one, everyone = result.details["test_fail_on_one[world2]"], result.details["test_fail_on_all[world2]"]
    assert "failed on rank 1 of 2" in one
    assert "passed on rank 0 of 2" in one
    assert "assert 1 == 0" in one
    assert "failed on all 2 ranks" in everyone
    assert everyone.count('raise ValueError("together")') == 1
    for text in ("I am 0", "I am 1", "Captured stdout call, rank 1 of 2", "lukewarm"):
        assert text in result.text
    assert result.status == 1


def test_other_ways_to_fail(scenario: Callable[[str], Run]) -> None:
    result = scenario("outcomes")
    assert result.outcomes["test_xfail_on_one[world2]"] == "skipped"
    assert result.outcomes["test_sys_exit[world2]"] == "failure"
    assert result.outcomes["test_pytest_exit[world2]"] == "failure"
    assert "bye" in result.details["test_pytest_exit[world2]"]
    assert result.outcomes["test_teardown_fails[world2]"] == "error"


def test_a_failing_example_fails_at_once_and_is_shown(scenario: Callable[[str], Run]) -> None:
    details = scenario("outcomes").details["test_failing_example[world2]"]
    assert re.search(r"failing example: test_failing_example\(n=\d+\)", details)
    assert "failed on all 2 ranks" in details


def test_items_after_failures_still_run_and_in_order(scenario: Callable[[str], Run]) -> None:
    result = scenario("outcomes")
    assert result.outcomes["test_last[world2]"] == "passed"
    assert list(result.outcomes)[:2] == ["test_sizes[world1]", "test_pass[world2]"]
    assert "worlds: 1 in a world of 1, 17 in a world of 2" in result.text


def test_a_hang_fails_with_the_stacks_of_all_ranks(scenario: Callable[[str], Run]) -> None:
    result = scenario("hang")
    details = result.details["test_hang[world2]"]
    assert re.search(r"test_it.py::test_hang\[world2\] did not end within its limit of [\d.]+ s", details)
    assert "rank 0 of 2: in the test's call" in details
    assert "rank 1 of 2: had finished the test (passed)" in details
    assert re.search(
        r"stack of rank 0 of 2 ---\nCurrent thread.*\n  File .* in wait\n  File .*test_it.py\", line \d+ in test_hang",
        details,
    )
    assert re.search(r"stack of rank 1 of 2 ---\nCurrent thread.*\n  \(waiting for the other ranks\)", details)
    assert result.outcomes["test_next[world2]"] == "passed"


def test_ranks_stuck_after_a_failure_do_not_wait_for_the_limit(scenario: Callable[[str], Run]) -> None:
    details = scenario("hang").details["test_stuck_after_failure[world2]"]
    assert "RuntimeError: without me" in details
    assert "others were still in the test" in details
    assert re.search(r"stack of rank 0 of 2 ---\n.*\n.* in wait\n  File .* in test_stuck_after_failure", details)


def test_a_rank_that_dies_fails_its_test_alone(scenario: Callable[[str], Run]) -> None:
    result = scenario("death")
    for name in ("test_killed[world2]", "test_leaves[world2]", "test_abort[world2]"):
        assert result.outcomes[name] == "failure"
        assert "the world of 2 died" in result.details[name]
    assert "exit status" in result.details["test_killed[world2]"]
    assert result.outcomes["test_next[world2]"] == "passed"


def test_a_module_that_one_rank_cannot_import(scenario: Callable[[str], Run]) -> None:
    details = scenario("not collected").details["test_one[world2]"]
    assert "not collected on rank 1 of 2" in details
    assert "no such library here" in details


def test_a_hang_at_the_start_fails_all_tests_of_the_size_once(scenario: Callable[[str], Run]) -> None:
    result = scenario("endless start")
    assert result.outcomes == {"test_one[world2]": "failure", "test_two[world2]": "failure"}
    details = result.details["test_one[world2]"]
    assert re.search(r"the world of 2 was not ready within \d+ s", details)
    assert re.search(r"stack of rank 1 of 2 ---\n.*\n  File .*test_it.py\"", details)


def test_a_hang_at_the_end_is_an_error_of_the_last_test(scenario: Callable[[str], Run]) -> None:
    result = scenario("endless end")
    assert result.outcomes == {"test_one[world2]": "passed", "test_two[world2]": "error"}
    assert re.search(r"ran all its tests and did not end within \d+ s", result.details["test_two[world2]"])


def test_a_plain_test_has_its_limit_too(scenario: Callable[[str], Run]) -> None:
    result = scenario("plain")
    assert result.outcomes == {"test_no_mpi_here": "passed", "test_sleeps": "failure", "test_next": "passed"}
    assert "test_sleeps did not end within its limit of 1 s" in result.details["test_sleeps"]


def test_a_plain_test_that_no_signal_reaches_ends_with_its_stack(scenario: Callable[[str], Run]) -> None:
    result = scenario("plain and deaf")
    assert result.status != 0
    assert re.search(r"test_it.py\", line \d+ in test_deaf", result.text)


def test_selection(scenario: Callable[[str], Run]) -> None:
    stop = scenario("stop")
    expected = {"test_four[world1]": "passed", "test_one[world2]": "passed", "test_two[world2]": "failure"}
    assert stop.outcomes == expected, stop.text
    assert scenario("choice").outcomes == {"test_four[world1]": "passed"}
    assert "test_it.py::test_four[world2]" in scenario("list").text


def test_a_world_that_is_none_is_refused(scenario: Callable[[str], Run]) -> None:
    result = scenario("other mpiexec")
    assert "asked for 2 ranks" in result.details["test_one[world2]"]
    assert result.outcomes["test_two[world2]"] == "failure"
    assert "no world of 2 could be started" in scenario("no mpiexec").details["test_one[world2]"]


def test_a_mark_of_a_parameter_is_refused(scenario: Callable[[str], Run]) -> None:
    result = scenario("of a parameter")
    assert result.status == pytest.ExitCode.USAGE_ERROR
    assert "test_one[1]: simulated marks a test, a class or a module, not one parameter" in result.text


def test_by_hand(scenario: Callable[[str], Run]) -> None:
    text = scenario("by hand").text
    assert "[rank 1] test_it.py::test_two[world2], call" in text
    assert "1 failed, 1 passed" in text


@pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)
def test_no_rank_outlives_the_parent(number: signal.Signals, scenario: Callable[[str], Run]) -> None:
    assert scenario(f"ended by {number.name}").status == 0


def test_a_project_says_what_its_ranks_need(scenario: Callable[[str], Run]) -> None:
    result = scenario("hooks")
    passed = ["test_simulated[simulated3]", "test_simulated[simulated1]", "test_calls[simulated1]"]
    passed += ["test_after_a_death[simulated1]", "test_environment_and_start[world2]", "test_settled[world2]"]
    assert result.outcomes == dict.fromkeys(passed, "passed") | {"test_dies[simulated1]": "failure"}
    assert "the process without MPI died: it ended with exit status 3" in result.details["test_dies[simulated1]"]


def test_worlds_and_plain_tests_run_side_by_side_and_are_told_in_order(scenario: Callable[[str], Run]) -> None:
    result = scenario("side by side")
    names = ["test_plain", "test_in_one[world1]", "test_in_two[world2]", "test_in_three[world3]"]
    assert result.outcomes == dict.fromkeys(names, "passed")
    assert list(result.outcomes) == names


def test_one_world_at_a_time(scenario: Callable[[str], Run]) -> None:
    outcomes = scenario("in turn").outcomes
    assert outcomes == dict.fromkeys(["test_plain", "test_in_one[world1]", "test_in_two[world2]"], "passed")


def test_how_long_tests_and_starts_took(scenario: Callable[[str], Run]) -> None:
    text = scenario("outcomes").text
    assert re.search(r"\n(2\.\d|[3-9]\.\d|\d\d+\.\d)\ds call +test_it.py::test_long\[world2\]", text)
    assert re.search(r"1 tests in a world of 1: \d+ s, with 1 starts that took [\d.]+ s", text)
    assert re.search(r"\n\d+ s in all: \d+ s in tests, \d+ s in starts of worlds", text)
    assert re.search(r"\n[\d.]+ s test_it.py: [\d.]+ s in test_", text)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A rank whose mpiexec was killed with it may stay as a zombie where nobody collects orphans.
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or ") Z" not in status.read_text()

"""The catalogue of mistakes and faults: each ends the job, soon, with a message that says what to change.

Each program in `faults/` is started as a user starts it, but compiled cheaply unless the run is long. Its docstring
says how: `workers`, and where needed `environment`, `timeout` (DISTDL_JAX_TIMEOUT; more on a slow machine), `by` (what
runs it: `python`, where it has to import all itself, or a module) and `status` (0 where the job must end well); and
what must be said. `when: long` is
for a long run alone: where another program ends in the same way, or simulated workers make the same mistake in every
run.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import ceil
from pathlib import Path

import pytest
from jobs import FAST_TO_COMPILE, ROOT, finish, patience, start, start_up
from launcher.settings import long_run

FOLDER = Path(__file__).parent / "faults"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if path.name != "parts.py")
# Those that are also tried on a GPU, of each kind some.
ON_A_GPU = (
    *("call_skipped", "shape_changes_on_one_side", "both_send_first", "constant_placeholder", "system_exit_raised"),
    *("exception_in_data_loading", "sleeps_forever", "killed", "os_exit_with_an_error", "normal_end"),
)
STARTS = 12  # how many times as long as a start, which is measured, a program and its fault may take


def header(path: Path, word: str) -> list[str]:
    return re.findall(rf"^{word}: (.*)$", path.read_text().split('"""')[1], re.M)


def clock(path: Path) -> int:
    """Return the time limit that the program asks for, in seconds; more where even a start takes longer; 0 for none."""
    asked = int((header(path, "timeout") or ["0"])[0])
    return asked and max(asked, ceil(start_up()))


def run_alone(path: Path, settings: dict[str, str]) -> tuple[int, str]:
    """Run the program without a launcher."""
    command, environment = [sys.executable, str(path)], {**os.environ, **settings}
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), cwd=ROOT, env=environment)
    return done.returncode, done.stdout + done.stderr


def play(path: Path) -> tuple[int, str]:
    """Return the program's exit status and output."""
    limit = max(40, STARTS * start_up()) + clock(path)
    settings = dict(setting.split("=", 1) for setting in header(path, "environment"))
    # Without a limit of its own, no program may end by the library's.
    settings["DISTDL_JAX_TIMEOUT"] = str(clock(path) or 4 * ceil(limit))
    (workers,) = header(path, "workers")
    if workers == "none":
        return run_alone(path, settings)
    by = " ".join(header(path, "by")).split()
    words = [word for word in by if word != "python"]
    return finish(start(int(workers), *words, path, settings=settings, flags=FAST_TO_COMPILE, anew=bool(by)), limit)


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[tuple[int, str]]]]:
    """Run every chosen program, three at a time: most of the time they wait."""
    start_up()
    chosen = {item.callspec.params.get("path") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(3) as pool:
        yield {path.stem: pool.submit(play, path) for path in PROGRAMS if path in chosen}


@pytest.mark.limit(1800)  # the first waits for its program, which has its own limit
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.gpu] * (path.stem in ON_A_GPU))
        for path in PROGRAMS
        if long_run() or not header(path, "when")
    ],
)
def test_fault(path: Path, played: dict[str, Future[tuple[int, str]]]) -> None:
    status, output = played[path.stem].result()
    assert "ended after its limit" not in output, output
    assert (status == 0) == (header(path, "status") == ["0"]), (status, output)
    words = " ".join(output.split())
    for sentence in header(path, "says"):
        sentence = sentence.replace("{timeout}", str(clock(path)))
        assert " ".join(sentence.split()) in words, f"not said: {sentence}\n{output}"


def test_catalogue_is_documented() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    assert len(PROGRAMS) >= 25
    missing = [path.stem for path in PROGRAMS if f"`{path.stem}`" not in page]
    assert not missing, f"docs/faults.md does not name {missing}"


def test_programs_say_something() -> None:
    assert all(header(path, "says") and os.path.getsize(path) for path in PROGRAMS)

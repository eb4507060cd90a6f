"""The catalogue of mistakes and faults: each ends the job, soon, with a message that says what to change.

Each program in `faults/` is started as a user starts it. Its docstring says how: `workers`, and where needed
`environment`, `timeout` (DISTDL_JAX_TIMEOUT) and `status` (0 where the job must end well); and what must be said.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import ROOT, run

FOLDER = Path(__file__).parent / "faults"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if path.name != "parts.py")
START = 25  # seconds that Python, JAX and MPI may take to start on a busy machine, and to compile
SOON = 5  # seconds in which a fault ends the job


def told(path: Path, word: str) -> list[str]:
    return re.findall(rf"^{word}: (.*)$", path.read_text().split('"""')[1], re.M)


def run_alone(path: Path, settings: dict[str, str]) -> tuple[int, str]:
    """Without a launcher."""
    command, environment = [sys.executable, str(path)], {**os.environ, **settings}
    done = subprocess.run(command, capture_output=True, text=True, timeout=START, cwd=ROOT, env=environment)
    return done.returncode, done.stdout + done.stderr


def play(path: Path) -> tuple[int, str]:
    """The program's exit status and output."""
    timeout = float((told(path, "timeout") or ["0"])[0])
    settings = dict(setting.split("=", 1) for setting in told(path, "environment"))
    settings["DISTDL_JAX_TIMEOUT"] = str(timeout or 100)
    (workers,) = told(path, "workers")
    if workers == "none":
        return run_alone(path, settings)
    return run(int(workers), path, limit=START + SOON + timeout, settings=settings)


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[tuple[int, str]]]]:
    """What every chosen program does. Three at a time: most of the time they wait."""
    chosen = {item.callspec.params.get("path") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(3) as pool:
        yield {path.stem: pool.submit(play, path) for path in PROGRAMS if path in chosen}


@pytest.mark.limit(120)
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_fault(path: Path, played: dict[str, Future[tuple[int, str]]]) -> None:
    status, output = played[path.stem].result()
    assert "ended after its limit" not in output, output
    assert (status == 0) == (told(path, "status") == ["0"]), (status, output)
    words = " ".join(output.split())
    for sentence in told(path, "says"):
        assert " ".join(sentence.split()) in words, f"not said: {sentence}\n{output}"


def test_catalogue_is_documented() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    assert len(PROGRAMS) >= 25
    missing = [path.stem for path in PROGRAMS if f"`{path.stem}`" not in page]
    assert not missing, f"docs/faults.md does not name {missing}"


def test_programs_say_something() -> None:
    assert all(told(path, "says") and os.path.getsize(path) for path in PROGRAMS)

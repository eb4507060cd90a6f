"""The catalogue of mistakes and faults: each ends the job, soon, with a message that says what to change.

Each program in `faults/` is started as a user starts it. Its docstring says how: `workers`, and where needed
`environment`, `timeout` (DISTDL_JAX_TIMEOUT) and `status` (0 where the job must end well); and what must be said.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import ROOT, run

FOLDER = Path(__file__).parent / "faults"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if path.name != "parts.py")
START = 25  # seconds that Python, JAX and MPI may take to start on a busy machine, and to compile
SOON = 5


def told(path: Path, word: str) -> list[str]:
    return re.findall(rf"^{word}: (.*)$", path.read_text().split('"""')[1], re.M)


def run_alone(path: Path, limit: float) -> tuple[int, str]:
    """Without a launcher."""
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=limit, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.limit(60)
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_fault(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeout = float((told(path, "timeout") or ["0"])[0])
    monkeypatch.setenv("DISTDL_JAX_TIMEOUT", str(timeout or 100))
    for setting in told(path, "environment"):
        monkeypatch.setenv(*setting.split("=", 1))
    (workers,) = told(path, "workers")
    start = time.monotonic()
    limit = START + SOON + timeout
    status, output = run(int(workers), path, limit=limit) if workers != "none" else run_alone(path, limit)
    took = time.monotonic() - start
    assert "ended after its limit" not in output, output
    assert (status == 0) == (told(path, "status") == ["0"]), (status, output)
    words = " ".join(output.split())
    for sentence in told(path, "says"):
        assert " ".join(sentence.split()) in words, f"not said: {sentence}\n{output}"
    assert took < START + SOON + timeout


def test_catalogue_is_documented() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    assert len(PROGRAMS) >= 25
    missing = [path.stem for path in PROGRAMS if f"`{path.stem}`" not in page]
    assert not missing, f"docs/faults.md does not name {missing}"


def test_programs_say_something() -> None:
    assert all(told(path, "says") and os.path.getsize(path) for path in PROGRAMS)

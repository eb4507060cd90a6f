"""The catalogue of mistakes and faults: each ends the job, soon, with a message that says what to change.

Each function in `faults/` that says something is a program. It is started as a user starts it, `python FILE NAME`, but
compiled cheaply unless the run is long. Lines of its docstring, or of the file's, say how: `workers`, and where needed
`environment`, `timeout` (DISTDL_JAX_TIMEOUT; more on a slow machine), `by` (what runs it: `python`, where it has to
import all itself, or a module) and `status` (0 where the job must end well); and what must be said, where
`{+3}` is the third line after the function's first, and `{...}` anything. `when: long` is for a long run alone: where
another program ends in the same way, or simulated workers make the same mistake in every run.
"""

import ast
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import ceil
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import FAST_TO_COMPILE, ROOT, finish, run_alone, start, start_up
from launcher.settings import long_run

# Those that are also tried on a GPU, of each kind some.
ON_A_GPU = (
    *("call_skipped", "shape_changes_on_one_side", "both_send_first", "constant_placeholder", "system_exit_raised"),
    *("exception_in_data_loading", "sleeps_forever", "killed", "os_exit_with_an_error", "normal_end"),
)
STARTS = 12  # how many times as long as a start, which is measured, a program and its fault may take


class Program(NamedTuple):
    """A function of a file: its first line, and its docstring before the file's."""

    path: Path
    name: str
    line: int
    text: str

    def header(self, word: str) -> list[str]:
        lines = re.findall(rf"^ *{word}: (.*)$", self.text, re.M)
        return lines if word == "says" else lines[:1]

    def clock(self) -> int:
        """Return the time limit that it asks for, in seconds; more where even a start takes longer; 0 for none."""
        asked = int((self.header("timeout") or ["0"])[0])
        return asked and max(asked, ceil(start_up()))

    def sentences(self) -> list[str]:
        """Return what must be said."""
        text = "\n".join(self.header("says")).replace("{timeout}", str(self.clock())).replace("{file}", self.path.name)
        return re.sub(r"\{\+(\d+)\}", lambda found: str(self.line + int(found[1])), text).split("\n")

    def play(self) -> tuple[int, str]:
        """Return the exit status and the output."""
        (workers,) = self.header("workers")
        if workers == "none":
            return run_alone(self.path, self.name)
        limit = max(40, STARTS * start_up()) + self.clock()
        settings = dict(setting.split("=", 1) for setting in self.header("environment"))
        # Without a limit of its own, no program may end by the library's.
        settings["DISTDL_JAX_TIMEOUT"] = str(self.clock() or 4 * ceil(limit))
        by = " ".join(self.header("by")).split()
        words = [*(word for word in by if word != "python"), self.path, self.name]
        return finish(start(int(workers), *words, settings=settings, flags=FAST_TO_COMPILE, anew=bool(by)), limit)


def programs() -> Iterator[Program]:
    for path in sorted((Path(__file__).parent / "faults").glob("*.py")):
        tree = ast.parse(path.read_text())
        for part in tree.body:
            if isinstance(part, ast.FunctionDef) and "says: " in (text := ast.get_docstring(part) or ""):
                yield Program(path, part.name, part.lineno, f"{text}\n{ast.get_docstring(tree)}")


PROGRAMS = list(programs())


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[tuple[int, str]]]]:
    """Run every chosen program, three at a time: most of the time they wait."""
    start_up()
    chosen = {item.callspec.params.get("program") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(3) as pool:
        yield {program.name: pool.submit(program.play) for program in PROGRAMS if program in chosen}


@pytest.mark.limit(1800)  # the first waits for its program, which has its own limit
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=program.name, marks=[pytest.mark.gpu] * (program.name in ON_A_GPU))
        for program in PROGRAMS
        if long_run() or not program.header("when")
    ],
)
def test_fault(program: Program, played: dict[str, Future[tuple[int, str]]]) -> None:
    status, output = played[program.name].result()
    assert "ended after its limit" not in output, output
    assert (status == 0) == (program.header("status") == ["0"]), (status, output)
    words = " ".join(output.split())
    for sentence in program.sentences():
        pattern = re.escape(" ".join(sentence.split())).replace(re.escape("{...}"), ".*")
        assert re.search(pattern, words), f"not said: {sentence}\n{output}"


def test_catalogue_is_documented() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    assert len(PROGRAMS) >= 97
    missing = [program.name for program in PROGRAMS if f"`{program.name}`" not in page]
    assert not missing, f"docs/faults.md does not name {missing}"

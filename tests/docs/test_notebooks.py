"""The notebooks run, in one process without Jupyter, and show what they showed when they were saved."""

import json
import re
from pathlib import Path

import pytest
from jobs import ROOT, run_all
from notebook_runner import code_cells, stored

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what the code cells of each notebook show."""
    folder = tmp_path_factory.mktemp("notebooks")
    ((status, output),) = run_all([[ROOT / "tests" / "notebook_runner.py", *NOTEBOOKS]], limit=300, cwd=folder)
    assert status == 0, output
    texts = json.loads(output.splitlines()[0])
    return dict(zip((notebook.stem for notebook in NOTEBOOKS), texts, strict=True))


@pytest.mark.limit(300)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_showed(notebook: Path, shown: dict[str, list[str]]) -> None:
    """Cell by cell. Names of the files that cells are compiled as differ."""
    for cell, then, now in zip(code_cells(notebook), stored(notebook), shown[notebook.stem], strict=True):
        then, now = (re.sub(r"\([^()]+:(\d+) in", r"(line \1 in", text) for text in (then, now))
        assert now == then, "".join(cell["source"])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_its_pictures_have_words(notebook: Path) -> None:
    assert notebook.stat().st_size < 150_000
    for cell in code_cells(notebook):
        if any("image/png" in output.get("data", {}) for output in cell["outputs"]):
            assert cell["metadata"].get("alt"), "".join(cell["source"])
    text = "\n".join("".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"])
    for target in re.findall(r"\]\(([^)#:]+\.\w+)\)", text):
        assert (notebook.parent / target).exists(), target

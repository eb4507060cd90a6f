"""The pictures of the documentation are what their script draws, byte for byte."""

import importlib.util

import pytest
from jobs import ROOT
from tools.draw.reading import parsed

FOLDER = ROOT / "docs" / "pictures"
SPEC = importlib.util.spec_from_file_location("documentation_pictures", FOLDER / "draw.py")
assert SPEC is not None and SPEC.loader is not None
SCRIPT = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SCRIPT)


@pytest.mark.parametrize("name", SCRIPT.PICTURES)
def test_a_picture_is_the_one_that_is_drawn(name: str) -> None:
    """Else run `python docs/pictures/draw.py`, and look at what has changed."""
    svg = SCRIPT.PICTURES[name]().svg
    parsed(svg)
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == svg


def test_each_picture_is_on_a_page() -> None:
    """And none is left over."""
    pages = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    drawn = {f"{name}.svg" for name in SCRIPT.PICTURES}
    assert {path.name for path in FOLDER.glob("*.svg")} == drawn
    assert all(f"pictures/{name})" in pages for name in drawn)

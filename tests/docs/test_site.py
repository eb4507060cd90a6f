"""The site's own checks find what they are for; `make docs` builds all of it, strictly."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT

pytest.importorskip("mkdocs", reason="`make docs` installs it")
griffe = pytest.importorskip("griffe")
mkdocs_config = pytest.importorskip("mkdocs.config")
File = importlib.import_module("mkdocs.structure.files").File
Page = importlib.import_module("mkdocs.structure.pages").Page
sys.path.insert(0, str(ROOT / "tools" / "site"))
hooks = importlib.import_module("hooks")

PAGE = """# Title

[a page](absent.md), [a heading](#absent), [a file](../tools/absent.py),
[no mistake](../tools/venv.sh#L1) ![](absent.png)

`<F x, y>` is code, and <F x, y> is not.
"""


def test_mistakes_of_a_page_end_a_strict_build(tmp_path: Path) -> None:
    """Of a site of one page, without the reference rendered, which would take long."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(PAGE)
    (tmp_path / "docs" / "unlisted.md").write_text("# Not in the navigation")
    settings = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": "docs",
        "site_dir": "out",
        "nav": ["index.md", "api/*.md"],
    }
    settings |= {"hooks": [str(ROOT / "tools" / "site" / "hooks.py")], "plugins": {}, "watch": []}
    settings |= {"extra_css": [], "extra_javascript": []}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    warnings = "".join(line for line in done.stderr.splitlines(True) if "WARNING" in line or line.startswith(" "))
    for mistake in (
        "absent.md",
        "#absent",
        "../tools/absent.py, which is not there",
        "the image absent.png has no alternative text",
        "unlisted.md",
    ):
        assert mistake in warnings, done.stderr
    assert "venv.sh" not in warnings


def test_what_a_public_name_lacks_is_said() -> None:
    source = """
def undocumented(a): ...
def documented(a, *, b=(1, 2)):
    'Do it.'
class Class:
    'A class.'
    def __call__(self): ...
    def _private(self): ...
    def method(self):
        'Do it.'
class Derived(Class):
    'A class.'
    def method(self): ...
"""
    with griffe.temporary_visited_package("package", {"__init__.py": source}) as package:
        assert list(hooks.problems(package["undocumented"], "(a)")) == ["has no docstring"]
        assert list(hooks.problems(package["documented"], "(a, b=(1, 2))")) == []
        assert len(list(hooks.problems(package["documented"], "(a, c=(1, 2))"))) == 1
        assert list(hooks.problems(package["Class"], "()")) == ["has a method without a docstring: __call__"]
        assert list(hooks.problems(package["Derived"], "()")) == []


def test_each_public_name_is_on_one_page() -> None:
    names = [name for page in hooks.families().values() for name in page]
    assert sorted(names) == sorted(hooks.public_names())


def test_patterns_leave_out_what_is_named() -> None:
    pages = ["a.md", "b.md", "how-to/c.md"]
    nav = [{"One": ["a.md", "how-to/*.md"]}, {"None": ["none/*.md"]}, {"More": ["*.md"]}]
    assert hooks.expanded(nav, pages, {"a.md"}) == [{"One": ["a.md", "how-to/c.md"]}, {"More": ["b.md"]}]


def test_a_notebook_is_a_page_with_its_outputs() -> None:
    figure = {"data": {"image/png": "AAAA\n", "text/plain": "<Figure>"}, "output_type": "display_data"}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text."]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [{"name": "stdout", "text": ["1\n"]}, figure]},
    ]
    page = hooks.as_markdown(json.dumps({"cells": cells}), "https://example.org/a.ipynb")
    assert page.startswith("# Title\nText.\n\nThis page is [a notebook](https://example.org/a.ipynb)")
    assert "```python\nprint(1)\n```\n\n```text\n1\n```\n\n" in page
    assert 'src="data:image/png;base64,AAAA" alt="' in page and "Figure" not in page


def page_of_the_site() -> tuple[Any, Any]:
    config = mkdocs_config.load_config(str(ROOT / "mkdocs.yml"), hooks=[], plugins=[])
    return Page(None, File("unet.md", str(ROOT / "docs"), "site", False), config), config


def test_a_page_is_found_by_its_synonyms() -> None:
    page, config = page_of_the_site()
    hooks.on_page_markdown("# Split a U-Net\n\n<!-- search: unet, 3D segmentation -->\n", page=page, config=config)
    assert page.meta["tags"] == ["unet", "3d segmentation"]


def test_a_list_of_layers_has_their_summaries() -> None:
    page, config = page_of_the_site()
    block = "```layers\nnn.Pipeline\nnn.DistributedMaxPool?d\n```\n"
    lines = hooks.on_page_markdown(block, page=page, config=config).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["- `nn.Pipeline`", "- `nn.DistributedMaxPool1d` to `4d`"]
    assert all(len(line.partition(": ")[2]) > 10 and "1" not in line.partition(": ")[2] for line in lines)


def test_shapes_in_tables_stay_in_one_line() -> None:
    page, _ = page_of_the_site()
    html = hooks.on_page_content("<p>4 x 1</p><td>(4 x 1 x 2)</td>", page=page)
    assert html == "<p>4 x 1</p><td>(4\xa0x\xa01\xa0x\xa02)</td>"


def test_a_summary_ends_with_the_sentence() -> None:
    source = 'def f(): "Move from P (p_0 x ... x p_n) to Q. More."'
    with griffe.temporary_visited_package("package", {"__init__.py": source}) as package:
        assert hooks.summary(package["f"]) == "Move from P (p_0 x ... x p_n) to Q"

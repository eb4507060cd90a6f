"""The pages on clusters show the files that they link to, and these are sound."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from jobs import ROOT

PAGES = sorted((ROOT / "docs" / "clusters").glob("*.md"))
SHOWN = re.compile(r"\[[^\]]*\]\(([^)\s]+)\):\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = [(page, path, text) for page in PAGES for path, text in SHOWN.findall(page.read_text())]
SCRIPTS = [*sorted((ROOT / "docs" / "clusters").glob("*.sh")), ROOT / "tools" / "one_node_slurm.sh"]
RECIPES = ROOT / "tools" / "containers"


@pytest.mark.parametrize(("page", "path", "text"), FILES, ids=[Path(path).name for _, path, _ in FILES])
def test_a_page_shows_the_file(page: Path, path: str, text: str) -> None:
    assert text == (page.parent / path).read_text()


def test_every_file_is_shown() -> None:
    shown = {(page.parent / path).resolve() for page, path, _ in FILES}
    here = {path for path in (ROOT / "docs" / "clusters").iterdir() if path.suffix != ".md"}
    assert here and here <= shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_one_style(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
    order = ["What you need", "How to see that it works", "What goes wrong"]
    assert [heading for heading in headings if heading in order] == order
    assert "doctor" in page.read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck")
    found = subprocess.run(["shellcheck", "--exclude=SC1091", str(script)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_recipes_of_containers_are_the_same() -> None:
    docker, apptainer = ((RECIPES / name).read_text() for name in ("Dockerfile", "distdl_jax.def"))
    copied = [line.split()[1:-1] for line in docker.splitlines() if line.startswith("COPY ")]
    section = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", apptainer, re.MULTILINE | re.DOTALL))
    assert [line.split()[0] for line in section["files"].split("\n") if line.strip()] == [
        file for files in copied for file in files
    ]
    commands = " && ".join(re.findall(r"^RUN (.*?)(?<!\\)\n", docker, re.MULTILINE | re.DOTALL))
    steps = re.split(r"\s*&&\s*", commands.replace("\\\n", " "))
    others = [
        line.strip() for line in section["post"].splitlines() if line.strip() and not line.strip().startswith("cd")
    ]
    assert [" ".join(step.split()) for step in steps] == others

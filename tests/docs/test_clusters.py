"""The page on clusters links to every script, shows the first, and these are sound."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from jobs import ROOT

PAGE = ROOT / "docs" / "clusters.md"
SCRIPTS = [*sorted((ROOT / "docs" / "clusters").glob("*.sh")), ROOT / "tools" / "one_node_slurm.sh"]
RECIPES = ROOT / "tools" / "containers"


def test_the_page_shows_the_script_of_a_job() -> None:
    script = (ROOT / "docs" / "clusters" / "slurm-train.sh").read_text()
    assert f"[slurm-train.sh](clusters/slurm-train.sh):\n\n```sh\n{script}```\n" in PAGE.read_text()


def test_every_file_is_linked() -> None:
    linked = {(PAGE.parent / path).resolve() for path in re.findall(r"\]\(([^)\s]+)\)", PAGE.read_text())}
    files = {*(ROOT / "docs" / "clusters").iterdir(), *RECIPES.iterdir(), ROOT / "tools" / "one_node_slurm.sh"}
    assert len(files) > 8 and files <= linked


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

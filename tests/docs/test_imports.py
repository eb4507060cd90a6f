"""What benchmarks, examples and tools import of the library is there: they run too long to be run here."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import ROOT

PROGRAMS = sorted(path for folder in ("benchmarks", "examples", "tools") for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Return each module of the library that a file imports, and each name from it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((name.name, "") for name in node.names if name.name.split(".")[0] == "distdl_jax")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "distdl_jax":
            yield from ((node.module or "", name.name) for name in node.names)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_is_imported_is_there(path: Path) -> None:
    for module, name in imported(path):
        assert find_spec(module) is not None, f"there is no {module}"
        if name and module.startswith("distdl_jax.transports.mpi"):
            continue  # it would start MPI here
        assert not name or hasattr(import_module(module), name) or find_spec(f"{module}.{name}"), f"{module}.{name}"


def test_something_is_imported() -> None:
    assert sum(len(list(imported(path))) for path in PROGRAMS) > 50


THREADS = """
import sys, threading
import distdl_jax as dj
sys.setswitchinterval(1e-6)
together = threading.Barrier(8)
def work(first):
    together.wait()
    assert all(getattr(dj, name) for name in dj.__all__[first:] + dj.__all__[:first])
threads = [threading.Thread(target=work, args=(5 * i,)) for i in range(8)]
for call in (threading.Thread.start, threading.Thread.join):
    for thread in threads:
        call(thread)
"""


def test_threads_may_be_the_first_to_use_public_names() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert not done.stderr


def test_the_version_is_the_same_everywhere() -> None:
    version = import_module("distdl_jax").__version__
    files = ("CITATION.cff", "CHANGELOG.md", "recipe/meta.yaml")
    citation, changes, recipe = ((ROOT / name).read_text() for name in files)
    assert f"\nversion: {version}\n" in citation
    assert f'{{% set version = "{version}" %}}' in recipe
    newest = re.search(r"^## ([0-9.]+)", changes, re.MULTILINE)
    assert newest is not None and newest[1] == version


def test_the_recipe_needs_what_pyproject_needs() -> None:
    recipe = (ROOT / "recipe" / "meta.yaml").read_text()
    run = recipe.partition("\n  run:\n")[2].partition("\n\n")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {dependency.replace(">=", " >=") for dependency in project["dependencies"]}
    assert set(re.findall(r"    - (.*)", run)) == wanted | {"python >={{ python_min }}", "{{ mpi }}"}

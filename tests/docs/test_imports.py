"""What benchmarks, examples and tools import of the library is there: they run too long to be run here."""

import ast
import re
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from jobs import ROOT

import distdl_jax as dj

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


def test_public_names_are_imported_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's modules import each other in circles: another thread would find them half made."""
    importing: list[int] = []
    most: list[int] = []

    def slowly(name: str) -> ModuleType:
        importing.append(1)
        most.append(len(importing))
        time.sleep(0.02)
        importing.pop()
        return import_module(name)

    monkeypatch.setattr(dj, "import_module", slowly)
    names = ("ShapeDtype", "Partition", "TensorSpec", "nn")
    with ThreadPoolExecutor(len(names)) as threads:
        values = [*threads.map(dj.__getattr__, names)]
    assert values == [getattr(dj, name) for name in names] and most == [1] * len(names)


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


def test_programs_of_the_documentation_import_what_readme_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dependencies, and the extra in README's lines. `.ci/package` runs these lines in a fresh environment."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    pages = import_module("pages")
    (extra,) = re.findall(r"distdl_jax\[(.*?)\] @", (ROOT / "README.md").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"][extra]
    brought = {re.match(r"[\w-]+", requirement)[0] for requirement in wanted}  # type: ignore[index]
    of = packages_distributions()
    for name, program in pages.programs():
        others = pages.imported(program) - {"distdl_jax"}
        missing = [package for package in others if not brought & set(of.get(package, ()))]
        assert missing == [], f"{name} imports {missing}, which README's lines don't install"

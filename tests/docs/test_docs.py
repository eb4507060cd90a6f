"""The documentation is true: its code runs and prints what it says, its links lead somewhere, no name is missing."""

import importlib
import inspect
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from jobs import ROOT, run_all
from launcher.settings import long_run
from test_public_names import public

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, *infos: str) -> list[str]:
    """Return the code blocks of a page whose first line is ``` and exactly one of `infos`."""
    return [code for found, code in BLOCK.findall(page.read_text()) if found.strip() in infos]


def name_of(page: Path) -> str:
    return page.stem


# The code of docs/testing.md calls dj.simulate itself.
RUNNABLE = [page for page in PAGES if page.stem != "testing" and blocks(page, "python")]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what the code of each page prints on four workers, all its blocks being one program.

    Over MPI in a long run, else on threads, but for README, and pages that open threads or need MPI themselves.
    """
    folder = tmp_path_factory.mktemp("pages")
    over_mpi, on_threads = {}, {}
    for page in RUNNABLE:
        program = folder / f"{page.stem}.py"
        program.write_text("\n\n".join(blocks(page, "python")))
        if long_run() or page.stem in ("README", "simulate", "profile", "mpi4jax-deadlock"):
            over_mpi[page.stem] = [program]
        else:
            on_threads[page.stem] = ["-m", "distdl_jax", "--simulate", 4, program]
    ended = run_all([*over_mpi.values()], 4, limit=500, cwd=folder)
    if on_threads:
        ended += run_all([*on_threads.values()], limit=500, cwd=folder)
    of_pages = dict(zip([*over_mpi, *on_threads], ended, strict=True))
    assert not {name: output for name, (status, output) in of_pages.items() if status}
    return {name: output for name, (_, output) in of_pages.items()}


@pytest.mark.limit(1200)
@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_the_code_runs_and_prints_what_the_page_says(page: Path, printed: dict[str, str]) -> None:
    output = printed[page.stem].splitlines()
    place = 0
    for line in "".join(blocks(page, "text")).splitlines():
        assert line in output[place:], f"{page.name} says {line!r} where the program says:\n" + "\n".join(
            output[place:]
        )
        place = output.index(line, place) + 1


@pytest.mark.limit(600)
@pytest.mark.parametrize("framework", ["equinox", "haiku"])
def test_each_tab_runs(framework: str, tmp_path: Path) -> None:
    """On four threads: a tab's code defines anew what the first one defined."""
    pytest.importorskip(framework, reason="its tab is tested where it is installed")
    page, program = ROOT / "docs" / "ten-minutes.md", tmp_path / "program.py"
    assert blocks(page, f"python {framework}")
    program.write_text("\n\n".join(blocks(page, "python", f"python {framework}")))
    ((status, output),) = run_all([["-m", "distdl_jax", "--simulate", 4, program]], limit=500, cwd=tmp_path)
    assert status == 0, output
    assert "".join(blocks(page, "text")) == output


def test_no_page_takes_the_mean_over_workers_for_that_of_a_tensor() -> None:
    """It is another number where blocks have different sizes."""
    texts = {page.name: page.read_text() for page in [*PAGES, *(ROOT / "docs" / "notebooks").glob("*.ipynb")]}
    texts |= {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert [name for name, text in texts.items() if re.search(r"""all_reduce\([^`\n]*["']mean""", text)] == []


def test_the_test_of_the_page_on_tests_passes() -> None:
    exec("".join(blocks(ROOT / "docs" / "testing.md", "python")), {})


def anchors(page: Path) -> set[str]:
    """Return the anchors that a reader's browser finds for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}, a heading that is not there"


def layers_on(page: Path) -> list[str]:
    """Return the public names that the lists of layers on a page show, as `tools/site/hooks.py` makes them."""
    patterns = "".join(blocks(page, "layers")).split()
    return [name for pattern in patterns for name in public() if fnmatchcase(name, pattern)]


def test_each_layer_is_on_one_page() -> None:
    """But for the movements, which docs/primitives.md has, and the contract of a layer."""
    from distdl_jax import nn
    from distdl_jax.nn.shape import data_movement

    movements = {name for name in nn.__all__ if getattr(nn, name).__module__ == data_movement.__name__}
    on_pages = [name for page in (ROOT / "docs" / "layers").glob("*.md") for name in layers_on(page)]
    layers = {f"nn.{name}" for name in nn.__all__} - {"nn.Layer"}
    assert layers - {f"nn.{name}" for name in movements} <= set(on_pages)
    assert len(on_pages) == len(set(on_pages))


def test_public_names_are_on_a_page() -> None:
    listed = [f"`{name}`" for page in PAGES for name in layers_on(page)]
    text = "\n".join([*(page.read_text() for page in PAGES), *listed])
    names = [name.rpartition(".")[2] for name in public() if not name.startswith(("machine.", "solvers."))]
    assert [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text)] == []


@pytest.mark.parametrize("name", ["Partition", "CartesianPartition", "TensorSpec"])
def test_public_methods_are_documented(name: str) -> None:
    import distdl_jax

    cls = getattr(distdl_jax, name)
    text = (ROOT / "docs" / "primitives.md").read_text()
    for method, value in vars(cls).items():
        if not method.startswith("_") and (callable(value) or isinstance(value, property | staticmethod)):
            assert inspect.getdoc(getattr(cls, method)), f"{name}.{method} has no docstring"
            assert f"`{method}" in text, f"docs/primitives.md does not mention {name}.{method}"


def test_every_layer_has_a_row_in_the_benchmark_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the movements, which have no counterpart on one worker, and what computes nothing."""
    from distdl_jax import nn
    from distdl_jax.nn.shape import data_movement

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    titles = [case.title for case in importlib.import_module("layer_cases.everything").all_cases(2)]
    assert len(set(titles)) == len(titles)
    movements = {name for name in nn.__all__ if getattr(nn, name).__module__ == data_movement.__name__}
    layers = {name for name in nn.__all__ if isinstance(getattr(nn, name), type)}  # not functions, which make them
    assert {title.split(",")[0] for title in titles} >= layers - movements - {"Layer", "Input", "Local"}

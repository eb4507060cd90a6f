"""Programs of the documentation in a fresh environment, which has what README's lines install and nothing else.

python .ci/pages.py install WHEEL    # README's lines of shell, with a wheel in place of the repository
python .ci/pages.py import           # import all that a program of the documentation imports
python .ci/pages.py program PAGE     # the program of a page
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPOSITORY = "git+https://github.com/distdl/distdl_jax"


def blocks(page: Path, info: str) -> list[str]:
    """Return the code blocks of a page whose first line is ``` and exactly `info`."""
    return re.findall(rf"^```{info}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def programs() -> Iterator[tuple[str, str]]:
    """Return each program that users are shown, in pages, notebooks and examples, with its name."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield page.name, "\n".join(blocks(page, "python"))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        yield notebook.name, "\n".join("".join(cell["source"]) for cell in cells)
    for example in sorted((ROOT / "examples").glob("*.py")):
        yield example.name, example.read_text()


def imported(program: str) -> set[str]:
    """Return the packages that a program imports, but for Python's own and its neighbours in `examples`."""
    names = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    neighbours = {example.stem for example in (ROOT / "examples").glob("*.py")}
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - neighbours


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install", wheel]:
            print(blocks(ROOT / "README.md", "sh")[0].replace(REPOSITORY, Path(wheel).resolve().as_uri()))
        case ["import"]:
            for name in sorted(set().union(*(imported(program) for _, program in programs()))):
                import_module(name)
        case ["program", page]:
            print("\n\n".join(blocks(Path(page), "python")))
        case _:
            sys.exit(__doc__)

"""Each item of jax_compat, jax_patches and mpi/compat has a test in a test_compat_*.py; nothing else is private."""

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT
from private_parts import tested, what_breaks

from distdl_jax import jax_compat, jax_patches
from distdl_jax.transports.mpi import compat as mpi_compat


def test_each_item_has_a_test_and_says_what_would_replace_it() -> None:
    for tests in ("test_compat_jax", "test_compat_patches", "test_compat_tokens", "test_compat_mpi4jax"):
        importlib.import_module(tests)
    items = {
        name: item
        for module in (jax_compat, jax_patches, mpi_compat)
        for name, item in vars(module).items()
        if getattr(item, "__module__", "") == module.__name__ and not inspect.isclass(item) and not name.startswith("_")
    }
    assert set(items) == tested
    for item in items.values():
        assert "Private: " in str(item.__doc__)


def test_a_failure_gives_the_sentence() -> None:
    def breaks() -> None:
        raise AttributeError("jax has no such name")

    with pytest.raises(
        AssertionError, match=r"^distdl_jax\.jax_compat\.source_frames: Yield the frames (.|\n)* would replace"
    ):
        what_breaks(jax_compat.source_frames)(breaks)()


def imported(file: Any) -> set[str]:
    """Return the modules that a file of Python imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_nothing_else_imports_what_is_private() -> None:
    files = [file for folder in ("distdl_jax", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    guilty = [file for file in files if any("._src" in name for name in imported(file))]
    assert set(guilty) == {Path(str(module.__file__)) for module in (jax_compat, jax_patches, mpi_compat)}

"""The packages that a worker needs, and their versions. Imports none of them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

PACKAGES = ("distdl_jax", "jax", "jaxlib", "mpi4jax", "mpi4py", "numpy")

FIRST_JAX_NOT_TRIED = (0, 13)
"""The first version of jax with which the library has not been tested."""


def installed_version(package: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def minimum_versions() -> dict[str, str]:
    """Return the oldest version of each package that distdl_jax needs; {} if it is not installed."""
    try:
        needed = requires("distdl_jax") or []
    except PackageNotFoundError:
        return {}
    found = (re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement) for requirement in needed)
    return {each[1]: each[2] for each in found if each}

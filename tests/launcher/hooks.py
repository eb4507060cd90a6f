"""The hooks of a project: what its ranks need. A `conftest.py` implements those that it wants."""

from collections.abc import Callable, MutableMapping

import pytest


@pytest.hookspec
def pytest_world_environment(environment: MutableMapping[str, str], size: int) -> None:
    """Set, where the user has not, what the environment of a rank in a world of `size` needs, before it is started."""


@pytest.hookspec
def pytest_world_start() -> None:
    """Import on every rank what has to come before tests; nothing else has initialised MPI by then."""


@pytest.hookspec
def pytest_world_settle() -> None:
    """Wait on every rank, after each test, for what still runs, so that a hang in it belongs to this test."""


def pytest_world_simulate(size: int, test: Callable[[], object]) -> None:
    """Run `test` on each worker of a world of `size` threads; its first error is raised."""

"""Run tests in MPI worlds of several sizes from one `pytest` command; see docs/testing.md."""

from launcher.examples import load_profile
from launcher.plugin import (
    pytest_addoption,
    pytest_collection_finish,
    pytest_configure,
    pytest_generate_tests,
    pytest_report_collectionfinish,
    pytest_report_header,
)

__all__ = [
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_report_collectionfinish",
    "pytest_report_header",
]

load_profile()

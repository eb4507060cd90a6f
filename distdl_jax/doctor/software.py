"""Findings about versions, JAX's options and the library's settings."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from distdl_jax.doctor.facts import Facts
from distdl_jax.doctor.findings import Finding, on_each_worker
from distdl_jax.launch.packages import FIRST_JAX_NOT_TRIED
from distdl_jax.settings import SETTINGS, difference, setting_problems, warning_of_unknown

OPTIONAL_FOR_SIMULATE = ("mpi4py", "mpi4jax")

_CURE_ONE_ENVIRONMENT = "Start all workers in one environment that all hosts see, with the same variables."
_COMPILE_ONEDNN = "python -m distdl_jax.onednn"
_CURE_ONEDNN = f"{_COMPILE_ONEDNN} on every host that lacks it, or DISTDL_JAX_ONEDNN=off on all workers."


def find(everyone: Sequence[Facts], simulated: bool = False) -> Iterator[Finding]:
    """Yield the findings about software; `simulated`: no MPI is needed."""
    yield from on_each_worker(lambda facts: _versions(facts, simulated), everyone)
    yield from _differences(everyone)
    yield from on_each_worker(_jax_options, everyone)
    yield from on_each_worker(_onednn, everyone)
    yield from _settings(everyone)


def _versions(facts: Facts, simulated: bool) -> Iterator[Finding]:
    software = facts.software
    listed = [f"Python {software.python}"]
    problems = False
    for package, version in software.packages.items():
        if version is None and package == "distdl_jax":
            listed.append(f"distdl_jax, not installed, from {software.location}")
        elif version is None:
            verdict = "note" if simulated and package in OPTIONAL_FOR_SIMULATE else "error"
            problems |= verdict == "error"
            yield Finding(verdict, "versions", f"{package} is not installed.", _installing(package))
        else:
            listed.append(f"{package} {version}")
            if (oldest := software.minimum.get(package)) and _numbers(version) < _numbers(oldest):
                problems = True
                found = f"{package} {version} is too old: distdl_jax needs {oldest}."
                yield Finding("error", "versions", found, _installing(package, oldest))
    if not (3, 11) <= _numbers(software.python)[:2] < (3, 15):
        found = f"distdl_jax has been tested with Python 3.11 to 3.14, and this is {software.python}."
        yield Finding("warning", "versions", found, "If something fails that should not, take one of these.")
    if _numbers(software.python)[:2] == (3, 11):
        found = f"Python {software.python} ends with jax 0.10.2, whose convolutions are slower, but for oneDNN's."
        yield Finding("note", "versions", found, "jax 0.11 and newer need Python 3.12: make venv PYTHON=python3.13")
    if (jax := software.packages.get("jax")) and _numbers(jax) >= FIRST_JAX_NOT_TRIED:
        first = ".".join(map(str, FIRST_JAX_NOT_TRIED))
        found = f"distdl_jax has not been tested with jax {jax}, but with versions before {first}."
        cure = f'If something fails that should not: python -m pip install "jax<{first}" "jaxlib<{first}"'
        yield Finding("warning", "versions", found, cure)
    if not problems:
        yield Finding("ok", "versions", f"{', '.join(listed)}.")
    if software.jax_error is not None and None not in (
        software.packages.get("jax", ""),
        software.packages.get("jaxlib", ""),
    ):
        cure = "JAX_PLATFORMS=cpu takes the CPU; otherwise see JAX's installation guide."
        yield Finding("error", "jax", f"JAX does not start: {software.jax_error}", cure)


def _installing(package: str, oldest: str = "") -> str:
    wanted = f'"{package}>={oldest}"' if oldest else package
    options = " --no-cache-dir --no-binary=mpi4jax" if package == "mpi4jax" else ""
    return f"python -m pip install{options} {wanted}" + ("  (MPI's mpicc first on PATH)" if options else "")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with.

    >>> _numbers("0.9.1.post2"), _numbers("3.15.0rc1")
    ((0, 9, 1), (3, 15, 0))
    """
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _differences(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Yield what the first partition would refuse, since it is not the same on all workers."""
    compared: dict[str, list[Hashable]] = {
        package: [facts.software.packages.get(package) or "not installed" for facts in everyone]
        for package in everyone[0].software.packages
    }
    compared["Python"] = [facts.software.python for facts in everyone]
    compared["MPI library"] = [facts.mpi.implementation for facts in everyone]
    if all(facts.settings.settings.onednn != "off" for facts in everyone):
        compared["oneDNN"] = [facts.software.onednn for facts in everyone]
    compared["jax_enable_x64"] = [facts.software.x64 for facts in everyone]
    compared["jax_disable_jit"] = [facts.software.disable_jit for facts in everyone]
    for what, values in compared.items():
        if text := difference(what, values):
            cure = _CURE_ONEDNN if what == "oneDNN" else _CURE_ONE_ENVIRONMENT
            yield Finding("error", "workers differ", text, cure)


def _jax_options(facts: Facts) -> Iterator[Finding]:
    software = facts.software
    if software.disable_jit:
        found = "JAX_DISABLE_JIT is on: every operation runs by itself, and workers compare shapes each time."
        yield Finding("warning", "jax", found, "Leave it out, but to look for an error.")
    if software.rank_promotion == "raise":
        found = "JAX_NUMPY_RANK_PROMOTION=raise refuses `layer.init`, and layers, which add biases of one dimension."
        yield Finding("warning", "jax", found, "Set it to allow, or warn.")
    if software.debug_nans:
        found = "JAX_DEBUG_NANS or JAX_DEBUG_INFS is on: a worker that finds one raises, but can't name the operation."
        yield Finding("note", "jax", found)


def _onednn(facts: Facts) -> Iterator[Finding]:
    if facts.settings.settings.onednn == "off":
        return
    if problem := facts.software.onednn_problem:
        yield Finding("warning", "onednn", problem, _COMPILE_ONEDNN)
    elif facts.software.onednn != "none":
        yield Finding("ok", "onednn", f"oneDNN {facts.software.onednn} is compiled in.")
    elif facts.software.onednn_is_here and facts.devices.platform == "cpu":
        found = "oneDNN and a C++ compiler are here, but float32 convolutions are XLA's, which are slower."
        yield Finding("warning", "onednn", found, _COMPILE_ONEDNN)


def _settings(everyone: Sequence[Facts]) -> Iterator[Finding]:
    readings = [facts.settings for facts in everyone]
    problems = list(setting_problems(readings))
    for problem in problems:
        yield Finding("error", "settings", problem, "docs/settings.md has a table of all of them.")
    if warning := warning_of_unknown(readings):
        yield Finding("warning", "settings", warning, "Correct the name, or leave it out.")
    if not problems:
        current = readings[0].settings
        in_force = [
            f"{setting.name}={value}"
            for attribute, setting in SETTINGS.items()
            if (value := current.describe(attribute)) not in ("not set", setting.default)
        ]
        yield Finding("ok", "settings", f"{', '.join(in_force) or 'all have their defaults'}.")

"""Which form computes a convolution: by what was measured on this machine, or, unseen, on others.

`chosen_unseen` follows from the library's own records alone, so it is the same everywhere. A class of problems takes
another form than the plain one only where that was faster in every record of the class, on two processors.
`chosen_here` reads what was measured on this machine, and measures what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from distdl_jax.errors import SetupError
from distdl_jax.kernels.conv_algorithms import DIRECTIONS, MANY_SAMPLES, Direction, Forms, Problem
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.layout import row_major
from distdl_jax.kernels.onednn.compiled import version
from distdl_jax.kernels.processor import machine
from distdl_jax.kernels.selection import Times, best_everywhere, cheapest, worth_trying
from distdl_jax.kernels.timing import Budget, Measurement, measure
from distdl_jax.kernels.tuning_cache import Kept, add, default_path, read
from distdl_jax.settings import current_settings
from distdl_jax.watchdog.log import log

LARGE_ENOUGH = 2**22
"""So many products are worth measuring: 0.1 to 1 ms on one thread."""

ENOUGH = 2**27
"""So many products are measured, by leaving out samples; they take 5 to 100 ms."""

SECONDS = 1.0
"""Of processor time for one layer, after which no other direction is begun."""

FAR_BETTER = 4.0
"""Where the rewritten form, or oneDNN's, is so many times faster than plain XLA in one direction, it is taken in those
that are not measured, too: by the library's records the rewritten one then takes at most 1.1 times as long as plain
there, but for one of 450."""

_TAKEN_FOR_OTHERS = ("plain", "rewritten", "onednn")

_FIRST: tuple[Direction, ...] = ("weight_gradient", "forward", "input_gradient")
"""In the order of what there is to gain."""

_measured_before: Kept = {}


def chosen_unseen(problem: Problem) -> Forms:
    """The forms to take where nothing is known of this machine."""
    if not problem.has_forms:
        return Forms()
    return Forms(*(_unseen(problem, direction) for direction in DIRECTIONS))


def chosen_here(problem: Problem, may_measure: bool) -> Forms:
    """The forms to take on this machine, by what was measured on it, now if need be.

    - `may_measure`: whether times that are measured here and now say something.
    """
    settings = current_settings()
    by_setting = settings.tuning == "off" or settings.onednn == "always"
    if by_setting or not problem.has_forms or problem.products < LARGE_ENOUGH:
        return chosen_unseen(problem)
    if not any("onednn" in problem.forms(direction) for direction in DIRECTIONS):
        problem = replace(problem, apart=None)  # which all others join
    smaller, path = problem.smaller(ENOUGH), settings.tuning_file or default_path()
    known = {**(_read(path, machine()) if path else {}), **_measured_before}
    if settings.tuning == "on" and may_measure:
        known |= _measure_missing(smaller, known, path)
    return Forms(*(_here(smaller, direction, known) for direction in DIRECTIONS))


def _here(problem: Problem, direction: Direction, known: Kept) -> str:
    unseen = _unseen(problem, direction)
    measured = known.get(_subject(problem, direction), {})
    usable = {way: told for way, told in measured.items() if way in problem.forms(direction)}
    if not usable and len(tried := candidates(problem, direction)) == 1:
        return tried[0]
    if not usable and (better := _far_better(problem, known)) in problem.forms(direction):
        return better
    shapes = (problem.x, problem.weight, problem.y)
    data = sum(int(np.prod(shape)) for shape in shapes) * np.dtype(problem.dtype).itemsize
    return cheapest(usable, unseen, data) if usable else unseen


def _far_better(problem: Problem, known: Kept) -> str:
    """The fastest form here, in a direction that was measured, if it is far faster than the plain one; or ""."""
    for direction in DIRECTIONS:
        told = known.get(_subject(problem, direction), {})
        seconds = {form: told[form].seconds for form in _TAKEN_FOR_OTHERS if form in told}
        best = min(seconds, key=lambda form: seconds[form], default="plain")
        if seconds.get("plain", 0.0) >= FAR_BETTER * seconds.get(best, 1.0):
            return best
    return ""


def _measure_missing(problem: Problem, known: Kept, path: Path | None) -> Kept:
    budget, found = Budget(SECONDS), Kept()
    for direction in _FIRST:
        tried = candidates(problem, direction)
        subject = _subject(problem, direction)
        if len(tried) == 1 or set(tried) <= set(known.get(subject, {})) or budget.is_spent:
            continue
        if measured := measured_forms(problem, direction, tried):
            found[subject] = measured
            log.info("measured %s: %s", subject, measured)
    _measured_before.update(found)
    if found and path is not None and not add(path, machine(), found):
        log.info("%s can't be written: what was measured is forgotten with this process", path)
    return found


def measured_forms(problem: Problem, direction: Direction, forms: Sequence[str]) -> dict[str, Measurement]:
    """The times of these forms, each as a program whose arguments and result are as layers hand them on."""
    ways: dict[str, Callable[..., Any]] = {}
    shapes: tuple[tuple[int, ...], ...] = ()
    for form in forms:
        compute, shapes = problem.function(direction, form)

        def way(*arrays: Array, compute: Any = compute) -> Any:
            return jax.tree.map(row_major, compute(*arrays))

        ways[form] = way
    return measure(ways, shapes, problem.dtype)


def candidates(problem: Problem, direction: Direction) -> tuple[str, ...]:
    """The forms that are worth measuring."""
    tried = worth_trying(_records_like(problem, direction), problem.forms(direction))
    # Groups in plain XLA can take 900 times as long as in other words, and seconds to compile.
    return tried if problem.groups == 1 else tuple(form for form in tried if form != "plain")


def _subject(problem: Problem, direction: Direction) -> str:
    w = problem.window
    shapes = " * ".join("x".join(map(str, shape)) for shape in (problem.x, problem.weight))
    placed = f"stride {w.stride}, padding {w.padding}, dilation {w.dilation}, groups {problem.groups}"
    if (apart := problem.apart) is not None:
        for axis, low, high in apart.sides:
            placed += f", {low} before and {high} after apart in dimension {axis}"
    return f"convolution, {direction}: {problem.dtype} {shapes}, {placed}"


@cache
def _read(path: Path, machine: str) -> Kept:
    # Once for a process, so that one choice holds for as long as it lives.
    return read(path, machine)


def _unseen(problem: Problem, direction: Direction) -> str:
    if current_settings().onednn == "always":
        if version() == "none":
            raise SetupError(
                "The environment variable DISTDL_JAX_ONEDNN (=always) needs oneDNN's convolutions, which are not "
                "compiled in this environment: python -m distdl_jax.onednn compiles them."
            )
        if "onednn" in problem.forms(direction):
            return "onednn"
    return best_everywhere(_records_like(problem, direction), "plain")


def _records_like(problem: Problem, direction: Direction) -> Mapping[str, Sequence[Times]]:
    return _records().get(_class(problem, direction), {})


@cache
def _records() -> dict[Hashable, dict[str, list[Times]]]:
    """The library's own records, by class, by processor."""
    found: dict[Hashable, dict[str, list[Times]]] = {}
    told = json.loads((files("distdl_jax.kernels") / "records.json").read_text(encoding="utf-8"))
    for processor, rows in told.items():
        for row in rows:
            problem = from_record(row)
            for direction in DIRECTIONS:
                if times := row.get(direction):
                    found.setdefault(_class(problem, direction), {}).setdefault(processor, []).append(times)
    return found


def from_record(row: Mapping[str, Any]) -> Problem:
    """The problem that a record is about."""
    dims = len(row["x"]) - 2
    stride, dilation = (tuple(row.get(name, (1,) * dims)) for name in ("stride", "dilation"))
    padding = tuple((low, high) for low, high in row.get("padding", ((0, 0),) * dims))
    window = Placement(stride, padding, dilation)
    return Problem(tuple(row["x"]), tuple(row["weight"]), window, row.get("groups", 1), row["dtype"])


def _class(problem: Problem, direction: Direction) -> Hashable:
    """What the fastest form depends on most."""
    c_out, c_in = problem.weight[:2]
    window = problem.window
    return (
        direction,
        problem.dtype,
        len(problem.window.stride),
        *(_few(channels) for channels in (c_in, c_out // problem.groups)),
        int(np.prod(problem.weight[2:])) == 1,
        set(window.stride) != {1},
        set(window.dilation) != {1},
        min(problem.groups, 2) + (problem.groups > 16),
        direction == "weight_gradient" and problem.x[0] >= MANY_SAMPLES,
    )


def _few(channels: int) -> int:
    return sum(channels > limit for limit in (1, 7, 16))

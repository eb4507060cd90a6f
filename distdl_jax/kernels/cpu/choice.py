"""The choice between the algorithms of a convolution: by measurements on this machine, or by the library's records.

`by_records` is the same everywhere. A class of problems takes another algorithm than the plain one only where that was
faster in every record of the class, on two processors. `by_measurements` reads the measurements made on this machine,
and makes those that are missing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from distdl_jax.errors import SetupError
from distdl_jax.kernels.cpu.convolution import as_program, available
from distdl_jax.kernels.cpu.onednn.shared_library import version
from distdl_jax.kernels.cpu.timing import Budget, Measurement, machine, measure
from distdl_jax.kernels.cpu.tuning_cache import Measurements, add, default_path, read
from distdl_jax.kernels.geometry import Placement, row_major
from distdl_jax.kernels.problem import DIRECTIONS, MANY_SAMPLES, Algorithms, Direction, Problem
from distdl_jax.settings import current_settings

log = logging.getLogger("distdl_jax")

LARGE_ENOUGH = 2**22
"""So many multiplications are worth measuring: 0.1 to 1 ms on one thread."""

ENOUGH = 2**27
"""So many multiplications are measured, by leaving out samples; they take 5 to 100 ms."""

SECONDS = 1.0
"""Processor time for one layer, after which no other direction is started."""

FAR_BETTER = 4.0
"""Where the rewritten algorithm, or oneDNN's, is so many times faster than plain XLA in one direction, it is taken in
those that are not measured, too: by the library's records the rewritten one then takes at most 1.1 times as long as
plain there, but for one of 450."""

WORTH_A_CHANGE = 1.1
"""How many times faster on this machine another algorithm must be than the one that is taken without measuring."""

WORTH_IT = 1.2
"""How many times faster than the plain algorithm another one must be in every record, to be taken without measuring."""

HOPELESS = 4.0
"""So many times slower than another algorithm in every record, one is not even tried."""

PROCESSORS = 2
"""On how many processors there must be records before anything follows for others."""

PRICE_OF_MEMORY = 0.05
"""How much more time an algorithm may take that needs less memory, for as much memory as arguments and result are."""

_TAKEN_FOR_OTHERS = ("plain", "rewritten", "onednn")

_FIRST: tuple[Direction, ...] = ("weight_gradient", "forward", "input_gradient")
"""In the order of what there is to gain."""

Times = Mapping[str, float]
"""Seconds of each algorithm, on one processor, for one problem."""

_measured_before: Measurements = {}


def by_records(problem: Problem) -> Algorithms:
    """Return the algorithms to take where nothing is known of this machine."""
    return Algorithms(*(_unseen(problem, direction) for direction in DIRECTIONS))


def by_measurements(problem: Problem, may_measure: bool) -> Algorithms:
    """Return the algorithms to take on this machine, by what was measured on it, now if need be.

    - `may_measure`: whether times that are measured here and now mean anything.
    """
    settings = current_settings()
    if settings.tuning == "off" or settings.onednn == "always" or problem.multiplications < LARGE_ENOUGH:
        return by_records(problem)
    if not any("onednn" in available(problem, direction) for direction in DIRECTIONS):
        problem = replace(problem, split_input=None)  # which all others join
    smaller, path = problem.smaller(ENOUGH), settings.tuning_file or default_path()
    known = {**(_read(path, machine()) if path else {}), **_measured_before}
    if settings.tuning == "on" and may_measure:
        known |= _measure_missing(smaller, known, path)
    return Algorithms(*(_here(smaller, direction, known) for direction in DIRECTIONS))


def _here(problem: Problem, direction: Direction, known: Measurements) -> str:
    unseen, usable = _unseen(problem, direction), available(problem, direction)
    measured = {name: one for name, one in known.get(_subject(problem, direction), {}).items() if name in usable}
    if measured:
        shapes = (problem.x, problem.weight, problem.y)
        data = sum(int(np.prod(shape)) for shape in shapes) * np.dtype(problem.dtype).itemsize
        return cheapest(measured, unseen, data)
    if len(tried := candidates(problem, direction)) == 1:
        return tried[0]
    return better if (better := _far_better(problem, known)) in usable else unseen


def cheapest(measured: Mapping[str, Measurement], without: str, data: int) -> str:
    """Return the fastest algorithm, memory counted in; `without` is the one that is taken without measuring.

    - `data`: how many bytes arguments and result have.
    """

    def cost(name: str) -> float:
        return measured[name].seconds * (1 + PRICE_OF_MEMORY * measured[name].temporaries / max(data, 1))

    best = min(measured, key=cost)
    return without if without in measured and cost(without) <= WORTH_A_CHANGE * cost(best) else best


def _far_better(problem: Problem, known: Measurements) -> str:
    """Return the fastest algorithm in a direction that was measured, if it is far faster than the plain one; or ""."""
    for direction in DIRECTIONS:
        measured = known.get(_subject(problem, direction), {})
        seconds = {name: measured[name].seconds for name in _TAKEN_FOR_OTHERS if name in measured}
        best = min(seconds, key=lambda name: seconds[name], default="plain")
        if seconds.get("plain", 0.0) >= FAR_BETTER * seconds.get(best, 1.0):
            return best
    return ""


def _measure_missing(problem: Problem, known: Measurements, path: Path | None) -> Measurements:
    budget, found = Budget(SECONDS), Measurements()
    for direction in _FIRST:
        tried = candidates(problem, direction)
        subject = _subject(problem, direction)
        if len(tried) == 1 or set(tried) <= set(known.get(subject, {})) or budget.is_spent:
            continue
        if measured := measured_algorithms(problem, direction, tried):
            found[subject] = measured
            log.info("measured %s: %s", subject, measured)
    _measured_before.update(found)
    if found and path is not None and not add(path, machine(), found):
        log.info("%s can't be written: what was measured is forgotten with this process", path)
    return found


def measured_algorithms(problem: Problem, direction: Direction, names: Sequence[str]) -> dict[str, Measurement]:
    """Measure these algorithms, each as a program whose arguments and result are in the order between layers."""
    programs = {name: as_program(problem, direction, name) for name in names}

    def run(name: str, *arrays: Array) -> Any:
        return jax.tree.map(row_major, programs[name][0](*arrays))

    _, shapes = next(iter(programs.values()))
    return measure({name: partial(run, name) for name in names}, shapes, problem.dtype)


def candidates(problem: Problem, direction: Direction) -> tuple[str, ...]:
    """Return the algorithms that are worth measuring."""
    tried = worth_trying(_records_like(problem, direction), available(problem, direction))
    # Groups in plain XLA can take 900 times as long as in other words, and seconds to compile; 4 dimensions 70 times.
    return tried if problem.groups == 1 and problem.dims < 4 else tuple(name for name in tried if name != "plain")


def _subject(problem: Problem, direction: Direction) -> str:
    """Return the problem's name in the user's file; another wording would lose the measurements that are there."""
    w = problem.window
    shapes = " * ".join("x".join(map(str, shape)) for shape in (problem.x, problem.weight))
    placed = f"stride {w.stride}, padding {w.padding}, dilation {w.dilation}, groups {problem.groups}"
    for axis, low, high in problem.split_input.sides if problem.split_input else ():
        placed += f", {low} before and {high} after apart in dimension {axis}"
    return f"convolution, {direction}: {problem.dtype} {shapes}, {placed}"


@cache
def _read(path: Path, machine: str) -> Measurements:
    # Once for a process, so that one choice holds for as long as it lives.
    return read(path, machine)


def _unseen(problem: Problem, direction: Direction) -> str:
    if current_settings().onednn == "always":
        if version() == "none":
            raise SetupError(
                "The environment variable DISTDL_JAX_ONEDNN (=always) needs oneDNN's convolutions, which are not "
                "compiled in this environment: python -m distdl_jax.onednn compiles them."
            )
        if "onednn" in available(problem, direction):
            return "onednn"
    if problem.dims > 3:  # of which XLA has no kernel, so that there is nothing for records to tell
        return "products" if problem.groups == 1 and math.prod(problem.weight[2:]) == 1 else "rewritten"
    return best_everywhere(_records_like(problem, direction))


def best_everywhere(records: Mapping[str, Sequence[Times]]) -> str:
    """Return the algorithm to take where nothing was measured, by records of such problems, by processor."""
    names = {name for of_processor in records.values() for times in of_processor for name in times}
    gains = {name: _least_gain(records, name, "plain") for name in sorted(names - {"plain"})}
    good = {name: gain for name, gain in gains.items() if gain >= WORTH_IT}
    return max(good, key=lambda name: good[name]) if good else "plain"


def worth_trying(records: Mapping[str, Sequence[Times]], names: Iterable[str]) -> tuple[str, ...]:
    """Return those of `names` that were not far slower than another one of them wherever the two were measured."""
    names = tuple(names)
    return tuple(
        name for name in names if all(other == name or _least_gain(records, other, name) < HOPELESS for other in names)
    )


def _least_gain(records: Mapping[str, Sequence[Times]], name: str, than: str) -> float:
    """Return how many times faster one algorithm was than another, at least; 0 with records of too few processors."""
    gains = [
        [times[than] / times[name] for times in of_processor if name in times and than in times]
        for of_processor in records.values()
    ]
    known = [gain for gain in gains if gain]
    return min(map(min, known)) if len(known) >= PROCESSORS else 0.0


def _records_like(problem: Problem, direction: Direction) -> Mapping[str, Sequence[Times]]:
    return _records().get(_class(problem, direction), {})


@cache
def _records() -> dict[Hashable, dict[str, list[Times]]]:
    """Return the library's own records, by class, by processor."""
    found: dict[Hashable, dict[str, list[Times]]] = {}
    text = (files("distdl_jax.kernels.cpu") / "records.json").read_text(encoding="utf-8")
    for processor, rows in json.loads(text).items():
        for row in rows:
            problem = from_record(row)
            for direction in DIRECTIONS:
                if times := row.get(direction):
                    found.setdefault(_class(problem, direction), {}).setdefault(processor, []).append(times)
    return found


def from_record(row: Mapping[str, Any]) -> Problem:
    """Return the problem that a record is about."""
    dims = len(row["x"]) - 2
    stride, dilation = (tuple(row.get(name, (1,) * dims)) for name in ("stride", "dilation"))
    padding = tuple((low, high) for low, high in row.get("padding", ((0, 0),) * dims))
    window = Placement(stride, padding, dilation)
    return Problem(tuple(row["x"]), tuple(row["weight"]), window, row.get("groups", 1), row["dtype"])


def _class(problem: Problem, direction: Direction) -> Hashable:
    """Return the facts on which the fastest algorithm depends most."""
    c_out, c_in = problem.weight[:2]
    window = problem.window
    return (
        direction,
        problem.dtype,
        len(window.stride),
        *(_few(channels) for channels in (c_in, c_out // problem.groups)),
        int(np.prod(problem.weight[2:])) == 1,
        set(window.stride) != {1},
        set(window.dilation) != {1},
        min(problem.groups, 2) + (problem.groups > 16),
        direction == "weight_gradient" and problem.x[0] >= MANY_SAMPLES,
    )


def _few(channels: int) -> int:
    return sum(channels > limit for limit in (1, 7, 16))

"""How far the times that are foreseen may be off, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from distdl_jax.machine.machine import Machine

MODEL = 0.3
"""How far times are off where steps were measured, about: benchmarks/cost.py gives 22 and 24 % in the median."""

GUESS = 0.5
"""How far a number may be off that nobody measured."""


class Uncertainty(NamedTuple):
    """Relative errors of the times of arithmetic and of messages, below 1, and the reasons in words."""

    computing: float
    messages: float
    reasons: tuple[str, ...]


def uncertainty(machine: Machine, dtype: str, levels: Collection[str]) -> Uncertainty:
    """Return how sure the times of a machine are, in a dtype, for messages on these levels."""
    quality = machine.quality
    reasons = [f"what the model leaves out, about {MODEL:.0%}"]
    if quality.noise:
        reasons.append(f"times vary by {quality.noise:.0%} from step to step")
    if quality.rounds_differ:
        reasons.append(
            f"half of the machine's numbers differed by {quality.rounds_differ:.0%} between rounds of its measurement"
        )
    computing = [name for name in machine.guesses if name.startswith(("host.", "calls."))]
    messages = [name for name in machine.guesses if name.startswith(tuple(f"levels.{level}." for level in levels))]
    if all(point.dtype != dtype for point in machine.compute.points):
        computing.append("compute.points")
    if levels and not machine.collectives.points:
        messages.append("collectives.points")
    if levels and quality.fit_error:
        reasons.append(f"messages are off by up to {quality.fit_error:.0%} from the lines of the file")
    for what, guesses in (("arithmetic", computing), ("messages", messages)):
        if guesses:
            reasons.append(f"guesses of {what}, which may be off by {GUESS:.0%}: {_by_table(guesses)}")
    both = MODEL + quality.rounds_differ
    return Uncertainty(
        min(both + GUESS * bool(computing), 0.9),
        min(both + quality.fit_error + GUESS * bool(messages), 0.9),
        tuple(reasons),
    )


def _by_table(names: Collection[str]) -> str:
    """Return the tables of a machine file that numbers are in, with how many of each."""
    counts = Counter(name.rpartition(".")[0] for name in names)
    return ", ".join(f"{table} ({count})" for table, count in counts.items())

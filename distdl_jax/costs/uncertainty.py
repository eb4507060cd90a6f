"""How far the times that are foreseen may be off, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from distdl_jax.machine.machine import Machine

MODEL = 0.1
"""How far times are off on a machine that was measured, by the median of benchmarks/cost.py."""

GUESS = 0.5
"""How far a number may be off that nobody measured."""


class Uncertainty(NamedTuple):
    """Relative errors of the times of arithmetic and of messages, below 1, and the reasons in words."""

    computing: float
    messages: float
    reasons: tuple[str, ...]


def uncertainty(machine: Machine, levels: Collection[str]) -> Uncertainty:
    """Return how sure the times of a machine are, for messages on these levels."""
    quality = machine.quality
    reasons = [f"the model is off by {MODEL:.0%} in the median of the networks that were measured"]
    if quality.noise:
        reasons.append(f"times vary by {quality.noise:.0%} from step to step")
    if quality.rounds_differ:
        reasons.append(f"rounds of the machine's measurement differed by {quality.rounds_differ:.0%}")
    computing = [name for name in machine.guesses if name.startswith(("host.", "calls.", "compute."))]
    messages = [name for name in machine.guesses if name.startswith(tuple(f"levels.{level}." for level in levels))]
    if not machine.compute.points:
        computing.append("rates of shapes")
    if levels and not machine.collectives.points:
        messages.append("collective operations")
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
    counts = Counter(name.rpartition(".")[0] or name for name in names)
    return ", ".join(
        f"{table} ({count})" if f"{table}." in " ".join(names) else table for table, count in counts.items()
    )

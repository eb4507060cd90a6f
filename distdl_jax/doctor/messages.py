"""Findings about measured messages, beside what a machine's file expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from distdl_jax.doctor.facts import Facts, Measured, Message
from distdl_jax.doctor.findings import Finding, by_host, size_text, time_text
from distdl_jax.doctor.hosts import usable

if TYPE_CHECKING:
    from distdl_jax.tools.cost.machine import Machine

TOO_SLOW = 2.0
"""How many times longer than the machine's file expects a message may take."""

SLOW_NETWORK = 15e-6
"""Seconds of a small message between hosts. Networks of clusters take 1 to 5 us, Ethernet with TCP 20 and more."""


def find(everyone: Sequence[Facts], measured: Measured, machine: Machine | None = None) -> Iterator[Finding]:
    """Yield the findings about what was measured."""
    hosts = by_host(everyone)
    crowded = any(len(workers) > usable([everyone[worker] for worker in workers]) for workers in hosts.values())
    for message in measured.messages:
        yield _message(message, everyone, machine, crowded)
    for nbytes, seconds in measured.all_reduces.items():
        expected = None
        if machine is not None and (len(hosts) == 1 or "network" in machine.levels):
            expected = machine.collective_seconds("allreduce", len(everyone), nbytes, len(hosts))
        what = f"An all-reduce of {size_text(nbytes)} over {len(everyone)} workers"
        yield _compared("all-reduce", what, nbytes, seconds, expected, crowded)


def _message(message: Message, everyone: Sequence[Facts], machine: Machine | None, crowded: bool) -> Finding:
    near = everyone[message.source].host.name == everyone[message.to].host.name
    level = "host" if near else "network"
    if machine is not None and near and message.to < machine.workers_per_host:
        level = machine.level_of(message.source, message.to)
    expected = None
    if machine is not None and level in machine.levels:
        expected = float(machine.message_seconds(message.nbytes, level))
    where = "on one host" if near else f"on {everyone[message.source].host.name} and {everyone[message.to].host.name}"
    what = f"{size_text(message.nbytes)} from worker {message.source} to {message.to}, {where},"
    finding = _compared("message", what, message.nbytes, message.seconds, expected, crowded)
    if finding.verdict == "ok" and not near and message.nbytes < 1024 and message.seconds > SLOW_NETWORK:
        cure = "If the hosts have a faster network than Ethernet, MPI does not use it: take the cluster's own MPI."
        return Finding("note", finding.subject, finding.found, cure)
    return finding


def _compared(subject: str, what: str, nbytes: int, seconds: float, expected: float | None, crowded: bool) -> Finding:
    speed = f" ({nbytes / seconds / 1e9:.3g} GB/s)" if nbytes > 1024 else ""
    found = f"{what} takes {time_text(seconds)}{speed}"
    if expected is not None:
        found += f"; the machine's file expects {time_text(expected)}"
    if expected is None or seconds <= TOO_SLOW * expected:
        return Finding("ok", subject, f"{found}.")
    if crowded:
        return Finding("note", subject, f"{found}. There are more workers than cores.")
    return Finding(
        "warning", subject, f"{found}.", "Look for other jobs, for binding, and for the network that MPI takes."
    )

"""The measured times of a training step: `profile`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from distdl_jax.errors import SetupError
from distdl_jax.text import aligned, number
from distdl_jax.tools.profile.activities import BACKWARD, MESSAGE, PACKING, Activities, activities_of
from distdl_jax.tools.profile.recording import record
from distdl_jax.tools.profile.times import LayerProfile, PassTimes, add_up, meet
from distdl_jax.transports.open_world import open_world
from distdl_jax.validation import check_function, checked_integer

_HEADER = ("layer", "forward", "backward", "packing", "transfer", "waiting (least mean most)", "hidden")
_AMOUNTS = ("messages", "MB", "share")

OFTEN = 0.05
"""A worker is named if it accounts for at least this share of all waiting."""


def _row(title: str, forward: np.ndarray, backward: np.ndarray, times: PassTimes, step: float) -> list[str]:
    waiting = " ".join(number(1e3 * of(times.waiting)) for of in (np.min, np.mean, np.max))
    means = (number(1e3 * each.mean()) for each in (forward, backward, times.packing, times.transfer))
    took = forward + backward + times.packing + times.transfer + times.waiting
    share = f"{took.mean() / step:.1%}" if step else ""
    amounts = f"{times.messages.max():.4g}", number(times.bytes.max() / 1e6)
    return [title, *means, waiting, number(1e3 * times.hidden.mean()), *amounts, share]


def _blamed(layers: Sequence[LayerProfile], waited_for: np.ndarray) -> list[str]:
    """Name the workers for which the others waited, and the layers in which they did so most."""
    total = float(waited_for.sum())
    lines = []
    for worker in np.argsort(-waited_for.sum(0), kind="stable")[:3]:
        share = float(waited_for[:, worker].sum()) / total if total else 0.0
        if share < OFTEN:
            continue
        most = sorted(layers, key=lambda layer: -layer.waited_for[:, worker].sum())[:2]
        where = " and ".join(f"`{layer.title}`" for layer in most if layer.waited_for[:, worker].sum() > 0)
        lines.append(f"- worker {worker} is waited for in {share:.0%} of all waiting, most in {where}")
    return lines


_STEPS, _ARITHMETIC, _MESSAGES = 0, 1, 1000


def write_trace(path: str | os.PathLike[str], recorded: Mapping[int, Activities]) -> None:
    """Write the recordings of all workers; times start at the first step."""
    began = min(mine.steps[0][0] for mine in recorded.values())
    events = list(_arrows(recorded, began))
    for worker, mine in sorted(recorded.items()):
        events += _worker(worker, mine, began)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _worker(worker: int, mine: Activities, began: int) -> Iterator[dict[str, Any]]:
    """Yield a worker's events: its process, its rows, and its executed instructions."""
    yield {"ph": "M", "pid": worker, "name": "process_name", "args": {"name": f"worker {worker}"}}
    yield {"ph": "M", "pid": worker, "name": "process_sort_index", "args": {"sort_index": worker}}
    free: list[int] = []  # when each row of arithmetic is free: simultaneous instructions need separate rows
    for step, (start, end) in enumerate(mine.steps):
        yield _slice(worker, _STEPS, f"step {step}", start - began, end - start, {})
    for each in mine.activities:
        row, thread = mine.rows[each.row], _MESSAGES
        if each.kind != MESSAGE:
            lane = next((lane for lane, at in enumerate(free) if at <= each.start), len(free))
            free[lane : lane + 1] = [each.end]
            thread = _ARITHMETIC + lane
        about = {"instruction": each.instruction, "pass": "backward" if row.direction == BACKWARD else "forward"}
        if each.kind == PACKING:
            about["for"] = "messages"
        if each.operation is not None:
            about |= {"operation": str(each.operation), "bytes": str(each.operation.bytes_sent)}
        title = f"{row.place} {row.name}".strip()
        yield _slice(worker, thread, title, each.start - began, each.end - each.start, about)
    names = {_STEPS: "steps", _MESSAGES: "messages"}
    names |= {_ARITHMETIC + lane: f"arithmetic{f' {lane + 1}' if lane else ''}" for lane in range(len(free))}
    for thread, name in names.items():
        yield {"ph": "M", "pid": worker, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": worker, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _arrows(recorded: Mapping[int, Activities], began: int) -> Iterator[dict[str, Any]]:
    """Yield an arrow for each message, from the start of its send to the end of its receive, inside of the two."""
    messages = {worker: mine.messages for worker, mine in recorded.items()}
    for place, arrow in enumerate(meet(messages).arrows):
        sent, received = messages[arrow.sender][arrow.sent], messages[arrow.receiver][arrow.received]
        common = {"cat": "message", "name": "message", "id": place, "tid": _MESSAGES}
        yield {"ph": "s", "pid": arrow.sender, "ts": (sent.start + 1 - began) / 1e3, **common}
        yield {"ph": "f", "bp": "e", "pid": arrow.receiver, "ts": (received.end - 1 - began) / 1e3, **common}


def _slice(worker: int, thread: int, name: str, start: int, took: int, about: dict[str, str]) -> dict[str, Any]:
    where = {"pid": worker, "tid": thread, "ts": start / 1e3, "dur": took / 1e3}
    return {"ph": "X", "name": name, **where, **({"args": about} if about else {})}


@dataclass(frozen=True)
class Profile:
    """The times of a step: the mean over the recorded steps.

    - `layers`: layer by layer, then the rest: the loss, the update and others.
    - `seconds`: of a step, on each worker, by world rank.
    - `idle`: the seconds of a step in which nothing of the compiled program ran: Python, JAX's call, XLA's start.
    - `waited_for`: a row for each worker, a column for each worker that it waited for: seconds of a step.
    - `matched`: whether all messages were matched with their partners; otherwise all waiting counts as transfer.
    - `steps`: the number of recorded steps.
    """

    layers: tuple[LayerProfile, ...]
    seconds: np.ndarray
    idle: np.ndarray
    waited_for: np.ndarray
    matched: bool
    steps: int
    _recorded: Mapping[int, Activities] = field(default_factory=dict, repr=False, compare=False)

    def table(self) -> str:
        """Return a table as text: a row for each layer, and the workers that others waited for.

        Times are in ms, means over the workers; messages and bytes are the largest of any worker.
        """
        step = float(self.seconds.mean())
        rows = [[*_HEADER, *_AMOUNTS]]
        for layer in self.layers:
            times = layer.both
            rows.append(_row(layer.title, layer.forward.arithmetic, layer.backward.arithmetic, times, step))
        nothing = PassTimes.none(len(self.seconds))
        rows.append(_row("call", self.idle, nothing.arithmetic, nothing, step))
        total = sum((layer.both for layer in self.layers), nothing)
        passes = [
            sum((each.arithmetic for each in several), nothing.arithmetic)
            for several in zip(*((layer.forward, layer.backward) for layer in self.layers), strict=True)
        ] or [nothing.arithmetic] * 2
        rows.append(_row("a step", passes[0] + self.idle, passes[1], total, step))
        rows[-1][len(_HEADER) + 2] = "100.0%"
        lines = aligned(rows)
        lines.insert(1, "-" * max(map(len, lines)))
        lines.insert(-1, lines[1])
        lines += [
            "",
            f"a step: {1e3 * step:.3g} ms in the mean over workers, {1e3 * self.seconds.max():.3g} on the slowest",
        ]
        if not self.matched:
            lines.append(
                "- some messages could not be matched with their partners', so their waiting counts as transfer"
            )
        return "\n".join(line.rstrip() for line in (*lines, *_blamed(self.layers, self.waited_for)))

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Return all numbers as JSON, in the format of the page on profiles."""

        def of(times: PassTimes) -> dict[str, list[float]]:
            return {each.name: getattr(times, each.name).tolist() for each in fields(times)}

        layers = [
            {"place": each.place, "name": each.name, "forward": of(each.forward), "backward": of(each.backward)}
            for each in self.layers
        ]
        numbers = {name: getattr(self, name).tolist() for name in ("seconds", "idle", "waited_for")}
        return json.dumps({"version": 1, "steps": self.steps, "matched": self.matched, **numbers, "layers": layers})

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write all executed instructions as a file for Perfetto (ui.perfetto.dev) and Chrome's tracing page.

        Worker 0 writes it; the other workers may call this as well, without effect. Each worker is a process of the
        trace, with its steps, its arithmetic and its messages in separate rows. Arrows lead from sends to receives.

        - `path`: of the file, "trace.json".
        """
        if self._recorded:
            write_trace(path, self._recorded)


def profile(step: Callable[..., Any], *args: Any, steps: int = 20) -> Profile:
    """Run a training step several times under JAX's profiler, and report its times on all workers.

    Collective: all workers of the job call it, each with its own arguments. It runs two steps first, since the first
    one compiles, and then `steps` recorded ones. All of them get the same arguments; donated ones are copied, outside
    the timing. The steps' results are discarded.

    A layer of a `Sequential` or another network has its own row. Other layers and functions are distinguished by
    `jax.named_scope`, if you add it around them.

    **Arguments:**

    - `step`: the function to run, with all its calls of jitted functions: from `dj.jit`, `jax.jit` or plain Python.
    - `args`: its arguments.
    - `steps`: the number of recorded steps.

    **Returns:** a `Profile`, with the same numbers on all workers.

    **Raises:** `InvalidTypeError` if `step` can't be called; `InvalidArgumentError` if `steps` is below 1; `SetupError`
    in `dj.simulate`, whose workers share one process.

    >>> import jax, jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> network = dj.nn.Sequential(dj.nn.DistributedLinear(P, P, P, 64, 64), jax.nn.relu)
    >>> params = network.init(jax.random.key(0))
    >>> step = dj.jit(dj.value_and_grad(lambda params, x: network(params, x).sum()))
    >>> profile = dj.profile(step, params, jnp.ones((256, 64)), steps=3)
    >>> [layer.title for layer in profile.layers][:2]
    ['0 DistributedLinear', '1 relu']
    """
    check_function("step", step)
    steps = checked_integer("steps", steps, 1)
    world = open_world()
    if not world.may_measure:
        raise SetupError(
            "`dj.profile` needs workers in separate processes; here they are threads of one process. Run it under "
            "mpiexec, or alone."
        )
    from mpi4py import MPI

    from distdl_jax.transports.mpi.world import known_teams

    everyone = tuple(range(world.size))
    world.agree(everyone, "the start of dj.profile", None)
    # Clocks are compared over a communicator of its own, whose messages can't meet the step's.
    comm = MPI.COMM_WORLD.Dup()
    recording = record(step, args, steps, comm)
    comm.Free()
    mine = activities_of(recording, known_teams(), MPI.PROC_NULL)
    recorded: dict[int, Activities] = {}

    def decide(contributions: dict[int, Activities]) -> Profile:
        recorded.update(contributions)
        return Profile(*add_up(contributions, steps), steps)

    found: Profile = world.agree(everyone, "dj.profile", mine, decide)
    return replace(found, _recorded=recorded)

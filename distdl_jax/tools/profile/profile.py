"""Where the time of a training step goes, measured: `profile`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, SetupError
from distdl_jax.tools.cost.cost import Cost
from distdl_jax.tools.profile.activities import Activities, activities_of
from distdl_jax.tools.profile.recording import record
from distdl_jax.tools.profile.table import table
from distdl_jax.tools.profile.times import LayerProfile, PassTimes, add_up
from distdl_jax.tools.profile.trace import write_trace
from distdl_jax.transports.open_world import open_world
from distdl_jax.validation import check_function, checked_integer


@dataclass(frozen=True)
class Profile:
    """Where the time of a step went: the mean over the steps that were recorded.

    - `layers`: layer by layer, then what is in none: the loss, and the update and the rest.
    - `seconds`: of a step, on each worker, by world rank.
    - `idle`: the seconds of a step in which nothing of the compiled program ran: Python, JAX's call, XLA's start.
    - `waited_for`: a row for each worker, a column for each worker that it waited for: seconds of a step.
    - `matched`: whether all messages were matched with their partners; else all waiting counts as transfer.
    - `steps`: how many were recorded. `cost`: what was foreseen; None where nothing was given.
    """

    layers: tuple[LayerProfile, ...]
    seconds: np.ndarray
    idle: np.ndarray
    waited_for: np.ndarray
    matched: bool
    steps: int
    cost: Cost | None = None
    _recorded: Mapping[int, Activities] = field(default_factory=dict, repr=False, compare=False)

    def table(self) -> str:
        """Return a table as text: a row for each layer, and who was waited for."""
        return table(self.layers, self.seconds, self.idle, self.waited_for, self.matched, self.cost)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Return all numbers as JSON, in the form that the page on profiles describes."""

        def of(times: PassTimes) -> dict[str, list[float]]:
            return {each.name: getattr(times, each.name).tolist() for each in fields(times)}

        layers = [
            {"place": each.place, "name": each.name, "forward": of(each.forward), "backward": of(each.backward)}
            for each in self.layers
        ]
        numbers = {name: getattr(self, name).tolist() for name in ("seconds", "idle", "waited_for")}
        return json.dumps({"version": 1, "steps": self.steps, "matched": self.matched, **numbers, "layers": layers})

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write all that ran as a file for Perfetto (ui.perfetto.dev) and Chrome's tracing page.

        Worker 0 writes it; the others, which may call it as well, do nothing. Each worker is a process of the trace,
        with its steps, its arithmetic and its messages in rows of their own. Arrows lead from sends to receives.

        - `path`: of the file, "trace.json".
        """
        if self._recorded:
            write_trace(path, self._recorded)


def profile(step: Callable[..., Any], *args: Any, steps: int = 20, cost: Cost | None = None) -> Profile:
    """Run a training step several times under JAX's profiler, and say where its time goes on all workers.

    Collective: all workers of the job call it, each with its own arguments. It runs two steps first, since the first
    one compiles, and then `steps` that count. All of them get the same arguments; where the step donates some, it gets
    copies, which are not timed. What the steps return is dropped.

    A layer of a `Sequential` or another network has a row of its own. Other layers and functions are told apart by
    `jax.named_scope`, if you put one around them.

    **Arguments:**

    - `step`: what is run, with all its calls of jitted functions: `dj.jit`'s, `jax.jit`'s or a function of Python's.
    - `args`: its arguments.
    - `steps`: how many are recorded.
    - `cost`: what `dj.cost` foresees of the same network, with a machine, to be shown beside it.

    **Returns:** a `Profile`, with the same numbers on all workers.

    **Raises:** `InvalidTypeError` where `step` can't be called or `cost` is no `Cost`; `InvalidArgumentError` where
    `steps` is below 1 or `cost` has no times; `SetupError` in `dj.simulate`, whose workers share one process.

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
    if cost is not None and not isinstance(cost, Cost):
        raise InvalidTypeError(f"`cost` (={cost!r}) must be what `dj.cost` returns, or None.")
    if cost is not None and cost.seconds is None:
        raise InvalidArgumentError("`cost` must have times: give a `machine` to `dj.cost`.")
    world = open_world()
    if not world.may_measure:
        raise SetupError(
            "`dj.profile` needs workers that are processes of their own; here they are threads of one process. Run it "
            "under mpiexec, or alone."
        )
    from mpi4py import MPI

    from distdl_jax.transports.mpi.world import known_teams

    everyone = tuple(range(world.size))
    world.agree(everyone, "the start of dj.profile", None)
    comm = MPI.COMM_WORLD.Dup()
    recording = record(step, args, steps, comm)
    comm.Free()
    mine = activities_of(recording, known_teams(), MPI.PROC_NULL)
    recorded: dict[int, Activities] = {}

    def decide(contributions: dict[int, Activities]) -> Profile:
        recorded.update(contributions)
        return Profile(*add_up(contributions, steps), steps)

    found: Profile = world.agree(everyone, "dj.profile", mine, decide)
    return replace(found, cost=cost, _recorded=recorded)

"""Programs on blocks that run in two ways: on one worker of four with messages, and on all blocks together without.

A program is a list of steps on this worker's block, a vector, and its part of the loss. What a step does to a block is
written once; only the movements are written twice. So the blocks together are an independent reference: plain JAX, in
which a movement is a concatenation or a sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import distdl_jax as dj
from distdl_jax.plans.decomposition import balanced_ranges
from distdl_jax.watchdog.programs.ir import Cond, Loop, Operation, Program

Step = tuple[Any, ...]
Blocks = list[Any]
WORKERS = 4


@dataclass(frozen=True)
class Here:
    """This worker's block alone; the others' are with them."""

    P: Any

    @property
    def ranks(self) -> list[int]:
        return [self.P.rank]

    def _line(self, ranks: Sequence[int]) -> Any:
        return self.P.grid([len(ranks)], ranks)

    def gathered(self, blocks: Blocks) -> Blocks:
        return [dj.functional.all_gather(blocks[0], self._line(range(WORKERS)), 0)]

    def moved(self, blocks: Blocks) -> Blocks:
        """To the last two workers."""
        return [dj.functional.repartition(blocks[0], self._line(range(WORKERS)), self._line([2, 3]))]

    def back(self, blocks: Blocks) -> Blocks:
        return [dj.functional.repartition(blocks[0], self._line([2, 3]), self._line(range(WORKERS)))]

    def summed(self, values: Blocks) -> Blocks:
        return [dj.functional.all_sum_reduce(values[0], self.P, axes_keep=())]

    def shared(self, values: Blocks) -> Blocks:
        """The first worker's, on all."""
        return [dj.functional.broadcast(values[0], self._line([0]), self._line(range(WORKERS)), preserve_batch=False)]


class Together:
    """All workers' blocks, on one."""

    ranks = tuple(range(WORKERS))

    def gathered(self, blocks: Blocks) -> Blocks:
        return [jnp.concatenate(blocks)] * WORKERS

    def _cut(self, whole: Any, parts: int) -> Blocks:
        return [whole[start:stop] for start, stop in balanced_ranges(len(whole), parts)]

    def moved(self, blocks: Blocks) -> Blocks:
        nothing = blocks[0][:0]
        return [nothing, nothing, *self._cut(jnp.concatenate(blocks), 2)]

    def back(self, blocks: Blocks) -> Blocks:
        return self._cut(jnp.concatenate(blocks[2:]), WORKERS)

    def summed(self, values: Blocks) -> Blocks:
        return [sum(values)] * WORKERS

    def shared(self, values: Blocks) -> Blocks:
        return [values[0]] * WORKERS


def run(steps: Sequence[Step], world: Any, blocks: Blocks) -> tuple[Blocks, Blocks]:
    """The blocks, and the parts of the loss, after all steps."""
    losses: Blocks = [0.0 for _ in blocks]
    for step in steps:
        blocks = _DO[step[0]](step, world, blocks)
        if isinstance(blocks, tuple):  # a step that adds to the loss
            blocks, more = blocks
            losses = [a + b for a, b in zip(losses, more, strict=True)]
    return blocks, losses


def _each(f: Callable[[Any], Any]) -> Callable[..., Blocks]:
    return lambda step, world, blocks: [f(y) for y in blocks]


def _places(y: Any) -> np.ndarray:
    return np.arange(len(y))[::-1]


def _squares(step: Step, world: Any, blocks: Blocks) -> tuple[Blocks, Blocks]:
    """The loss of some workers; a constant on the others."""
    return blocks, [jnp.sum(y**2) if rank in step[1] else 1.5 for y, rank in zip(blocks, world.ranks, strict=True)]


def _gathered(step: Step, world: Any, blocks: Blocks) -> Blocks:
    """An output that some workers use."""
    parts = zip(blocks, world.gathered(blocks), world.ranks, strict=True)
    return [y + 0.1 * jnp.sum(jnp.cos(whole)) if rank in step[1] else y for y, whole, rank in parts]


def _summed(step: Step, world: Any, blocks: Blocks) -> Blocks:
    totals = world.summed([jnp.sum(jnp.sin(y)) for y in blocks])
    return [y * (1 + 0.1 * total) for y, total in zip(blocks, totals, strict=True)]


def _shared(step: Step, world: Any, blocks: Blocks) -> Blocks:
    copies = world.shared([jnp.sum(y, keepdims=True) for y in blocks])
    return [y * jnp.cos(copy) for y, copy in zip(blocks, copies, strict=True)]


def _there_and_back(step: Step, world: Any, blocks: Blocks) -> tuple[Blocks, Blocks]:
    there, losses = run(step[1], world, world.moved(blocks))
    return world.back(there), losses


def _in_a_scan(step: Step, world: Any, blocks: Blocks) -> tuple[Blocks, Blocks]:
    def body(carry: Any, _: Any) -> Any:
        blocks, more = run(step[1], world, carry[0])
        return (blocks, [a + b for a, b in zip(carry[1], more, strict=True)]), None

    return lax.scan(body, (blocks, [jnp.zeros(()) for _ in blocks]), None, length=step[2])[0]


def _under(transform: Callable[..., Any]) -> Callable[..., tuple[Blocks, Blocks]]:
    return lambda step, world, blocks: transform(lambda blocks: run(step[1], world, blocks))(blocks)


def _in_a_branch(step: Step, world: Any, blocks: Blocks) -> tuple[Blocks, Blocks]:
    def this(blocks: Blocks) -> tuple[Blocks, Blocks]:
        blocks, losses = run(step[1], world, blocks)
        return blocks, [jnp.asarray(loss, float) for loss in losses]

    return lax.cond(step[2] > 0, this, lambda blocks: (blocks, [jnp.ones(()) for _ in blocks]), blocks)


def _for_a_batch(step: Step, world: Any, blocks: Blocks) -> tuple[Blocks, Blocks]:
    batch, losses = jax.vmap(lambda factor: run(step[1], world, [factor * y for y in blocks]))(jnp.array([1.0, 0.5]))
    return [jnp.sum(y, 0) for y in batch], [jnp.sum(loss) for loss in losses]


_DO: dict[str, Callable[..., Any]] = {
    "sin": _each(lambda y: jnp.sin(y) + 0.5),
    "index": _each(lambda y: y[_places(y)]),
    "set": _each(lambda y: y.at[_places(y)[:1]].set(0.3)),
    "add": _each(lambda y: y.at[_places(y)].add(y)),
    "insert": _each(lambda y: jnp.insert(y, 0, 2.0)[1:]),
    "segment_sum": _each(lambda y: jax.ops.segment_sum(y, jnp.asarray(_places(y)), num_segments=len(y))),
    "squares": _squares,
    "gathered": _gathered,
    "summed": _summed,
    "shared": _shared,
    "there and back": _there_and_back,
    "scan": _in_a_scan,
    "checkpoint": _under(jax.checkpoint),
    "jit": _under(jax.jit),
    "cond": _in_a_branch,
    "vmap": _for_a_batch,
}
LOCAL = ("sin", "index", "set", "add", "insert", "segment_sum")
MOVING = ("gathered", "summed", "shared", "there and back")
AROUND = ("scan", "checkpoint", "jit", "cond", "vmap")


def drawn(rng: np.random.Generator, depth: int = 2, batched: bool = False) -> list[Step]:
    """A random program. Under vmap nothing is indexed, which JAX makes unbatched on workers without elements."""
    steps: list[Step] = []
    for _ in range(rng.integers(1, 4)):
        some = tuple(int(rank) for rank in range(WORKERS) if rng.random() < 0.5)
        if not batched or rng.random() < 0.3:
            steps.append((str(rng.choice(("sin",) if batched else LOCAL)),))
        match str(rng.choice((*MOVING, *AROUND) if depth else MOVING)):
            case "gathered":
                steps.append(("gathered", some))
            case "there and back":
                steps.append(("there and back", [("sin",), ("squares", some)]))
            case "scan":
                steps.append(("scan", drawn(rng, depth - 1, batched), 2))
            case "cond":
                steps.append(("cond", drawn(rng, depth - 1, batched), 1.0))
            case "vmap":
                steps.append(("vmap", drawn(rng, depth - 1, True)))
            case "checkpoint" | "jit" as name:
                steps.append((name, drawn(rng, depth - 1, batched)))
            case name:
                steps.append((name,))
    return [*steps, ("squares", some)]


def flat(program: Program) -> list[Operation]:
    """The operations in the order in which they run, where conditionals take the branch with most of them."""
    operations: list[Operation] = []
    for item in program:
        match item:
            case Operation():
                operations.append(item)
            case Loop(length, body):
                operations += (length or 1) * flat(body)
            case Cond(branches):
                operations += max(map(flat, branches), key=len)
    return operations

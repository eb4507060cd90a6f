"""Programs as users write them, drawn, beside plain JAX on the whole tensors.

Networks with ways around a part, on teams that are disjoint or overlap, with copies of parameters, with functions
between the layers, with `if P.active` and placeholders, in loops and branches. What a program does is written twice:
with distdl_jax on one worker's blocks, and in plain JAX on whole arrays. All are healthy: none may be refused.

`PYTHONPATH=tests python tests/drawn_networks.py FIRST COUNT` tries so many of them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import jax.numpy as jnp
import numpy as np
from blocks import block_of
from drawn_grids import Draw, grid, one_of
from drawn_layers import Part, Run, all_workers, chain
from jax import lax

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn
from distdl_jax.partitions.spec_trees import is_spec


def program(seed: int, P: dj.Partition) -> tuple[dj.TensorSpec, Part]:
    """Return the spec of the input, and a program of a few parts, the same on all workers."""
    draw = np.random.default_rng(seed)
    dims = int(draw.integers(2, 5))
    shape = tuple(draw.integers(1, ((5, 9), (4, 7, 6), (3, 5, 8, 8))[dims - 2], endpoint=True).tolist())
    spec = dj.TensorSpec(shape, grid(draw, P, dims))
    parts, now = [], spec
    for _ in range(int(draw.integers(2, 5))):
        parts.append(one_of(draw, *PARTS)(draw, now))
        now = parts[-1].spec
    return spec, one_after_the_other(parts)


def one_after_the_other(parts: list[Part]) -> Part:
    def run(params: Any, x: Any) -> Any:
        for part, its in zip(parts, params, strict=True):
            x = part.run(its, x)
        return x

    def whole(params: Any, x: Any) -> Any:
        for part, its in zip(parts, params, strict=True):
            x = part.whole(its, x)
        return x

    return Part(run, whole, [part.params for part in parts], parts[-1].spec, ", ".join(part.text for part in parts))


def try_program(seed: int) -> str:
    """Try a program on 1 to 4 workers: it is not refused, and gives the value and gradients of plain JAX.

    Returns what the program is.
    """
    size = seed % 4 + 1
    spec, part = program(seed, dj.planning_world(size))
    draw = np.random.default_rng(seed + 1)
    x, c = draw.normal(size=spec.global_shape), draw.normal(size=part.spec.global_shape)
    params = jax.tree.map(lambda spec: draw.normal(size=spec.global_shape) / 2, part.params, is_leaf=is_spec)
    ending = one_of(draw, *ENDINGS)
    text = f"seed {seed} on {size}: {spec}: {part.text}; {ending.__name__}"
    try:
        results = dj.simulate(size, on_a_worker, seed, params, x, c, ending)
        reference = jax.jit(jax.value_and_grad(lambda both: jnp.sum(c * jnp.sin(part.whole(*both)))))
        value, gradients = jax.tree.map(np.asarray, reference((params, x)))
        scale = max([1.0, abs(value), *(float(np.max(np.abs(g), initial=0)) for g in jax.tree.leaves(gradients))])
        for rank, (its_value, its_gradients) in enumerate(results):
            P = dj.planning_world(size, rank)
            its_spec, its_part = program(seed, P)
            np.testing.assert_allclose(its_value, value, rtol=0, atol=1e-10 * scale)

            def same(spec: dj.TensorSpec, got: Any, whole: Any, scale: float = scale) -> None:
                want = block_of(whole, spec)
                assert got.shape == want.shape or spec.box is None
                np.testing.assert_allclose(got.ravel(), want.ravel(), rtol=0, atol=1e-10 * scale)

            jax.tree.map(same, (its_part.params, its_spec), its_gradients, gradients, is_leaf=is_spec)
    except BaseException as error:
        error.add_note(text)
        raise
    return text


def on_a_worker(seed: int, params: Any, x: Any, c: Any, ending: Callable[..., Any]) -> Any:
    spec, part = program(seed, dj.Partition())
    mine = jax.tree.map(lambda spec, whole: block_of(whole, spec), part.params, params, is_leaf=is_spec)
    block = block_of(x, spec) if spec.box else dj.zero_volume_tensor(len(x), float)

    def loss(both: Any) -> Any:
        return ending(part.run(*both), block_of(c, part.spec), part.spec)

    step = dj.value_and_grad(loss)
    report = dj.check(step, (mine, block))
    assert report.ok, report.problem
    return jax.tree.map(np.asarray, dj.jit(step)((mine, block)))


# --- The loss ------------------------------------------------------------------------------------------------------


def sum_everywhere(y: Any, c: Any, spec: dj.TensorSpec) -> Any:
    return jnp.sum(c.reshape(y.shape) * jnp.sin(y))


def nothing_elsewhere(y: Any, c: Any, spec: dj.TensorSpec) -> Any:
    return jnp.sum(c * jnp.sin(y)) if spec.partition.active else 0.0


def on_one_worker(y: Any, c: Any, spec: dj.TensorSpec) -> Any:
    """The sum over the partition, of which one worker's is the loss."""
    P = spec.partition
    total = F.all_sum_reduce(jnp.sum(c.reshape(y.shape) * jnp.sin(y), keepdims=True).ravel(), P, axes_keep=())
    return total[0] if P.rank == P.size - 1 else 0.0


def from_the_library(y: Any, c: Any, spec: dj.TensorSpec) -> Any:
    """Half of the squares of y' - c' are a sum, too: of y' = sin(y) + c and c' = sin(y) - c, all of c sin(y) twice."""
    a, b = jnp.sin(y) + c.reshape(y.shape), jnp.sin(y) - c.reshape(y.shape)
    loss = nn.DistributedMSELoss(spec.partition, reduction="sum")
    return (loss(a, jnp.zeros_like(a)) - loss(b, jnp.zeros_like(b))) / 4


ENDINGS = (sum_everywhere, nothing_elsewhere, on_one_worker, from_the_library)


# --- Parts ---------------------------------------------------------------------------------------------------------


def residual(draw: Draw, spec: dj.TensorSpec) -> Part:
    """A layer of the library with a way around it; along the way around x moves where the body leaves y elsewhere."""
    body = chain(draw, spec, keeps=True)
    P_y = body.spec.partition
    block = nn.Residual(body.run, None if P_y == spec.partition else nn.Repartition(spec.partition, P_y))
    return Part(
        block,
        lambda params, x: body.whole(params["body"], x) + x,
        block.param_specs(),
        body.spec,
        f"Residual({body.text})",
    )


def bent_sum(a: Any, b: Any) -> Any:
    return a + jnp.tanh(b)


def on_blocks(draw: Draw, function: Callable[[Any, Any], Any], P: dj.Partition) -> Callable[[Any, Any], Any]:
    """Return a function of the blocks of two tensors on P, whose placeholders may differ, in one of two spellings."""
    if draw.random() < 0.5:
        return dj.map_blocks(function, P)
    return lambda a, b: function(a, b) if P.active else a


def own_skip(draw: Draw, spec: dj.TensorSpec) -> Part:
    """A skip as users write it: after the body, which is moved back."""
    body = chain(draw, spec, keeps=True)
    back, add = nn.Repartition(body.spec.partition, spec.partition), on_blocks(draw, jnp.add, spec.partition)
    return Part(
        lambda params, x: add(0.5 * x, back(body.run(params, x))),
        lambda params, x: body.whole(params, x) + 0.5 * x,
        body.params,
        spec,
        f"x/2 + {body.text}",
    )


def side_by_side(draw: Draw, spec: dj.TensorSpec) -> Part:
    """x and what a body makes of it, joined along a dimension, split or not."""
    body, axis = chain(draw, spec, keeps=True), int(draw.integers(1, spec.partition.dim))
    back, join = nn.Repartition(body.spec.partition, spec.partition), nn.Concatenate(spec.partition, axis)
    shape = tuple(2 * n if d == axis else n for d, n in enumerate(spec.global_shape))
    return Part(
        lambda params, x: join(x, back(body.run(params, x))),
        lambda params, x: jnp.concatenate([x, body.whole(params, x)], axis),
        body.params,
        dj.TensorSpec(shape, spec.partition),
        f"Concatenate(x, {body.text}, axis={axis})",
    )


def on_two_teams(draw: Draw, spec: dj.TensorSpec) -> Part:
    """Two branches, each on workers of its own or on some of the same; their sum is on a third team."""
    P, dim = spec.partition, spec.partition.dim
    world = all_workers(P)
    teams = [grid(draw, P, dim) for _ in range(3)]
    if P.world.size > 1 and draw.random() < 0.6:  # disjoint
        cut = int(draw.integers(1, P.world.size))
        ranks = draw.permutation(P.world.size).tolist()
        for k, team in enumerate((ranks[:cut], ranks[cut:])):
            shape = [1] * dim
            shape[int(draw.integers(dim))] = len(team)
            teams[k] = world.grid(shape, team)
    go = [nn.Repartition(P, team) for team in teams[:2]]
    branches = [chain(draw, dj.TensorSpec(spec.global_shape, team), keeps=True) for team in teams[:2]]
    come = [nn.Repartition(branch.spec.partition, teams[2]) for branch in branches]

    def run(params: Any, x: Any) -> Any:
        xs = [layer(x) for layer in go]
        a, b = (branch.run(its, x) for branch, its, x in zip(branches, params, xs, strict=True))
        return add(come[0](a), come[1](b))

    def whole(params: Any, x: Any) -> Any:
        a, b = (branch.whole(its, x) for branch, its in zip(branches, params, strict=True))
        return bent_sum(a, b)

    add = on_blocks(draw, bent_sum, teams[2])
    text = f"teams {teams[0].describe()}: {branches[0].text}; {teams[1].describe()}: {branches[1].text}"
    return Part(run, whole, [branch.params for branch in branches], dj.TensorSpec(spec.global_shape, teams[2]), text)


def copies(draw: Draw, spec: dj.TensorSpec) -> Part:
    """A parameter that all workers of a partition hold, or, along a dimension, all that have the same block of it."""
    P, dim = spec.partition, int(draw.integers(spec.partition.dim))
    by_row = bool(draw.integers(2))
    others = tuple(d for d in range(P.dim) if d != dim or not by_row)
    its_spec = dj.TensorSpec((spec.global_shape[dim],) if by_row else (), P, replicated=others)
    shape = tuple(-1 if d == dim else 1 for d in range(P.dim))

    def scaled(params: Any, x: Any) -> Any:
        return x * params["scale"].reshape(shape) + params["shift"].reshape(shape)

    def run(params: Any, x: Any) -> Any:
        params = dj.replicated(params, P, axes=others)
        return scaled(params, x) if P.active else x

    text = f"copies along {others}"
    return Part(run, scaled, {"scale": its_spec, "shift": its_spec}, spec, text)


def statistics(draw: Draw, spec: dj.TensorSpec) -> Part:
    """A user's own normalisation, of the library's reductions."""
    P, axis = spec.partition, int(draw.integers(spec.partition.dim))

    def run(_: Any, x: Any) -> Any:
        if not P.active:
            F.mean(x, P, axis, keepdims=True)
            return x
        return x - F.mean(x, P, axis, keepdims=True)

    return Part(run, lambda _, x: x - x.mean(axis, keepdims=True), {}, spec, f"x - mean({axis})")


def placeholders_of_its_own(draw: Draw, spec: dj.TensorSpec) -> Part:
    """What has no block makes its placeholder anew: on those workers nothing comes from x."""
    inner = chain(draw, spec)
    P = spec.partition

    def run(params: Any, x: Any) -> Any:
        x = jnp.sin(x) if P.active else dj.zero_volume_tensor(spec.global_shape[0], x.dtype)
        return inner.run(params, x)

    return inner._replace(
        run=run, whole=lambda params, x: inner.whole(params, jnp.sin(x)), text=f"if P.active: {inner.text}"
    )


def in_a_scan(draw: Draw, spec: dj.TensorSpec) -> Part:
    """A skip twice, with the same parameters."""
    inner = own_skip(draw, spec)

    def twice(run: Run) -> Run:
        return lambda params, x: lax.scan(lambda x, _: (jnp.tanh(run(params, x)), None), x, None, length=2)[0]

    return inner._replace(run=twice(inner.run), whole=twice(inner.whole), text=f"twice({inner.text})")


def computed_again(draw: Draw, spec: dj.TensorSpec) -> Part:
    inner = own_skip(draw, spec)
    return inner._replace(run=jax.checkpoint(inner.run), text=f"checkpoint({inner.text})")


def in_a_branch(draw: Draw, spec: dj.TensorSpec) -> Part:
    """A branch that all workers take: the parameters say which, on all alike."""
    inner = own_skip(draw, spec)

    def run(params: Any, x: Any) -> Any:
        return lax.cond(jnp.asarray(True), inner.run, lambda params, x: 2 * x, params, x)

    return inner._replace(run=run, text=f"cond({inner.text})")


PARTS = (chain, chain, residual, own_skip, side_by_side, on_two_teams, on_two_teams, copies, copies, statistics,
         placeholders_of_its_own, in_a_scan, computed_again, in_a_branch)  # fmt: skip


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    failed = 0
    for seed in range(first, first + count):
        try:
            try_program(seed)
        except BaseException as error:
            failed += 1
            print("".join(traceback.format_exception(error)[-12:])[-3500:], flush=True)
            if isinstance(error, KeyboardInterrupt):
                break
    print(f"{count} programs from seed {first} on are tried: {failed} failed.")

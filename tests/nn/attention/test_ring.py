"""A causal attention whose sequence is split: who works for whom, and the same results as plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import Drawn, Mine, check_attentions
from blocks import block_of
from launcher.examples import LONG
from matrix.partitions import on
from sequential import close

import distdl_jax as dj
from distdl_jax.nn.attention.ring_schedule import turns_of
from distdl_jax.plans.decomposition import balanced_ranges

CAUSAL: dict[str, Any] = {"causal": True}
TWO = Drawn(on(1, 2, 1), (2, 5), 8, 4, padded=True, options={**CAUSAL, "num_key_heads": 2, "rotary": 50.0}, seed=1)
FOUR = Drawn(on(1, 4, 1, ranks=(2, 0, 3, 1)), (2, 9), 4, 2, padded=True, options={**CAUSAL, "bias": False}, seed=2)
CASES = [
    FOUR,
    Drawn(on(2, 2, 1), (3, 4), 8, 2, options={**CAUSAL, "num_key_heads": 1, "dropout": 0.3}, seed=3),
    Drawn(on(1, 2, 1, ranks=(3, 1)), (5, 2), 4, 2, padded=True, options={**CAUSAL, "bias": False}, seed=14),
    Drawn(on(1, 3, 1), (2, 5), 4, 2, mask=(0, 1), options=CAUSAL, seed=8),  # a mask: nobody helps
]


@pytest.mark.parametrize("p", range(1, 10))
def test_every_query_looks_at_every_key_before_it_once(p: int) -> None:
    """Of whole blocks nobody has more than (p + 1) / 2 to look at; what one lends another takes; nothing else moves."""
    for n in (0, 1, p - 1, p, 2 * p, 3 * p + 1, 8 * p - 1):
        blocks = balanced_ranges(n, p)
        sees = sum(np.outer(_places(block, n), _places((0, block[1]), n)) for block in blocks)
        for balanced in (False, True):
            pairs, work, turns = np.zeros((n, n)), np.zeros(p), turns_of(blocks, blocks, True, balanced)
            looks = [(i, block, block) for i, block in enumerate(blocks)]
            for turn in turns:
                looks += [(i, turn.queries[i], turn.keys[i]) for i in range(p)]
                looks += [(i, turn.taken[i], blocks[i]) for i in range(p)]
                for i in range(p):
                    lent, keys = (_places(its[i], n) for its in (turn.lent, turn.keys))
                    there = turn.taken[i - turn.far] if i >= turn.far else (0, 0)
                    np.testing.assert_array_equal(lent, _places(there, n))
                    assert not np.any(keys) or turn.keys[i] == blocks[i - turn.near]
                    assert np.any(keys) == np.any(_places(turn.queries[i], n))
            for i, queries, keys in looks:
                pairs += np.outer(_places(queries, n), _places(keys, n))
                work[i] += (queries[1] - queries[0]) * (keys[1] - keys[0])
            np.testing.assert_array_equal(pairs, sees)
            if n == 2 * p:
                assert np.max(work) == (2 * (p + 1) if balanced else 4 * p)
        if p > 1 and n >= p:
            assert sum(turn.is_balanced for turn in turns_of(blocks, blocks, True, True)) == p // 2


def _places(its: tuple[int, int], n: int) -> np.ndarray:
    return (np.arange(n) >= its[0]) & (np.arange(n) < its[1])


def test_to_a_memory_all_go_round() -> None:
    """Queries and keys are of other places then; workers without queries fetch nothing, and nobody helps."""
    queries, keys = [(0, 2), (2, 4), (4, 4)], [(0, 3), (3, 5), (5, 7)]
    turns = turns_of(queries, keys, causal=False, balanced=True)
    assert [turn.keys for turn in turns] == [((5, 7), (0, 3), (0, 0)), ((3, 5), (5, 7), (0, 0))]
    assert all(turn.queries == tuple(queries) and not turn.is_balanced for turn in turns)


@pytest.mark.simulated(4)
def test_beside_plain_jax() -> None:
    """Output and every gradient: uneven and empty blocks, padding, groups of heads, split batch and heads, dropping.

    In one case a query that is lent sees nothing at all, neither here nor there.
    """
    assert CASES[2].whole(CASES[2].layer().param_specs())["padding"].all(1).any()
    check_attentions(CASES)


@pytest.mark.world(2, 4)
def test_over_mpi(world_size: int) -> None:
    check_attentions([FOUR if world_size == 4 else TWO])


@pytest.mark.simulated(4)
@pytest.mark.parametrize("p", [2, 3, 4] if LONG > 1 else [3])
def test_transformations(p: int) -> None:
    """Gradients of gradients; and of what is mapped and worked out again."""
    case = Drawn(on(1, p, 1), (1, p + 3), 4, 2, padded=True, options={**CAUSAL, "bias": False}, seed=12)
    mine = Mine(case)
    whole, draw = case.whole(mine.specs), np.random.default_rng(p).normal
    given, fixed = {name: whole[name] for name in ("params", "x")}, {"padding": whole["padding"]}
    along = jax.tree.map(lambda x: draw(size=x.shape), given)
    xs = draw(size=(3, *whole["x"].shape))

    def blocks(tree: Any) -> Any:
        return {"params": jax.tree.map(block_of, tree["params"], mine.specs), "x": mine.block(tree["x"])}

    def functions(of: Any, c: Any, along: Any, gradient: Any) -> Any:
        def loss(given: Any) -> Any:
            return jnp.sum(c * jnp.sin(of(given)))

        def second(given: Any) -> Any:
            return sum(map(jnp.vdot, jax.tree.leaves(gradient(loss)(given)), jax.tree.leaves(along)))

        def mapped(params: Any, xs: Any) -> Any:
            ys = jax.vmap(jax.checkpoint(lambda x: of({"params": params, "x": x})))(xs)
            return jnp.sum(c * jnp.sin(ys) * np.arange(1.0, 4.0).reshape(3, 1, 1, 1))

        return lambda given, xs: (gradient(second)(given), gradient(mapped, (0, 1))(given["params"], xs))

    once = blocks(along)  # all have copies of the parameters, of which one counts
    once["params"] = jax.tree.map(lambda x: x * (mine.rank == 0), once["params"])
    ours = functions(lambda given: mine.output(given)[0], mine.c[0], once, dj.grad)
    plain = functions(lambda given: case.plain(given, fixed), whole["c"], along, jax.grad)
    got = dj.jit(ours)(blocks(given), np.stack([mine.block(x) for x in xs]))
    wanted = jax.tree.map(np.asarray, jax.jit(plain)(given, xs)) if mine.rank == 0 else None
    second, (of_params, of_xs) = dj.Partition().broadcast_data(wanted)
    want = (blocks(second), (jax.tree.map(block_of, of_params, mine.specs), np.stack([mine.block(x) for x in of_xs])))
    jax.tree.map(lambda a, b: close(a, b, 1e-11, "derivatives"), got, want)


@pytest.mark.simulated(2)
def test_half_precision() -> None:
    """bfloat16 is rounded about as often as on one worker, for what is not finished travels in the dtype of sums."""
    P, rng = dj.Partition(), np.random.default_rng(0)
    layer, alone = (
        dj.nn.DistributedMultiHeadAttention(on(1, p, 1).partition(P), 8, 2, causal=True, bias=False) for p in (2, 1)
    )
    params = layer.init(jax.random.key(0), jnp.bfloat16)
    x, c = (jnp.asarray(rng.normal(size=(1, 16, 8)), jnp.bfloat16) for _ in range(2))

    def derivative(layer: Any, gradient: Any) -> Any:
        def value(params: Any, x: Any, c: Any) -> Any:
            y = layer(params, x)
            return jnp.sum((y * c).astype(float)), y

        return gradient(value, 1, has_aux=True)

    whole = None
    if P.rank == 0:
        whole = jax.tree.map(lambda x: np.asarray(x, float), jax.jit(derivative(alone, jax.grad))(params, x, c))
    rows = slice(8 * P.rank, 8 * P.rank + 8)
    got = dj.jit(derivative(layer, dj.grad))(params, x[:, rows], c[:, rows])
    for its, want in zip(got, P.broadcast_data(whole), strict=True):
        assert its.dtype == jnp.bfloat16
        close(np.asarray(its, float), want[:, rows], 1e-2, "gradient and y")

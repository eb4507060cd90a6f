"""Whole pytrees to one worker and back: copies, scalars, what is no array, and what does not fit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import on_all, refusal
from checkpoint.trees import blocks, specs, wholes
from partitions.compiling import compiled

import distdl_jax as dj
from distdl_jax import TensorSpec


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if callable(b):
            assert a is b
        else:
            np.testing.assert_array_equal(np.asarray(a), b, strict=True)


@pytest.mark.world(4)
@pytest.mark.parametrize("root", [0, 3])
def test_copies_scalars_and_other_leaves_are_kept(root: int) -> None:
    """A tree to any root and back, bit for bit, eager and under dj.jit; None and functions stay where they are."""
    P = dj.Partition()
    its = {name: spec for name, spec in specs(P, 2).items() if name not in ("key", "keys")}
    want, held = wholes(its), blocks(its)
    if P.rank != root:
        nothing = jax.tree.map(lambda leaf: np.zeros(0, np.asarray(leaf).dtype), want)
        want = {name: want[name] if its[name] is None else nothing[name] for name in its}
    whole = dj.gather(held, its, root)
    same(whole, want)
    same(dj.scatter(whole, its, root), held)
    its = {name: spec for name, spec in its.items() if spec is not None}
    arrays = {name: held[name] for name in its}
    both = dj.jit(lambda tree: dj.scatter(dj.gather(tree, its, root), its, root))
    same(both(jax.device_put(arrays)), arrays)


@pytest.mark.simulated(2)
def test_only_the_root_or_the_first_copy_is_read() -> None:
    """Scatter takes the root's; gather the first copy, also where copies have come apart; numbers count as arrays."""
    P = dj.Partition()
    spec = TensorSpec((), P, replicated=True)
    assert float(dj.scatter(10.0 + P.rank, spec, root=1)) == 11
    whole = dj.gather([10 + P.rank, True], spec, root=1)
    assert [leaf.tolist() for leaf in whole] == ([10, True] if P.rank == 1 else [[], []])
    assert dj.gather({"a": 3}, {"a": None}) == {"a": 3}


@pytest.mark.simulated(2)
def test_one_spec_for_a_subtree() -> None:
    """All leaves under it are of that spec; None leaves a whole subtree alone."""
    P = dj.Partition()
    tree = {"moments": {"a": jnp.full(2, P.rank), "b": jnp.full(2, 5)}, "rest": ["text", 3]}
    whole = dj.gather(tree, {"moments": TensorSpec((4,), P), "rest": None})
    assert whole["rest"] == ["text", 3]
    if P.rank == 0:
        assert jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, whole["moments"])) == {
            "a": [0, 0, 1, 1],
            "b": [5] * 4,
        }


@pytest.mark.simulated(3)
def test_leaves_on_different_workers_are_gathered() -> None:
    """None of which is the root."""
    P = dj.Partition()
    its = [TensorSpec((2,), P.grid([1], [rank])) for rank in (1, 2)]
    mine = [jnp.full(2, float(rank)) if P.rank == rank else jnp.zeros(0) for rank in (1, 2)]
    whole = dj.gather(mine, its)
    assert [leaf.tolist() for leaf in whole] == ([[1, 1], [2, 2]] if P.rank == 0 else [[], []])
    same(dj.scatter(whole, its), [np.asarray(leaf) for leaf in mine])


@pytest.mark.simulated(3)
def test_misfits_are_refused_on_all_workers() -> None:
    """Before anything moves, in a sentence that names the leaf and the worker; all go on together afterwards."""
    P = dj.Partition()
    spec = TensorSpec((4,), P, replicated=True)
    good = {"a": jnp.ones(4), "b": [jnp.ones(4)]}
    wrong = {
        r"On worker 1: `tree\['b'\]\[0\]` has shape \(3,\), but its spec \(4 on 3 workers, replicated along \(0,\)\) "
        r"gives \(4,\)": good | {"b": [jnp.ones(3)]},
        r"must have the same leaves .* but `tree\['b'\]\[1\]` is missing from `tree` on worker 0 and of the spec": {
            "a": good["a"],
            "b": [jnp.ones(4)] * 2,
        },
        r"but `specs\['b'\]` is a TensorSpec, but `tree` has no leaf there": {"a": good["a"], "b": []},
        r"`specs` must have the structure of `tree`": [1],
        r"`tree\['b'\]\[0\]` \(='text'\) must be an array of numbers, or a number": good | {"b": ["text"]},
        r"(?s)`tree\['b'\]\[0\]` \(=Array.*random key": good | {"b": [jax.random.key(0)]},
    }
    for sentence, tree in wrong.items():
        with pytest.raises(dj.DistDLError, match=sentence):
            dj.gather(tree if P.rank == 1 else good, {"a": spec, "b": spec})
    with pytest.raises(dj.PlanError, match=r"must have the same leaves with the same specs on all workers"):
        dj.gather(good, TensorSpec((4 + P.rank,), P, replicated=True))
    with pytest.raises(dj.PlanError, match=r"`tree\['a'\]`: `x` must have one dtype on all workers"):
        blocks = TensorSpec((3,), P)
        dj.gather({"a": jnp.ones(1, "float32" if P.rank else "float64")}, {"a": blocks})
    with pytest.raises(dj.PlanError, match=r"shape \(5, 4\), but its spec \(4 x 5 on 3 x 1 workers\) gives \(4, 5\)"):
        whole = jnp.ones((5, 4)) if P.rank == 2 else dj.zero_volume_tensor()
        dj.scatter(whole, TensorSpec((4, 5), P.grid([3, 1])), root=2)
    assert dj.gather(good, spec, 2)["a"].shape == ((4,) if P.rank == 2 else (0,))


@pytest.mark.parametrize(
    ("specs_of", "root", "sentence"),
    [
        (lambda P: "spec", 0, "`specs` (='spec') must be a TensorSpec, or None"),
        (lambda P: [P.size], 0, "`specs[0]` (=3) must be a TensorSpec, or None"),
        (lambda P: TensorSpec((3,), P), 3, "`root` (=3) must be a rank of the world, 0 to 2."),
        (lambda P: TensorSpec((3,), P), -1, "`root` (=-1) must be a rank of the world, 0 to 2."),
        (lambda P: TensorSpec((3,), P), 0.5, "`root` (=0.5) must be an integer"),
        (lambda P: TensorSpec((3,), P, replicated=1), 0, "`replicated` (=(1,)) names dimension 1"),
        (lambda P: TensorSpec((), P), 0, "`global_shape` (=()) must have as many dimensions as `partition` (3)."),
        (
            lambda P: TensorSpec((3, 2), P.grid([3, 1]), replicated=0),
            0,
            "`global_shape` (=(3, 2)) must have as many dimensions as `partition` (3 x 1) in addition to the",
        ),
    ],
)
def test_wrong_arguments_are_named_on_every_worker(specs_of: Any, root: Any, sentence: str) -> None:
    for move in (dj.gather, dj.scatter):
        assert sentence in refusal(3, lambda P, move=move: move([1.0], specs_of(P), root), dj.DistDLError)


def test_specs_of_copies() -> None:
    """Boxes, the workers that hold the first copies, and whose blocks count, for a grid of 2 x 3 in another order."""
    order = [3, 5, 0, 1, 4, 2]

    def check(P: dj.Partition) -> None:
        P_x = P.grid([2, 3], order)
        spec = TensorSpec((7,), P_x, replicated=0)
        assert spec == TensorSpec([7], P_x, [-2]) != TensorSpec((7, 7), P_x)
        assert len({spec, TensorSpec([7], P_x, -2), TensorSpec((7, 7), P_x)}) == 2
        assert spec.block_shapes == {3: (3,), 5: (2,), 0: (2,), 1: (3,), 4: (2,), 2: (2,)}
        assert spec.box == {3: ((0, 3),), 1: ((0, 3),), 5: ((3, 5),), 4: ((3, 5),), 0: ((5, 7),), 2: ((5, 7),)}.get(
            P.rank
        )
        assert (spec.first_copies.ranks, spec.first_copies.shape) == ((3, 5, 0), (3,))
        assert spec.counts == (P.rank in (0, 3, 5))
        everywhere = TensorSpec((4, 2), P_x, replicated=True)
        assert everywhere.local_shape == ((4, 2) if P_x.active else (0,))
        assert (everywhere.first_copies.ranks, everywhere.first_copies.shape) == ((3,), (1, 1))
        assert TensorSpec((7, 2), P_x).counts == P_x.active
        one = P.grid([1, 1], [4])
        assert TensorSpec((), one) == TensorSpec((), one, replicated=True)

    on_all(7, check)
    assert "replicated=(0,)" in repr(TensorSpec((3,), dj.planning_world(2), replicated=True))


def test_a_tree_moves_in_one_program() -> None:
    """Eagerly: one compilation for all leaves of a tree, and none the second time."""

    def check(P: dj.Partition) -> None:
        grid = P.grid([1, P.size])
        specs = [TensorSpec((3, 4 + k), grid) for k in range(6)]
        blocks = [jnp.full(spec.local_shape, 1.0 + k) for k, spec in enumerate(specs)]
        for expected in (1, 0):
            with compiled() as by_gather:
                whole = dj.gather(blocks, specs)
            with compiled() as by_scatter:
                dj.scatter(whole, specs)
            assert (len(by_gather), len(by_scatter)) == (expected, expected)

    on_all(1, check)

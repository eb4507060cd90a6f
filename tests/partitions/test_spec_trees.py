"""Trees and their specs: a TensorSpec without a leaf, and a leaf without one, are refused by all that take the two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.functional import copies
from distdl_jax.settings import Settings

FUNCTIONS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "save": lambda tree, specs, path: checkpoint.save(path / "run", tree, specs),
    "Manager": lambda tree, specs, path: checkpoint.Manager(path / "run").save(tree, specs, 1),
    "export": lambda tree, specs, path: checkpoint.export(path / "file", tree, specs),
    "gather": lambda tree, specs, _: dj.gather(tree, specs),
    "scatter": lambda tree, specs, _: dj.scatter(tree, specs),
    "global_norm": lambda tree, specs, _: dj.optim.global_norm(tree, specs),
    "clip_by_global_norm": lambda tree, specs, _: dj.optim.clip_by_global_norm(1.0, specs).update(tree, None),
    "scale_by_trust_ratio": lambda tree, specs, _: dj.optim.scale_by_trust_ratio(specs).update(tree, None, tree),
    "specs_like": lambda tree, specs, _: dj.specs_like(tree, tree, specs),
    "check_replicated": lambda tree, specs, _: dj.check_replicated(tree, specs),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_missing_leaf_is_refused(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one worker or on all: every worker raises, in the same words but for who it was."""
    monkeypatch.setattr(copies, "current_settings", lambda: Settings(debug=True))

    def program() -> None:
        P = dj.Partition()
        spec = TensorSpec((2,), P, replicated=True)
        w = jnp.ones(2)
        two = {"v": w, "w": w}
        cases: list[tuple[Any, Any, Any, str]] = [
            ([w], [None], spec, r"`specs` is a TensorSpec, but `tree` has no leaf there"),
            ({"w": w}, {"w": None}, {"w": spec}, r"`specs\['w'\]` is a TensorSpec, but `tree` has no leaf there"),
            ({"w": w}, {"w": {}}, {"w": spec}, r"`specs\['w'\]` is a TensorSpec"),
            ({"w": [w]}, {"w": []}, {"w": [spec]}, r"`specs\['w'\]\[0\]` is a TensorSpec"),
            (two, {"v": w}, {"v": spec, "w": spec}, r"`specs\['w'\]` is a TensorSpec"),
            (two, two, {"v": spec}, r"has none for `tree\['w'\]`"),
            ({"w": {"v": w}}, {"w": w}, {"w": {"v": spec}}, r"has none for `tree\['w'\]`"),
        ]
        for good, wrong, specs, sentence in cases:
            if function == "specs_like":
                sentence = sentence.replace("specs", "param_specs").replace("tree", "params")
            with pytest.raises(dj.InvalidArgumentError, match=sentence):
                FUNCTIONS[function](wrong, specs, tmp_path)
            if function == "check_replicated" or good is wrong:  # it asks nobody
                continue
            with pytest.raises(dj.InvalidArgumentError, match=sentence if P.rank else rf"orker 1.*{sentence}"):
                FUNCTIONS[function](wrong if P.rank == 1 else good, specs, tmp_path)
        assert not any(tmp_path.iterdir())
        FUNCTIONS[function]({"w": w}, {"w": spec}, tmp_path)

    dj.simulate(2, program)


@pytest.mark.simulated(2)
def test_masked_leaves_are_left_out() -> None:
    """A leaf, and a whole subtree; a None is none of these."""
    P = dj.Partition()
    spec = TensorSpec((2,), P, replicated=True)
    specs = {"a": spec, "b": {"c": spec, "d": spec}}
    masked = optax.MaskedNode()
    assert float(dj.optim.global_norm({"a": jnp.full(2, 3.0), "b": masked}, specs)) == pytest.approx(18**0.5)
    tree = {"a": masked, "b": {"c": jnp.full(2, 4.0), "d": masked}}
    assert float(dj.optim.global_norm(tree, specs)) == pytest.approx(32**0.5)
    with pytest.raises(dj.InvalidArgumentError, match=r"`specs\['b'\]\['d'\]` is a TensorSpec"):
        dj.optim.global_norm({"a": masked, "b": {"c": jnp.ones(2), "d": None}}, specs)
    with pytest.raises(dj.InvalidArgumentError, match=r"`specs\['a'\]` is a TensorSpec"):
        dj.gather(tree, specs)


class Two(NamedTuple):
    weight: Any
    step: Any


class Three(NamedTuple):
    weight: Any
    step: Any
    steps: Any


@pytest.mark.simulated(2)
def test_none_leaves_out_its_subtree_only(tmp_path: Path) -> None:
    """A field whose name begins as that of another one is not below it."""

    path = Path(dj.Partition().broadcast_data(str(tmp_path)))
    spec = TensorSpec((2,), dj.Partition(), replicated=True)
    checkpoint.save(path, Three(*[jnp.ones(2)] * 3), Three(spec, spec, spec))
    with pytest.raises(dj.PlanError, match=r"also holds tree\.steps, for which `specs` has no"):
        checkpoint.restore(path, Two(spec, None))


X, ROWS, NORMAL = np.arange(3.0), np.arange(6.0).reshape(2, 3), jax.nn.initializers.normal()
TAKES_SPECS: dict[str, Callable[[Any, Path], Any]] = {
    **{name: lambda specs, path, its=its: its(X, specs, path) for name, its in FUNCTIONS.items()},
    "gather a tree": lambda specs, _: dj.gather({"a": X, "b": X}, {"a": specs, "b": specs}),
    "restore": lambda specs, path: checkpoint.restore(path, specs),
    "import_": lambda specs, path: checkpoint.import_(path / "x.npy", specs),
    "lbfgs": lambda specs, _: dj.optim.lbfgs(specs=specs).init(X),
    "batches": lambda specs, _: dj.data.batches(ROWS, specs, 1),
    "batches of trees": lambda specs, _: dj.data.batches({"a": ROWS}, {"a": specs}, 1),
    "batches of some": lambda specs, _: dj.data.batches(
        {"a": ROWS, "b": ROWS}, {"a": specs, "b": TensorSpec((3,), dj.Partition().grid([1]))}, 1
    ),
    "init": lambda specs, _: dj.init(NORMAL, specs, jax.random.key(0)),
    "init of trees": lambda specs, _: dj.init({"a": NORMAL}, {"a": specs}, jax.random.key(0)),
}
LEAVES_AS_THEY_ARE = ("gather a tree", "init of trees")  # where there is None
HAS_NO_DATA = ("init", "init of trees")  # parameters of a layer without any
WITHOUT_LEAVES: list[Any] = [dj.planning_world(1), dj.planning_world(1).grid([1]), None, {}, [], ()]


@pytest.mark.simulated(1)
@pytest.mark.parametrize("specs", WITHOUT_LEAVES, ids=lambda specs: type(specs).__name__)
@pytest.mark.parametrize("name", TAKES_SPECS)
def test_specs_without_leaves(name: str, specs: Any, tmp_path: Path) -> None:
    """A partition, None, {} or []: to JAX pytrees without leaves, of which a function would do nothing, in silence."""
    checkpoint.save(tmp_path, X, TensorSpec((3,), dj.Partition().grid([1])), 1)
    np.save(tmp_path / "x.npy", ROWS)
    if (specs is None and name in LEAVES_AS_THEY_ARE) or (
        name in HAS_NO_DATA and isinstance(specs, dict | list | tuple)
    ):
        TAKES_SPECS[name](specs, tmp_path)
        return
    with pytest.raises((dj.InvalidTypeError, dj.InvalidArgumentError), match="spec"):
        TAKES_SPECS[name](specs, tmp_path)


@pytest.mark.simulated(1)
def test_subtrees_without_leaves_are_kept() -> None:
    """A partition or a layer in a module's field, and parameters of layers that have none."""
    P = dj.Partition().grid([1])
    tree, specs = ({"w": x, "P": P, "none": {}, "nothing": None} for x in (jnp.ones(3), TensorSpec((3,), P)))
    assert jax.tree.structure(dj.gather(tree, specs)) == jax.tree.structure(tree)
    assert dj.init(NORMAL, specs, jax.random.key(0))["P"] is P
    assert dj.gather({}, {}) == {} and dj.scatter((), ()) == ()

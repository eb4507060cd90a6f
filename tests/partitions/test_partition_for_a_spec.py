"""Every function that takes a tree of specs refuses one without the leaves of the data: a partition, None, {} or [].

To JAX they all are pytrees without leaves, of which a function would do nothing, in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distdl_jax as dj

pytestmark = pytest.mark.simulated(1)

X = np.arange(3.0)
ROWS = np.arange(6.0).reshape(2, 3)
NORMAL = jax.nn.initializers.normal()


def files(folder: Path) -> Path:
    """A checkpoint of x, and an array."""
    dj.checkpoint.save(folder, X, dj.TensorSpec((3,), dj.Partition().grid([1])), 1)
    np.save(folder / "x.npy", ROWS)
    return folder


TAKES_SPECS: dict[str, Callable[[Any, Path], Any]] = {
    "gather": lambda specs, _: dj.gather(X, specs),
    "scatter": lambda specs, _: dj.scatter(X, specs),
    "gather a tree": lambda specs, _: dj.gather({"a": X, "b": X}, {"a": specs, "b": specs}),
    "check_replicated": lambda specs, _: dj.check_replicated(X, specs),
    "specs_like": lambda specs, _: dj.specs_like(optax.adam(0.1).init(X), X, specs),
    "save": lambda specs, path: dj.checkpoint.save(path, X, specs, 2),
    "Manager.save": lambda specs, path: dj.checkpoint.Manager(path).save(X, specs, 2),
    "restore": lambda specs, path: dj.checkpoint.restore(path, specs),
    "export": lambda specs, path: dj.checkpoint.export(path / "x.safetensors", X, specs),
    "import_": lambda specs, path: dj.checkpoint.import_(path / "x.npy", specs),
    "global_norm": lambda specs, _: dj.optim.global_norm(X, specs),
    "clip_by_global_norm": lambda specs, _: dj.optim.clip_by_global_norm(1.0, specs).update(X, optax.EmptyState()),
    "lbfgs": lambda specs, _: dj.optim.lbfgs(specs=specs).init(X),
    "batches": lambda specs, _: dj.data.batches(ROWS, specs, 1),
    "batches of trees": lambda specs, _: dj.data.batches({"a": ROWS}, {"a": specs}, 1),
    "batches of some": lambda specs, _: dj.data.batches(
        {"a": ROWS, "b": ROWS}, {"a": specs, "b": dj.TensorSpec((3,), dj.Partition().grid([1]))}, 1
    ),
    "init": lambda specs, _: dj.init(NORMAL, specs, jax.random.key(0)),
    "init of trees": lambda specs, _: dj.init({"a": NORMAL}, {"a": specs}, jax.random.key(0)),
}
LEAVES_AS_THEY_ARE = {("gather a tree", None), ("init of trees", None)}
HAS_NO_DATA = ("init", "init of trees")  # parameters of a layer without any
WITHOUT_LEAVES: list[Any] = [dj.planning_world(1), dj.planning_world(1).grid([1]), None, {}, [], ()]


@pytest.mark.parametrize("specs", WITHOUT_LEAVES, ids=lambda specs: type(specs).__name__)
@pytest.mark.parametrize("name", TAKES_SPECS)
def test_specs_without_leaves(name: str, specs: Any, tmp_path: Path) -> None:
    if specs is None and (name, None) in LEAVES_AS_THEY_ARE:
        TAKES_SPECS[name](specs, tmp_path)
    elif isinstance(specs, dj.Partition) or specs is None or name not in HAS_NO_DATA:
        with pytest.raises((dj.InvalidTypeError, dj.InvalidArgumentError), match="spec"):
            TAKES_SPECS[name](specs, files(tmp_path))
    else:
        TAKES_SPECS[name](specs, tmp_path)


def test_subtrees_without_leaves_are_kept() -> None:
    """A partition or a layer in a module's field, and parameters of layers that have none."""
    P = dj.Partition().grid([1])
    tree, specs = ({"w": x, "P": P, "none": {}, "nothing": None} for x in (jnp.ones(3), dj.TensorSpec((3,), P)))
    assert jax.tree.structure(dj.gather(tree, specs)) == jax.tree.structure(tree)
    assert dj.init(NORMAL, specs, jax.random.key(0))["P"] is P
    assert dj.gather({}, {}) == {} and dj.scatter((), ()) == ()

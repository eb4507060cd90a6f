"""Trees and their specs: a TensorSpec without a leaf is refused by all that take the two, and nothing is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
import pytest

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.settings import Settings
from distdl_jax.transforms import replica_check


def save(tree: Any, specs: Any, path: Path) -> None:
    checkpoint.save(path / "run", tree, specs)


def save_in_a_thread(tree: Any, specs: Any, path: Path) -> None:
    checkpoint.Manager(path / "run").save(tree, specs, 1)


def export(tree: Any, specs: Any, path: Path) -> None:
    checkpoint.export(path / "file", tree, specs)


def clip(tree: Any, specs: Any, path: Path) -> None:
    dj.optim.clip_by_global_norm(1.0, specs).update(tree, None)


def trust_ratio(tree: Any, specs: Any, path: Path) -> None:
    dj.optim.scale_by_trust_ratio(specs).update(tree, None, tree)


FUNCTIONS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "save": save,
    "Manager": save_in_a_thread,
    "export": export,
    "gather": lambda tree, specs, _: dj.gather(tree, specs),
    "scatter": lambda tree, specs, _: dj.scatter(tree, specs),
    "global_norm": lambda tree, specs, _: dj.optim.global_norm(tree, specs),
    "clip_by_global_norm": clip,
    "scale_by_trust_ratio": trust_ratio,
    "specs_like": lambda tree, specs, _: dj.specs_like(tree, tree, specs),
    "check_replicated": lambda tree, specs, _: dj.check_replicated(tree, specs),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_missing_leaf_is_refused(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one worker or on all: every worker raises, in the same words but for who it was."""
    monkeypatch.setattr(replica_check, "current_settings", lambda: Settings(debug=True))

    def program() -> None:
        P = dj.Partition()
        spec = TensorSpec((2,), P, replicated=True)
        w = jnp.ones(2)
        two = {"v": w, "w": w}
        cases: list[tuple[Any, Any, Any, str]] = [
            ([w], [None], spec, r"`specs` is a TensorSpec, and `tree` has no leaf there"),
            ({"w": w}, {"w": None}, {"w": spec}, r"`specs\['w'\]` is a TensorSpec, and `tree` has no leaf there"),
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

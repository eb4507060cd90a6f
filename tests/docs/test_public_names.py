"""Public names, their signatures, and the parameters and states of layers are those on record.

`python tests/docs/test_public_names.py` writes the record anew, for a change that is meant.
"""

import inspect
import json
import re
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from every_layer import LAYERS

import distdl_jax as dj
from distdl_jax.errors import Removed

RECORD = Path(__file__).with_name("public_names.json")
MODULES = ("", "checkpoint", "data", "functional", "graphs", "nn", "optim", "random", "solvers")
WORKERS = 4


def public() -> dict[str, Any]:
    """Return the public functions and classes, by name."""
    found: dict[str, Any] = {}
    for module in MODULES:
        namespace = getattr(dj, module) if module else dj
        names = getattr(namespace, "__all__", None) or [name for name in vars(namespace) if name[0] != "_"]
        for name in names:
            value = getattr(namespace, name)
            is_documented = inspect.isclass(value) or inspect.isroutine(value)
            if is_documented and value.__module__.startswith("distdl_jax"):
                found[f"{module}.{name}".lstrip(".")] = value
    return found


def signatures() -> dict[str, str]:
    """Return the signature of each public name and of the public methods of each class."""
    found: dict[str, str] = {}
    for name, value in public().items():
        found |= _signatures(name, value)
    return found


def _signatures(name: str, value: Any) -> dict[str, str]:
    found = {name: _signature(value)}
    if inspect.isclass(value):
        for method in dir(value):
            attribute = inspect.getattr_static(value, method)
            if isinstance(attribute, Removed):
                continue
            public = method[0] != "_" or method == "__call__"
            if public and not hasattr(OSError, method):
                function = getattr(attribute, "__func__", attribute)
                found[f"{name}.{method}"] = _signature(function) if inspect.isfunction(function) else "property"
    return found


def _signature(value: Any) -> str:
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return "()"
    shown = [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters]
    return f"({', '.join(re.sub(' at 0x[0-9a-f]+|jax._src[.a-z_0-9]*[.]', '', text) for text in shown)})"


def trees() -> dict[str, Any]:
    """Return the parameters, their specs, and the state of a layer of each kind, on each worker."""
    found: dict[str, Any] = {}
    for name, build in LAYERS.items():
        for worker in range(WORKERS):
            layer = build(dj.planning_world(WORKERS, worker))
            described = {"params": jax.eval_shape(layer.init, jax.random.key(0)), "specs": layer.param_specs()}
            if hasattr(layer, "init_state"):
                described |= {"state": jax.eval_shape(layer.init_state), "state_specs": layer.state_specs()}
            found[f"{name} {worker}"] = {what: _described(tree) for what, tree in described.items()}
    return found


def _described(tree: Any) -> list[str]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, dj.TensorSpec))
    return [
        f"{jax.tree_util.keystr(path)} {leaf.global_shape} {leaf.partition.shape} {leaf.partition.ranks}"
        if isinstance(leaf, dj.TensorSpec)
        else f"{jax.tree_util.keystr(path)} {leaf.dtype.name} {leaf.shape}"
        for path, leaf in leaves
    ]


def _recorded() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(RECORD.read_text())
    return recorded


def test_every_public_name_has_the_recorded_signature() -> None:
    recorded, now = _recorded()["signatures"], signatures()
    assert {name: now.get(name) for name in recorded} == recorded
    assert not now.keys() - recorded.keys(), "new public names: write the record anew"


@pytest.mark.parametrize("module", MODULES)
def test_a_listing_has_the_public_names_alone(module: str) -> None:
    """So that `dir` and completion show what a user may call, not the modules and imports behind it."""
    public()  # imports all of it
    namespace = getattr(dj, module) if module else dj
    assert dir(namespace) == sorted(namespace.__all__)


def test_help_of_a_layer_explains_what_it_lists() -> None:
    """Members without a leading underscore are a user's: arguments, the number of dimensions, and others with a
    docstring."""
    unexplained = set()
    for cls in filter(inspect.isclass, (getattr(dj.nn, name) for name in dj.nn.__all__)):
        of_user = {*inspect.signature(cls).parameters, *getattr(cls, "__dataclass_fields__", ()), "dims"}
        for name, kind, _, value in inspect.classify_class_attrs(cls):
            has_text = kind != "data" or isinstance(value, property | cached_property)
            is_listed = not (name.startswith("_") or name in of_user or isinstance(value, Removed))
            if is_listed and not (has_text and inspect.getdoc(value)):
                unexplained.add(f"{cls.__name__}.{name}")
    assert not unexplained


def test_parameters_and_states_are_the_recorded_ones() -> None:
    recorded, now = _recorded()["trees"], trees()
    assert {name: now.get(name) for name in recorded} == recorded
    assert now.keys() == recorded.keys()


if __name__ == "__main__":
    RECORD.write_text(json.dumps({"signatures": signatures(), "trees": trees()}, indent=1, sort_keys=True) + "\n")

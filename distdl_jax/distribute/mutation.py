"""Objects among the arguments that a distributed function changes: a change would be lost, and is refused."""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import DictKey, SequenceKey

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.source_lines import function_name


def refuse_mutation(f: Any, args: Any, before: list[Any], results: list[Any]) -> None:
    """Raise if `f` has changed a module among its arguments, whose leaves were `before`, and doesn't return its state.

    Dictionaries and lists may be changed, as in a jitted function: they are copies.
    """
    returned = set(map(id, results))
    after, _ = jax.tree.flatten_with_path(args)
    own = [(path, leaf) for path, leaf in after if not all(isinstance(key, DictKey | SequenceKey) for key in path)]
    given = set(map(id, before))
    for path, leaf in own:
        if isinstance(leaf, jax.core.Tracer) and id(leaf) not in given and id(leaf) not in returned:
            name = jax.tree_util.keystr(path)
            raise InvalidArgumentError(
                f"{function_name(f)} changes its argument `args{name}`, which would be lost: a distributed function "
                "works on copies of its arguments. Return what it changes. For a module of Flax NNX: pass "
                "graph, state = nnx.split(module), call nnx.merge(graph, state) inside, and return the new nnx.state."
            )

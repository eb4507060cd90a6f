"""The specs of an optimiser's state, from those of the parameters that it is the state for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.partition import Partition
from distdl_jax.tensors import TensorSpec


def specs_like(state: Any, params: Any, param_specs: Any) -> Any:
    """The specs of a pytree that holds trees like the parameters: of an optimiser's state, say.

    What is in `state` in the place of a parameter (momenta, averages, accumulated gradients: arrays whose path ends in
    the parameter's) is split as it is. What else there is, a step count, a learning rate, is the same on every worker:
    replicated.

    **Arguments:**

    - `state`: `optimiser.init(params)`, on every worker that of its own blocks.
    - `params`, `param_specs`: the parameters and their specs, for `gather`: with a TensorSpec, or None, for each leaf.

    **Returns:** a pytree of the structure of `state`, with for each leaf

    - the parameter's spec, where it has the parameter's shape;
    - that with a dimension of n in front, where it has n of them stacked (the memory of L-BFGS);
    - `TensorSpec(shape, P_world, replicated=True)` for scalars and other arrays;
    - None for what is no array of numbers: a random key, a function. `gather` leaves it as it is.

    Made without a message. `dj.gather(state, dj.specs_like(state, params, specs))` is the state of the whole.

    **Raises:** `InvalidArgumentError` where `param_specs` does not have the structure of `params`.

    >>> import jax.numpy as jnp, optax, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0])
    >>> params, specs = {"w": jnp.ones(3)}, {"w": dj.TensorSpec((3,), P)}
    >>> found = specs_like(optax.adam(0.1).init(params), params, specs)
    >>> found[0].mu == specs, found[0].count.global_shape
    (True, ())

    Source: optax's `tree_map_params`, which does it for a function of the leaves.
    """
    leaves = jax.tree.leaves_with_path(params)
    specs = dict(jax.tree.leaves_with_path(param_specs, is_leaf=_is_spec))
    wrong = [spec for spec in specs.values() if not _is_spec(spec)]
    if wrong:
        raise InvalidTypeError(f"`param_specs` must hold TensorSpecs, or None, but holds {wrong[0]!r}.")
    missing = [jax.tree_util.keystr(path) for path, _ in leaves if path not in specs]
    if missing:
        raise InvalidArgumentError(
            f"`param_specs` must have the structure of `params`, with a TensorSpec or None for each leaf, but has none "
            f"for params{missing[0]}."
        )
    worlds = [spec.partition.world for spec in specs.values() if spec is not None]
    world = worlds[0] if worlds else Partition().world
    everyone = Partition.of_workers(world, range(world.size))
    of_params = {path: (param, specs[path]) for path, param in leaves}

    def of_leaf(path: Any, leaf: Any) -> TensorSpec | None:
        for start in range(len(path) + 1):  # the parameter whose path is the longest that the leaf's ends in
            if path[start:] in of_params:
                return _of_leaf(leaf, *of_params[path[start:]], everyone)
        return _of_other(leaf, everyone)

    return jax.tree.map_with_path(of_leaf, state)


def _is_spec(spec: Any) -> bool:
    return spec is None or isinstance(spec, TensorSpec)


def _of_leaf(leaf: Any, param: Any, spec: TensorSpec | None, everyone: Partition) -> TensorSpec | None:
    """Of a leaf in the place of the parameter `param`, both this worker's blocks."""
    if not _is_array_or_number(leaf):
        return None
    shape, of_param = jnp.shape(leaf), jnp.shape(param)
    if spec is None or (shape == of_param and jnp.ndim(leaf)):
        return spec
    if shape == of_param and not spec.global_shape:
        return spec
    if len(shape) == len(of_param) + 1 and shape[1:] == of_param:
        return _stacked(shape[0], spec)
    return _of_other(leaf, everyone)


def _stacked(n: int, spec: TensorSpec) -> TensorSpec:
    P = spec.partition
    if len(spec.replicated) == P.dim:
        return TensorSpec((n, *spec.global_shape), P, replicated=True)
    stacked = P.create_cartesian_topology_partition((1, *P.shape))
    return TensorSpec((n, *spec.global_shape), stacked, tuple(d + 1 for d in spec.replicated))


def _of_other(leaf: Any, everyone: Partition) -> TensorSpec | None:
    if not _is_array_or_number(leaf):
        return None
    dtype = jnp.result_type(leaf)
    numbers = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    return TensorSpec(jnp.shape(leaf), everyone, replicated=True) if numbers else None


def _is_array_or_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype")

"""The specs of an optimiser's state, from the specs of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey, keystr

from distdl_jax.errors import InvalidTypeError, PlanError
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.spec_trees import check_alike, check_shape, different_masks, leaves_with_specs, masked_places
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.transports.agreement import agree
from distdl_jax.validation import is_numeric

Shape = tuple[int, ...]
Path = tuple[Any, ...]

_FLAG = ShapeDtype((), np.dtype(bool))


def specs_like(state: Any, params: Any, param_specs: Any) -> Any:
    """Return the specs of a pytree that contains trees like the parameters, such as an optimiser's state.

    A leaf of `state` in the place of a parameter (momenta, averages, factored statistics: arrays in a subtree like
    `params`) is split like the parameter. Other leaves, such as a step count or a learning rate, are replicated. All
    workers must call it, to exchange the shapes of their blocks.

    **Arguments:**

    - `state`: `optimiser.init(params)`, on every worker for its own blocks.
    - `params`, `param_specs`: the parameters and their specs, as for `gather`: with a TensorSpec, or None, for each
      leaf.

    **Returns:** a pytree with the structure of `state`, with for each leaf

    - the parameter's spec, if it has the parameter's shape;
    - the same with a leading dimension of n, if it has n of them stacked (the memory of L-BFGS);
    - the same without missing dimensions (the statistics of Adafactor), if these are not cut;
    - `TensorSpec(shape, P, replicated=True)` for others on the workers of a parameter that is not cut; and for scalars,
      other arrays, and arrays of one element in the place of a parameter, on all workers;
    - None for other leaves than arrays of numbers (a random key, a function), and for a flag in the place of a
      parameter, which `optax.zero_nans` sets for each block. `gather` leaves it unchanged.

    `dj.gather(state, dj.specs_like(state, params, specs))` is the global state.

    **Raises,** on every worker: `InvalidArgumentError` if `param_specs` does not have the structure of `params`;
    `PlanError` if a parameter does not have the shape of its spec, the workers' states differ, or a leaf is not a block
    of any tensor: a statistic along a cut dimension, a number for each block, parameters flattened to one vector. Such
    an optimiser would be wrong on blocks (`docs/optimisers.md` lists optax's).

    >>> import jax.numpy as jnp, optax, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0])
    >>> params, specs = {"w": jnp.ones(3)}, {"w": dj.TensorSpec((3,), P)}
    >>> found = specs_like(optax.adam(0.1).init(params), params, specs)
    >>> found[0].mu == specs, found[0].count.global_shape
    (True, ())

    Source: optax's `tree_map_params`, which does this for a function of the leaves.
    """
    known_specs = [spec for spec in jax.tree.leaves(param_specs) if isinstance(spec, TensorSpec)]
    world = known_specs[0].partition.world if known_specs else Partition().world
    leaves = jax.tree.leaves_with_path(state)
    specs_of_params: dict[Path, TensorSpec | None] = {}

    def contribution() -> list[tuple[str, ShapeDtype | None]]:
        pairs = leaves_with_specs(params, param_specs, ("params", "param_specs"))
        for path, param, spec in pairs:
            if spec is not None and spec.partition.active:
                check_shape(f"params{path}", jnp.shape(param), spec, spec.local_shape)
        paths = [path for path, _ in jax.tree.leaves_with_path(params)]
        specs_of_params.update(zip(paths, [leaf.spec for leaf in pairs], strict=True))
        return [(keystr(path), _shape_dtype(leaf)) for path, leaf in leaves]

    everywhere = agree(
        world, tuple(range(world.size)), "specs_like", lambda: (contribution(), masked_places(state=state))
    )
    if (problem := different_masks({worker: places for worker, (_, places) in everywhere.items()})) is not None:
        raise PlanError(problem)
    states = {worker: entries for worker, (entries, _) in everywhere.items()}
    check_alike({worker: [(path, None) for path, _ in entries] for worker, entries in states.items()}, "state")
    places = _Places(tuple(path for path, _ in leaves), tuple(specs_of_params))
    everyone = Partition.of_workers(world, range(world.size))

    def spec_of(number: int, path: Path) -> TensorSpec | None:
        leaf_by_worker = {worker: entries[number][1] for worker, entries in states.items()}
        shapes = {worker: leaf.shape for worker, leaf in leaf_by_worker.items() if leaf is not None}
        if len(shapes) < len(leaf_by_worker):
            return None
        place, name = places.of(path), f"state{keystr(path)}"
        if place is None:
            return _other_spec(name, shapes, known_specs, everyone)
        if not place and not any(shapes.values()):
            return TensorSpec((), everyone, replicated=True)  # a count, if the parameters are a single array
        spec = specs_of_params[place]
        if spec is None or _FLAG in leaf_by_worker.values():
            return None
        return _spec_in_place(name, shapes, spec, everyone)

    specs = [spec_of(number, path) for number, (path, _) in enumerate(leaves)]
    return jax.tree.unflatten(jax.tree.structure(state), specs)


class _HasSpecs(Protocol):
    """A layer, or any other object with specs of its parameters."""

    def param_specs(self) -> Any: ...


def training_specs(network: _HasSpecs, opt_state: Any, **values: Any) -> dict[str, Any]:
    """Return the specs of a training state: parameters, the optimiser's state, a step, a random key.

    They are the specs of `{"params": params, "optimiser": opt_state, **values}`, for `dj.checkpoint`, `dj.gather` and
    `dj.scatter`. All workers must call it, to exchange the shapes of their blocks.

    **Arguments:**

    - `network`: a layer or a network, for the specs of parameters.
    - `opt_state`: `optimiser.init(params)`, on every worker for its own blocks.
    - `values`: further values, by name. `state` is the network's own (`network.init_state()`). Everything else, an
      array, a number, a random key or a tree of these, must be the same on all workers; other leaves have no spec.

    **Returns:** a dictionary of specs with an entry for each of these.

    **Raises,** on every worker: `InvalidTypeError` if the network has no `param_specs`; errors of `dj.specs_like`.

    >>> import jax, optax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = dj.nn.DistributedLinear(P, P, P, 3, 2)
    >>> opt_state = optax.adam(0.1).init(layer.init(jax.random.key(0)))
    >>> specs = training_specs(layer, opt_state, key=jax.random.key(1), step=0)
    >>> list(specs), specs["step"].global_shape, specs["optimiser"][0].mu["weight"].global_shape
    (['params', 'optimiser', 'key', 'step'], (), (2, 3))
    """
    if not hasattr(network, "param_specs"):
        raise InvalidTypeError(f"`network` (={network!r}) must be a layer, with `param_specs`.")
    param_specs = network.param_specs()
    params = jax.tree.map(lambda spec: np.broadcast_to(np.float32(0), spec.local_shape), param_specs)
    first = next((spec for spec in jax.tree.leaves(param_specs) if isinstance(spec, TensorSpec)), None)
    world = Partition().world if first is None else first.partition.world
    everyone = Partition.of_workers(world, range(world.size))

    def spec_of(leaf: Any) -> TensorSpec | None:
        is_array = isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype")
        return TensorSpec(np.shape(leaf), everyone, replicated=True) if is_array else None

    others = {
        name: getattr(network, "state_specs", dict)() if name == "state" else jax.tree.map(spec_of, value)
        for name, value in values.items()
    }
    return {"params": param_specs, "optimiser": specs_like(opt_state, params, param_specs), **others}


def _shape_dtype(leaf: Any) -> ShapeDtype | None:
    """Return the shape and dtype of an array of numbers; None for anything else."""
    if not (isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype")):
        return None
    dtype = jnp.result_type(leaf)
    return ShapeDtype(jnp.shape(leaf), np.dtype(dtype)) if is_numeric(dtype) else None


@dataclass(frozen=True)
class _Places:
    """The pairs of leaves of a state and the corresponding parameters."""

    paths: tuple[Path, ...]
    params: tuple[Path, ...]

    def of(self, path: Path) -> Path | None:
        """Return the path of the parameter, in the largest subtree around a leaf that is like the parameters."""
        for start in range(len(path) + 1):
            if path[:start] in self._like_params:
                return self._param(path[start:])
        return None

    @cached_property
    def _like_params(self) -> set[Path]:
        """The paths of subtrees with a parameter for each leaf."""
        within: dict[Path, list[Path]] = {}
        for path in self.paths:
            for start in range(len(path) + 1):
                within.setdefault(path[:start], []).append(path[start:])
        return {prefix for prefix, rests in within.items() if all(self._param(rest) is not None for rest in rests)}

    def _param(self, rest: Path) -> Path | None:
        """Return the parameter to which a path leads, or to a list in its place."""
        for end in range(len(rest), -1, -1):
            if rest[:end] in self._params:
                return rest[:end]
            if not (end and isinstance(rest[end - 1], SequenceKey)):
                return None
        return None

    @cached_property
    def _params(self) -> frozenset[Path]:
        return frozenset(self.params)


def _other_spec(name: str, shapes: dict[int, Shape], specs: Sequence[TensorSpec], everyone: Partition) -> TensorSpec:
    """Return the spec of a leaf without a corresponding parameter."""
    first = shapes[min(shapes)]
    other = next((worker for worker in shapes if shapes[worker] != first), None)
    as_one = {worker: (sum(prod(spec.shape_on(worker)) for spec in specs),) for worker in shapes}
    cut = any(block != spec.global_shape for spec in specs for block in spec.block_shapes.values())
    if other is None and not (cut and shapes == as_one):
        return TensorSpec(first, everyone, replicated=True)
    on_other = "" if other is None else f", and {shapes[other]} on worker {other}"
    raise PlanError(
        f"`{name}` has no corresponding parameter, and has shape {first} on worker {min(shapes)}{on_other}: it is not "
        "a block of any tensor. A single vector of all parameters (optax.flatten) has no spec."
    )


def _spec_in_place(name: str, shapes: dict[int, Shape], spec: TensorSpec, everyone: Partition) -> TensorSpec:
    """Return the spec of a leaf in the place of a parameter with `spec`."""
    P = spec.partition
    pairs = [(shapes[worker], block) for worker, block in spec.block_shapes.items()]
    first, block = pairs[0]
    is_same = all(shape == first for shape, _ in pairs)
    if all(shape == block for shape, block in pairs):
        return spec
    if first and all(shape == (first[0], *block) for shape, block in pairs):
        stacked = P.create_cartesian_topology_partition((1, *P.shape))
        everywhere = len(spec.replicated) == P.dim
        copies = everywhere or tuple(d + 1 for d in spec.replicated)
        return TensorSpec((first[0], *spec.global_shape), P if everywhere else stacked, copies)
    if is_same and all(block == spec.global_shape for _, block in pairs):
        return TensorSpec(first, P, replicated=True)
    if is_same and first == (1,):
        return TensorSpec(first, everyone, replicated=True)  # optax's placeholder for nothing
    possible = dict.fromkeys(_reductions(pairs, spec))
    match [*possible]:
        case [TensorSpec() as found]:
            return found
    raise PlanError(
        f"`{name}` has shape {first} on worker {P.ranks[0]}, in the place of a parameter of shape {spec.global_shape} "
        f"on a partition of {shape_text(P.shape)} workers, whose block there is {block}: it is "
        f"{'perhaps ' if len(possible) > 1 else ''}not a block of any tensor. An optimiser that computes statistics "
        "along a cut dimension, or one number per block, is wrong on blocks (docs/optimisers.md)."
    )


def _reductions(pairs: list[tuple[Shape, Shape]], spec: TensorSpec) -> Iterator[TensorSpec | None]:
    """Yield the possible specs of statistics of a tensor, from blocks; None if they lack a cut dimension."""
    P = spec.partition
    cut = [d for d in range(P.dim) if d not in spec.replicated]
    for ways in product(("whole", "one", "gone"), repeat=len(cut)):
        if any(_reduced(block, ways) != shape for shape, block in pairs):
            continue
        if any(way != "whole" and P.shape[d] > 1 for d, way in zip(cut, ways, strict=True)):
            yield None
            continue
        gone = {d for d, way in zip(cut, ways, strict=True) if way == "gone"}
        left = [d for d in range(P.dim) if d not in gone]
        grid = P.create_cartesian_topology_partition([P.shape[d] for d in left])
        copies = tuple(number for number, d in enumerate(left) if d in spec.replicated)
        yield TensorSpec(_reduced(spec.global_shape, ways), grid, copies)


def _reduced(shape: Shape, ways: tuple[str, ...]) -> Shape:
    return tuple(1 if way == "one" else n for n, way in zip(shape, ways, strict=True) if way != "gone")

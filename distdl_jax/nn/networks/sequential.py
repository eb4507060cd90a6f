"""Layers in sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.distribute.inner import ON_BLOCKS
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.functional.plan import BlocksPlan, Plan, ShapeDtypes
from distdl_jax.nn.base.layer import Ends, Layer
from distdl_jax.nn.networks.function_runs import FunctionRun, FunctionsPlan, function_runs, team_of
from distdl_jax.nn.networks.layer_compatibility import (
    check_arrangement,
    check_taken,
    ends_of_chain,
    seams,
    spare_copies,
)
from distdl_jax.nn.networks.network import Network, RunPart, params_of_part
from distdl_jax.nn.networks.summary import network_table
from distdl_jax.nn.shape.input import Input
from distdl_jax.partitions.tensors import TensorSpec, check_spec
from distdl_jax.plans.alike import derived, representatives
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.scopes import place_of_errors
from distdl_jax.transforms.block_functions import BlockFunction

Params = tuple[Any, ...]


@dataclass(frozen=True)
class SequentialPlan(BlocksPlan):
    """The plans of layers, in order, and all workers' blocks after the last."""

    plans: tuple[Plan, ...]


def plan_function(function: Callable[[Array], Array], x: ShapeDtypes) -> BlocksPlan:
    """Plan a plain function on every worker's block; it is traced once for each shape and dtype."""
    if isinstance(function, BlockFunction):
        return function.plan(x)
    outputs = {}
    for block in {x[worker] for worker in representatives(x)}:
        y = jax.eval_shape(function, jax.ShapeDtypeStruct(block.shape, block.dtype))
        outputs[block] = ShapeDtype(tuple(y.shape), np.dtype(y.dtype))
    return BlocksPlan(derived(lambda worker: outputs[x[worker]], x))


@dataclass(frozen=True, init=False, repr=False)
class Sequential(Network):
    """A network whose layers are applied in sequence.

    **Arguments:**

    - `layers`: layers (anything that satisfies `nn.Layer`, including another `Sequential`) and plain functions of an
      array, like `jax.nn.relu`. A function is one of the whole array, where the partition is known: `dj.distribute`
      runs it, so a softmax along a split dimension is that of the whole dimension. Its result is given where the next
      layer takes it, at the end of the network on the same partition if it has as many dimensions; a number is this
      worker's term of a sum, a part of a loss. What it closes over is whole, the same on all workers; derivatives by
      that are refused if data moves. A function that is only one of blocks, since it closes over one or moves data, is
      called on each worker's block; `nn.Local(function)` always is.
    - `x_spec`: the global shape and the partition of the input, against which each worker's block is checked: a whole
      tensor in place of a block is then rejected, as by `nn.Input`. The first dimension, the batch, may have another
      length. `nn.Sequential(*network, x_spec=other)` is the same network for inputs of another size.

    The parameters are a tuple with an entry for each layer, `{}` for layers without any. Adjacent partitions must
    match: if a layer leaves its output on other workers, or in other blocks, than the next one takes its input from,
    put a `Repartition` between them. Known misfits are rejected: between layers of this library, and functions of
    `jax.nn`.

    Printed, it is a table of the layers with their partitions, parameters and bytes per worker. `len`, indexing, slices
    and loops work on the layers; a slice is a `Sequential`.

    **Raises:** `InvalidTypeError` for a layer that can't be called; `InvalidArgumentError`, on every worker, for layers
    with different arrangements of the same workers; when applied, for a function of blocks that mixes entries along a
    split dimension, and `PlanError` for a block that doesn't match `x_spec`, or a function that can't be distributed.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> linear = dj.nn.DistributedLinear
    >>> network = Sequential(linear(P, P, P, 3, 4), jax.nn.relu, linear(P, P, P, 4, 2))
    >>> params = network.init(jax.random.key(0))
    >>> network(params, jax.numpy.ones((5, 3))).shape
    (5, 2)
    """

    _layers: tuple[Callable[..., Any], ...]
    x_spec: TensorSpec | None = None

    def __init__(self, *layers: Callable[..., Any], x_spec: TensorSpec | None = None) -> None:
        for place, layer in enumerate(layers):
            if not callable(layer):
                raise InvalidTypeError(f"`layers[{place}]` (={layer!r}) must be a layer or a function of an array.")
        if x_spec is not None:
            check_spec(x_spec, "x_spec")
        check_arrangement(layers if x_spec is None else (Input(x_spec), *layers))
        self._store(_layers=layers, x_spec=x_spec)

    @property
    def layers(self) -> tuple[Callable[..., Any], ...]:
        """The layers and functions, in order."""
        return self._layers

    @property
    def _ends(self) -> Ends:
        return ends_of_chain(self._layers)

    @property
    def _parts(self) -> Sequence[tuple[int, Any]]:
        return tuple(enumerate(self._layers))

    def _pack(self, entries: Iterable[Any]) -> Params:
        return tuple(entries)

    def plan(self, x: ShapeDtypes, params: Mapping[int, Params] | None = None) -> SequentialPlan:
        """Plan the layers for all workers' blocks, in order, without communication.

        **Arguments:**

        - `x`: the shapes and dtypes of the blocks, by world rank, for all workers in the layers' partitions.
        - `params`: likewise for their parameters. Default: from `param_specs`, in the dtype of each layer's input.

        **Returns:** the plan: `outputs` has the blocks of all workers at the end, `plans` the plan of each layer.

        **Raises:** `PlanError` if x or a parameter does not fit, or a layer would ignore a block.

        >>> import jax, numpy, distdl_jax as dj
        >>> P = dj.Partition().grid([1, 1])
        >>> network = Sequential(dj.nn.Repartition(P, P), jax.nn.relu)
        >>> network.plan({0: dj.ShapeDtype((4, 3), numpy.dtype("float32"))}).outputs
        {0: float32[4, 3]}
        """
        plans: list[Plan] = []
        if self.x_spec is not None:
            Input(self.x_spec).plan(x)
        spared, runs = spare_copies(self._layers), self._runs
        until = 0
        for (place, layer), seam in zip(self._parts, seams(self._layers), strict=True):
            if place < until:  # one of the functions that are planned together
                plans.append(FunctionsPlan(x))
                continue
            if spare := spared.get(place):
                x = {
                    rank: block._replace(shape=(*block.shape[:-1], 0)) if rank in spare else block
                    for rank, block in x.items()
                }
            if seam is not None:
                check_taken(seam, {worker: x[worker].shape for worker in seam.left_out if worker in x})
            is_layer = isinstance(layer, Layer)
            if place in runs and (together := runs[place].planned(x)) is not None:
                plans.append(together)
                x, until = together.after(x), runs[place].stop
                continue
            with place_of_errors(place, layer):
                plans.append(layer.plan(x, params_of_part(params, place)) if is_layer else plan_function(layer, x))
            x = plans[-1].after(x)
        return SequentialPlan(x, tuple(plans))

    def _forward(self, run: RunPart, x: Array) -> Array:
        if trace_context.whole_program:  # inside of a distributed function: of whole arrays
            for place, layer in self._parts:
                x = run(place, layer, x)
            return x
        if self._input is not None:
            self._input.check(x, team_of(self._layers))
        spared, runs = spare_copies(self._layers), self._runs
        until = 0
        for (place, layer), seam in zip(self._parts, seams(self._layers), strict=True):
            if place < until:
                continue
            if seam is not None:
                check_taken(seam, {seam.P_x.world.rank: jnp.shape(x)})
            if (spare := spared.get(place)) and layer.input_partition.world.rank in spare and jnp.ndim(x):
                x = x[..., :0]
            if place in runs and (y := runs[place](x, team_of(self._layers))) is not ON_BLOCKS:
                x, until = y, runs[place].stop
            else:
                x = run(place, layer, x)
        return x

    @property
    def _runs(self) -> dict[int, FunctionRun]:
        """The runs of plain functions whose input is known to be split, by the place of the first."""
        return function_runs(self._parts, None if self.x_spec is None else Input(self.x_spec)._ends.P_y)

    @property
    def _input(self) -> Input | None:
        """The expected input, on all workers of the network."""
        first = self._layers[0] if self._layers else None
        return first if isinstance(first, Input) else None if self.x_spec is None else Input(self.x_spec)

    def _check_entries(self, name: str, entries: Any) -> None:
        count = len(entries) if isinstance(entries, Sized) else 0
        if count != len(self._layers):
            raise InvalidArgumentError(
                f"`{name}` has {count} entries, but there are {len(self._layers)} layers; each has one, {{}} if it has "
                f"no {'parameters' if name == 'params' else name}."
            )

    def table(self, dtype: DTypeLike = jnp.float32) -> str:
        """Return a table of the layers: their partitions, numbers of parameters, and parameter bytes per worker.

        `dtype` is the parameters' dtype.
        """
        return network_table(self._layers, np.dtype(dtype))

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(_name, self._layers))})"

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self._layers)

    @overload
    def __getitem__(self, place: int) -> Callable[..., Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequential: ...
    def __getitem__(self, place: int | slice) -> Any:
        if not isinstance(place, slice):
            return self._layers[place]
        is_first = place.indices(len(self))[0] == 0
        return Sequential(*self._layers[place], x_spec=self.x_spec if is_first else None)


def _name(layer: Callable[..., Any]) -> str:
    return repr(layer) if isinstance(layer, Layer) else getattr(layer, "__name__", repr(layer))

"""The layers of a network, in order, with the work of all workers in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from distdl_jax.errors import DistDLError, PlanError, SetupError
from distdl_jax.functional.mark import Mark
from distdl_jax.functional.plan import MovementPlan, Plan, ShapeDtypes
from distdl_jax.nn.base.layer import Layer
from distdl_jax.nn.dense.squeeze_excitation import DistributedSqueezeExcitation, ScalingPlan
from distdl_jax.nn.networks.function_runs import FunctionsPlan
from distdl_jax.nn.networks.network import Network
from distdl_jax.nn.networks.pipeline import Pipeline
from distdl_jax.nn.networks.residual import WAYS, Residual, ResidualPlan, Skip, SkipPlan
from distdl_jax.nn.networks.sequential import Sequential, SequentialPlan
from distdl_jax.partitions.spec_trees import is_spec
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.tools.cost.traced import traced_by_all
from distdl_jax.tools.cost.traces import NotRecorded, Trace, TracedClass, traced_classes
from distdl_jax.transports.world import World
from distdl_jax.watchdog.programs.ir import Operation


@dataclass(frozen=True)
class CountedLayer:
    """A layer in a network.

    - `place`: in the network: "3.body.0".
    - `classes`: the work of workers. - `y`: the shapes and dtypes of their blocks afterwards.
    - `uses_params`: whether it has parameters. - `has_gradient`: whether the gradient of its input is computed.
    """

    place: str
    classes: tuple[TracedClass, ...]
    y: ShapeDtypes = field(hash=False)
    uses_params: bool
    has_gradient: bool

    @cached_property
    def _class_of(self) -> np.ndarray:
        found = np.zeros(sum(len(workers) for workers, _ in self.classes), np.int64)
        for number, (workers, _) in enumerate(self.classes):
            found[workers] = number
        return found

    def trace(self, worker: int) -> Trace:
        """Return the work of a worker."""
        return self.classes[self._class_of[worker]].trace


@dataclass(frozen=True)
class Joined:
    """Two branches from one input, whose outputs are added, multiplied, or concatenated: None for the input itself.

    - `place`, `y`, `has_gradient`: as for a layer; `has_gradient` for the outputs.
    - `movements`: the movements before concatenation, and whether they have a gradient.
    """

    place: str
    ways: tuple[Chain | None, Chain | None]
    kind: Literal["sum", "product", "concatenation"]
    y: ShapeDtypes = field(hash=False)
    has_gradient: bool
    movements: tuple[tuple[MovementPlan, bool], ...] = ()


Chain = tuple[CountedLayer | Joined, ...]
"""Layers, in order."""


@dataclass(frozen=True)
class Counter:
    """Counts networks on the workers of `world`, with parameters of `dtype`."""

    world: World
    dtype: np.dtype

    def chain(self, layer: Any, plan: Plan, x: ShapeDtypes, place: str = "", has_gradient: bool = False) -> Chain:
        """Return the layers of a network, or a single layer, on blocks like `x`.

        - `has_gradient`: whether the gradient of `x` is computed.
        """
        match layer, plan:
            case _, FunctionsPlan():  # the first of functions that are counted together, or another one
                if plan.functions is None:
                    return ()
                classes = traced_by_all(plan.functions, x, self.world, self.dtype)
                return (CountedLayer(place, classes, plan.after(x), False, has_gradient),)
            case Sequential(), SequentialPlan():
                return self._one_after_the_other(enumerate(zip(layer, plan.plans, strict=True)), x, place, has_gradient)
            case Residual(), ResidualPlan():
                ways = zip(WAYS, (layer.body, layer.shortcut), (plan.body, plan.shortcut), strict=True)
                body, shortcut = (
                    None if of_way is None else self.chain(way, of_way, x, _within(place, name), has_gradient)
                    for name, way, of_way in ways
                )
                after = has_gradient or has_gradient_after(body or ()) or has_gradient_after(shortcut or ())
                return (Joined(place, (body, shortcut), "sum", plan.outputs, after),)
            case Skip(), SkipPlan():
                return (self._skip(layer, plan, x, place, has_gradient),)
            case DistributedSqueezeExcitation(), ScalingPlan():
                maps = zip(layer._parts, (plan.fc1, plan.fc2), strict=True)
                pool = self.chain(layer._pool, plan.pool, x, place, has_gradient)
                named = ((name, (part, of_part)) for (name, part), of_part in maps)
                scales = pool + self._one_after_the_other(named, plan.pool.after(x), place, has_gradient)
                return (Joined(place, (None, scales), "product", plan.outputs, True),)
        uses_params = isinstance(layer, Layer) and bool(jax.tree.leaves(layer.param_specs(), is_leaf=is_spec))
        try:
            classes = self._classes(layer, plan, x)
        except DistDLError:
            raise
        except (jax.errors.JAXTypeError, ValueError) as error:
            name = getattr(layer, "__name__", type(layer).__name__)
            reason = "it depends on values" if isinstance(error, jax.errors.JAXTypeError) else "JAX rejects it"
            raise PlanError(
                f"{f'{place} {name}'.strip()} can't be counted from its program, forward and backward: {reason} "
                f"({str(error).splitlines()[0]})."
            ) from error
        return (CountedLayer(place, classes, plan.after(x), uses_params, has_gradient),)

    def _skip(self, layer: Skip, plan: SkipPlan, x: ShapeDtypes, place: str, has_gradient: bool) -> Joined:
        body = self.chain(layer.body, plan.body, x, _within(place, "body"), has_gradient)
        after = has_gradient or has_gradient_after(body)
        if plan.join is None:
            return Joined(place, (body, None), "sum", plan.outputs, after)
        pieces = zip(plan.join.pieces, (has_gradient, after), strict=True)
        moved = tuple((piece, has) for piece, has in pieces if piece.halos.owned.ranges != piece.halos.needed)
        return Joined(place, (None, body), "concatenation", plan.outputs, after, moved)

    def _one_after_the_other(
        self, parts: Iterable[tuple[Any, tuple[Any, Plan]]], x: ShapeDtypes, place: str, has_gradient: bool
    ) -> Chain:
        found: Chain = ()
        for name, (part, plan) in parts:
            found += self.chain(part, plan, x, _within(place, str(name)), has_gradient)
            x, has_gradient = plan.after(x), has_gradient or has_gradient_after(found)
        return found

    def _classes(self, layer: Any, plan: Plan, x: ShapeDtypes) -> tuple[TracedClass, ...]:
        try:
            return traced_classes(layer, plan, x, self.world, self.dtype)
        except (NotRecorded, SetupError):
            return traced_by_all(layer, x, self.world, self.dtype)


class LayerMovement(NamedTuple):
    """A movement in the forward pass of a layer.

    - `place`: of the layer in the network. - `movement`: None if workers were traced together.
    - `of_params`: whether it moves only parameters.
    - `operations`: without a plan, the communication of each worker.
    """

    place: str
    movement: MovementPlan | None
    of_params: bool = False
    operations: Mapping[int, Sequence[Operation]] = MappingProxyType({})


def forward_movements(chain: Chain) -> list[LayerMovement]:
    """Return the movements in the forward pass of layers, in order."""
    found: list[LayerMovement] = []
    for layer in nodes_in(chain):
        if isinstance(layer, Joined):
            found += [LayerMovement(layer.place, movement) for movement, _ in layer.movements]
            continue
        marks: dict[int, Mark] = {}
        for _, trace in sorted(layer.classes, key=lambda each: -len(each.trace.forward)):
            marks |= {id(mark.plan): mark for mark in trace.forward if isinstance(mark, Mark)}
        found += [LayerMovement(layer.place, mark.plan, mark.of_params) for mark in marks.values()]
        by_worker = {int(w[0]): [op for op in t.forward if isinstance(op, Operation)] for w, t in layer.classes}
        if any(by_worker.values()):
            found.append(LayerMovement(layer.place, None, False, by_worker))
    return found


def has_gradient_after(chain: Chain) -> bool:
    """Return whether the gradient of a chain's output is computed."""
    return any(node.has_gradient or (isinstance(node, CountedLayer) and node.uses_params) for node in chain)


def nodes_in(chain: Chain) -> Iterator[CountedLayer | Joined]:
    """Yield the layers of a chain and of its branches, in the order of the forward pass."""
    for node in chain:
        for way in node.ways if isinstance(node, Joined) else ():
            yield from nodes_in(way or ())
        yield node


def _within(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


class PlacedLayer(NamedTuple):
    """A layer or a function in a network; `name`: of its class, or of the function."""

    place: str
    layer: Any
    name: str

    @property
    def param_specs(self) -> list[TensorSpec]:
        """The specs of all parameters."""
        if not isinstance(self.layer, Layer):
            return []
        leaves = jax.tree.leaves(self.layer.param_specs(), is_leaf=is_spec)
        return [leaf for leaf in leaves if is_spec(leaf)]


def placed_layers(layer: Callable[..., Any], place: str = "") -> Iterator[PlacedLayer]:
    """Yield the layers within `layer`, at any depth, or the layer itself; places, "3.body.0", are those of actions."""
    if not isinstance(layer, Network) or isinstance(layer, Pipeline):
        yield PlacedLayer(place, layer, getattr(layer, "__name__", type(layer).__name__))
        return
    for name, part in layer._parts:
        if part is not None:
            yield from placed_layers(part, f"{place}.{name}" if place else str(name))
    if layer._computes:
        yield PlacedLayer(place, None, layer._computes)

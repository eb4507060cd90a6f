"""The base of layers made of layers: their parameters, states and random keys, each under the layer's name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidTypeError
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.layer import BaseLayer, Layer, apply_layer, draws_numbers, keeps_state
from distdl_jax.nn.base.parameters import unboxed
from distdl_jax.partitions.partition import Partition
from distdl_jax.tracing.scopes import place_scope
from distdl_jax.transports.agreement import structure_text
from distdl_jax.validation import check_key, checked_boolean

RunPart = Callable[[Any, Any, Array], Array]
"""Maps the name of a part, the part and its input to its output, with the parameters, state and key of that name."""


class Network(BaseLayer):
    """A layer made of layers and plain functions, of whole arrays."""

    @property
    @abstractmethod
    def _parts(self) -> Sequence[tuple[Any, Any]]:
        """Pairs: the name of the parameters and state, and a layer or a function, or None for the identity."""

    @abstractmethod
    def _pack(self, entries: Iterable[Any]) -> Any:
        """Put an entry for each part, in order, into a pytree like the parameters."""

    @abstractmethod
    def _forward(self, run: RunPart, x: Array) -> Array:
        """Return the output; `run` applies a part."""

    @property
    def _computes(self) -> str:
        """Its computation besides its parts, in a word; "" for nothing."""
        return ""

    @property
    def input_partition(self) -> Partition | None:
        """The partition of the first layer's input; None if there are only functions."""
        return first_partition(layer for _, layer in self._parts)

    @property
    def output_partition(self) -> Partition | None:
        """The partition of the last layer's output; None if there are only functions."""
        return last_partition([layer for _, layer in self._parts])

    @property
    def _copied(self) -> tuple[int, ...]:
        last = [layer for _, layer in self._parts if isinstance(layer, BaseLayer)][-1:]
        return last[0]._copied if last else ()

    @property
    def draws(self) -> bool:
        """Whether a layer draws random numbers in training, and needs a `key`."""
        return any(draws_numbers(layer) for _, layer in self._parts)

    @property
    def takes_indices(self) -> bool:
        """Whether the input holds integers: if the first layer with parameters takes indices."""
        specs = ((layer, layer.param_specs()) for _, layer in self._parts if isinstance(layer, Layer))
        return next(
            (isinstance(layer, BaseLayer) and layer.takes_indices for layer, tree in specs if jax.tree.leaves(tree)),
            False,
        )

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Any:
        """Return this worker's blocks of the initial parameters; each layer has a separate key, split off `key`."""
        check_key("key", key)
        pairs = zip(self._parts, jax.random.split(key, max(len(self._parts), 1)), strict=False)
        return self._pack(layer.init(k, dtype) if isinstance(layer, Layer) else {} for (_, layer), k in pairs)

    def param_specs(self) -> Any:
        """Return the global shape and the partition of each parameter: a pytree like the parameters."""
        return self._pack(layer.param_specs() if isinstance(layer, Layer) else {} for _, layer in self._parts)

    def init_state(self, dtype: DTypeLike = jnp.float32) -> Any:
        """Return this worker's part of the initial state: an entry for each layer, `{}` for a layer without a state."""
        return self._pack(layer.init_state(dtype) if keeps_state(layer) else {} for _, layer in self._parts)

    def state_specs(self) -> Any:
        """Return the global shape and the partition of each part of the state: a pytree like the state."""
        return self._pack(layer.state_specs() if keeps_state(layer) else {} for _, layer in self._parts)

    @overload
    def __call__(
        self, params: Any, x: Array, *, state: None = None, training: bool = True, key: Array | None = None
    ) -> Array: ...
    @overload
    def __call__(
        self, params: Any, x: Array, *, state: Any, training: bool = True, key: Array | None = None
    ) -> tuple[Array, Any]: ...
    @layer_call
    def __call__(
        self, params: Any, x: Array, *, state: Any = None, training: bool = True, key: Array | None = None
    ) -> Any:
        """Apply the layers to this worker's blocks of the parameters and of the input.

        **Arguments:**

        - `params`, `x`: this worker's parameters, and its block of the input.
        - `state`: from `init_state`, or the previous call, for stateful layers.
        - `training`: whether layers that distinguish training from evaluation are in training mode.
        - `key`: a JAX random key, the same on every worker, for layers that draw random numbers in training; each gets
          a separate key, split off it.

        **Returns:** this worker's block of the output, elsewhere a zero-volume array; with `state`, the pair of the
        output and the new state.

        **Raises:** `InvalidTypeError` if `training` is not True or False; errors of the layers. `Sequential`:
        `InvalidArgumentError` if `params` or `state` does not have an entry for each layer; `PlanError`, on this
        worker, if a layer would ignore its block. `Residual`: `PlanError`, on every worker of the output's partition,
        if the two outputs have different shapes.
        """
        training = checked_boolean("training", training)
        params = unboxed(params)
        self._check_entries("params", params)
        if state is not None:
            self._check_entries("state", state)
            check_has_entries("state", state, [name for name, _ in self._parts])
        names = [name for name, _ in self._parts]
        check_has_entries("params", params, [name for name, part in self._parts if isinstance(part, Layer)])
        keys: Any = [None] * len(names) if key is None else jax.random.split(key, max(len(names), 1))
        key_of = dict(zip(names, keys, strict=False))
        states = {name: None if state is None else state[name] for name in names}

        def run(name: Any, part: Any, x: Array) -> Array:
            with place_scope(name, part):
                if not isinstance(part, Layer):
                    with jax.named_scope(getattr(part, "__name__", type(part).__name__)):
                        return part(x)
                y, states[name] = apply_layer(part, params[name], x, states[name], training, key_of[name])
                return y

        y = self._forward(run, x)
        return y if state is None else (y, self._pack(states.values()))

    apply = __call__

    def _check_entries(self, name: str, entries: Any) -> None:
        """Reject parameters, or states, that don't match these layers."""


def check_has_entries(argument: str, entries: Any, names: Sequence[Any]) -> None:
    """Reject parameters, or states, of another structure, without an entry for some part."""
    for name in names:
        try:
            entries[name]
        except (KeyError, IndexError, TypeError):
            raise InvalidTypeError(
                f"`{argument}` is {structure_text(entries)}, but must have an entry for each part of the network "
                f"({', '.join(map(repr, names[:8]))}{', ...' * (len(names) > 8)}), as `{_MAKERS[argument]}` makes it."
            ) from None


_MAKERS = {"params": "init", "state": "init_state"}


def first_partition(layers: Iterable[Any]) -> Partition | None:
    """Return the partition of the input of the first of `layers` that knows it."""
    return next((P for layer in layers if (P := getattr(layer, "input_partition", None)) is not None), None)


def last_partition(layers: Sequence[Any]) -> Partition | None:
    """Return the partition of the output of the last of `layers` that knows it."""
    return next((P for layer in layers[::-1] if (P := getattr(layer, "output_partition", None)) is not None), None)


def params_of_part(params: Mapping[int, Any] | None, name: Any) -> dict[int, Any] | None:
    """Return the parameters of one part of a network on all workers; None if none are given."""
    return None if params is None else {worker: each[name] for worker, each in params.items()}

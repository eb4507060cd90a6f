"""Wrappers of a layer: recomputation in the backward pass, and another precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.functional.plan import BlocksPlan, Plan, ShapeDtypes
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.layer import BaseLayer, Ends, Layer, ends_of
from distdl_jax.nn.base.parameters import unboxed
from distdl_jax.nn.networks.network import first_partition, last_partition
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.static import converter
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.alike import derived
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.validation import checked_boolean, checked_dtype


class Wrapper(BaseLayer):
    """The base of wrappers of `layer`, which has the parameters, the state and the partitions."""

    layer: Layer

    def __post_init__(self) -> None:
        if not isinstance(self.layer, Layer):
            raise InvalidTypeError(f"`layer` (={self.layer!r}) must be a layer.")

    def __getattr__(self, name: str) -> Any:
        # Attributes that only some layers have: a state, random numbers, a cache.
        if name.startswith("__") or name == "layer":
            raise AttributeError(name)
        return getattr(self.layer, name)

    @property
    def input_partition(self) -> Partition | None:
        """The partition of the input, the layer's."""
        return first_partition((self.layer,))

    @property
    def output_partition(self) -> Partition | None:
        """The partition of the output, the layer's."""
        return last_partition((self.layer,))

    @property
    def _ends(self) -> Ends:
        return ends_of(self.layer)

    @property
    def takes_indices(self) -> bool:
        """Whether the input holds integers, as the layer's does."""
        return isinstance(self.layer, BaseLayer) and self.layer.takes_indices

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Any:
        """Return this worker's blocks of the layer's initial parameters."""
        return self.layer.init(key, dtype)

    def param_specs(self) -> Any:
        """Return the global shape and the partition of each parameter of the layer."""
        return self.layer.param_specs()

    def output_spec(self, x_spec: TensorSpec) -> TensorSpec:
        """Return the `TensorSpec` of the layer's output, from that of the input, without communication."""
        if not isinstance(self.layer, BaseLayer):
            return super().output_spec(x_spec)
        return self.layer.output_spec(x_spec)


@dataclass(frozen=True)
class Remat(Wrapper):
    """A layer that saves only its input for the backward pass, and recomputes the rest: `jax.checkpoint`.

    Its movements run again, too, on every worker, unless `policy` saves their results. Values, gradients and parameters
    are the layer's.

    **Arguments:**

    - `layer`: any layer, including `nn.Sequential`, with or without a state or random numbers.
    - `policy`: one of `jax.checkpoint_policies`, the same on every worker, for values to save. Default: none.

    **Raises:** `InvalidTypeError` if `layer` is not a layer, or the policy can't be called.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = Remat(dj.nn.DistributedLinear(P, P, P, 3, 2), jax.checkpoint_policies.dots_saveable)
    >>> layer(layer.init(jax.random.key(0)), jax.numpy.ones((5, 3))).shape
    (5, 2)

    Source: Chen et al. (2016), arXiv:1604.06174; `jax.checkpoint`.
    """

    layer: Any
    policy: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy is not None and not callable(self.policy):
            raise InvalidTypeError(f"`policy` (={self.policy!r}) must be one of jax.checkpoint_policies, or None.")

    def plan(self, x: ShapeDtypes, params: Any = None) -> Plan:
        """Plan the layer for all workers' blocks; see `Layer.plan`."""
        return self.layer.plan(x, params)

    @layer_call
    def __call__(self, params: Any, x: Array, **options: Any) -> Any:
        """Return this worker's block of the output. `options` are the layer's: `state`, `training`, `key`, ..."""
        if "training" in options:
            options["training"] = checked_boolean("training", options["training"])
        rest = {name: value for name, value in options.items() if name == "training" or isinstance(value, bool | None)}
        arrays = {name: value for name, value in options.items() if name not in rest}

        def apply(params: Any, x: Array, arrays: dict[str, Any]) -> Any:
            return self.layer(params, x, **arrays, **rest)

        return jax.checkpoint(apply, policy=self.policy)(unboxed(params), x, arrays)

    apply = __call__


def _floating(name: str, value: Any) -> np.dtype:
    dtype = checked_dtype(name, value)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InvalidArgumentError(f"`{name}` (={value!r}) must be a floating dtype.")
    return np.dtype(dtype)


@dataclass(frozen=True)
class Precision(Wrapper):
    """A layer with arithmetic and movements in another precision than its parameters.

    Floating parameters and inputs are rounded to `compute` first, and the output is converted to `output`. So are
    gradients; the parameters' gradients are in the parameters' own dtype. Sums over workers in half precision are
    computed in float32, as everywhere. The layer's state is unchanged.

    **Arguments:**

    - `layer`: any layer, including `nn.Sequential`.
    - `compute`: the dtype of the arithmetic.
    - `output`: the dtype of the output. Default: x's.

    **Raises:** `InvalidTypeError` if `layer` is not a layer, or a dtype is not one of numbers; `InvalidArgumentError`
    if a dtype is not floating.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = Precision(dj.nn.DistributedLinear(P, P, P, 3, 2), "bfloat16", output="bfloat16")
    >>> params = layer.init(jax.random.key(0))
    >>> str(params["weight"].dtype), str(layer(params, jax.numpy.ones((5, 3))).dtype)
    ('float32', 'bfloat16')

    Source: Micikevicius et al. (2018), arXiv:1710.03740.
    """

    layer: Any
    compute: DTypeLike = field(default=jnp.bfloat16, metadata=converter(_floating))
    output: DTypeLike | None = field(default=None, metadata=converter(_floating))

    def plan(self, x: ShapeDtypes, params: Any = None) -> Plan:
        """Plan the layer for all workers' blocks; see `Layer.plan`."""
        narrow = derived(lambda worker: self._narrow(x[worker]), x)
        inside = self.layer.plan(narrow, None if params is None else self._narrow(params)).outputs

        def widened(worker: int) -> ShapeDtype:
            y = inside[worker]
            return ShapeDtype(y.shape, np.dtype(self._widened(y.dtype, x[worker].dtype)))

        return BlocksPlan(derived(widened, inside, x))

    @layer_call
    def __call__(self, params: Any, x: Array, **options: Any) -> Any:
        """Return this worker's block of the output. `options` are the layer's: `state`, `training`, `key`, ..."""

        def rounded(x: Any) -> Any:
            return x.astype(self.compute) if jnp.issubdtype(x.dtype, jnp.floating) else x

        result = self.layer(jax.tree.map(rounded, unboxed(params)), rounded(x), **options)
        y, *rest = result if isinstance(result, tuple) else (result,)
        y = y.astype(self._widened(y.dtype, x.dtype))
        return (y, *rest) if rest else y

    apply = __call__

    def _widened(self, dtype: Any, of_x: Any) -> Any:
        """Return the dtype of the output, given its `dtype` inside."""
        wanted = of_x if self.output is None and jnp.issubdtype(of_x, jnp.floating) else self.output or dtype
        return wanted if jnp.issubdtype(dtype, jnp.floating) else dtype

    def _narrow(self, tree: Any) -> Any:
        def narrow(x: ShapeDtype) -> ShapeDtype:
            return ShapeDtype(x.shape, np.dtype(self.compute)) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(narrow, tree, is_leaf=lambda x: isinstance(x, ShapeDtype))

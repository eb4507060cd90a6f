"""Weight normalisation of a layer whose weight may be split in any way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.functional.collectives import accumulation_dtype
from distdl_jax.functional.plan import Plan, ShapeDtypes
from distdl_jax.functional.replicated import replicated
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.parameters import unboxed
from distdl_jax.nn.dense.split_weight import SplitWeight, split_weight
from distdl_jax.nn.networks.remat_precision import Wrapper
from distdl_jax.tracing.tie import tie


@dataclass(frozen=True)
class WeightNorm(Wrapper):
    r"""A layer whose weight is w = g v / |v|, its length and its direction apart: PyTorch's weight_norm.

    |v| is the norm over all dimensions of the weight but `dim`, so that of each output there is one. In place of the
    layer's `weight` (or what `name` says) the parameters have

    | tensor | global shape | partition |
    |---|---|---|
    | `weight_v` | the weight's | the weight's |
    | `weight_g` | the weight's along `dim` alone; () without any | like the weight's; copies along its others |

    All else, partitions, state and options of a call, is the layer's. Where the weight is split along other dimensions
    than `dim`, the workers along them sum one number for each norm, forward and backward, and the gradient of
    `weight_g`; else nothing moves. In half precision norms are computed in float32.

    **Arguments:**

    - `layer`: a layer whose parameters are a dictionary.
    - `name`: the parameter.
    - `dim`: the dimension of which each place has a norm of its own, or several; None for one norm of all. PyTorch's
      rows are dimensions 0 and 1 of the weights of a recurrent cell (gates and features) and of queries, keys and
      values (heads and features).

    **Raises:** `InvalidTypeError` for what is no layer; `InvalidArgumentError`, on every worker, where it has no such
    parameter, or that no such dimension.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = WeightNorm(dj.nn.DistributedLinear(P, P, P, 3, 2))
    >>> params = layer.init(jax.random.key(0))
    >>> sorted(params), params["weight_g"].shape
    (['bias', 'weight_g', 'weight_v'], (2,))

    Source: Salimans and Kingma (2016), arXiv:1602.07868; PyTorch's weight_norm (whose g has dimensions of 1, too).
    """

    layer: Any
    name: str = "weight"
    dim: int | Sequence[int] | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._store(dim=self._weight.rows or None)

    @cached_property
    def _weight(self) -> SplitWeight:
        return split_weight(self.layer.param_specs(), self.name, self.dim)

    @property
    def _names(self) -> tuple[str, str]:
        return f"{self.name}_g", f"{self.name}_v"

    def param_specs(self) -> dict[str, Any]:
        """Return the global shape and the partition of each parameter."""
        weight = self._weight
        others = {name: spec for name, spec in self.layer.param_specs().items() if name != self.name}
        return others | dict(zip(self._names, (weight.spec_along(weight.rows), weight.spec), strict=True))

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> dict[str, Array]:
        """Return this worker's blocks of the layer's initial parameters, with g = |v|: the weight is the layer's.

        Where the weight is split along other dimensions than `dim`, it is collective among its workers, which sum the
        squares.
        """
        params = dict(self.layer.init(key, dtype))
        v = params.pop(self.name)
        g = self._norm(v).astype(v.dtype) if self._weight.spec.box is not None else v
        return params | dict(zip(self._names, (g, v), strict=True))

    def plan(self, x: ShapeDtypes, params: Any = None) -> Plan:
        """Plan what becomes of the workers' blocks; see `Layer.plan`."""
        if params is not None:
            g, v = self._names
            params = {
                worker: {name: each for name, each in shapes.items() if name not in (g, v)} | {self.name: shapes[v]}
                for worker, shapes in params.items()
            }
        return self.layer.plan(x, params)

    @layer_call
    def __call__(self, params: Any, x: Array, **options: Any) -> Any:
        """Return this worker's block of the output. `options` are the layer's: `state`, `training`, `key`, ..."""
        params = dict(unboxed(params))
        g, v = (params.pop(name) for name in self._names)
        with jax.named_scope(type(self).__name__):
            params[self.name] = self._scaled(g, v)
        return self.layer(params, x, **options)

    apply = __call__

    def _scaled(self, g: Array, v: Array) -> Array:
        """Return this worker's block of the weight; a placeholder where it holds none."""
        weight = self._weight
        if weight.spec.box is None:
            return tie(v, g)
        axes = weight.axes(weight.columns)
        g = replicated(g, weight.spec.partition, axes) if axes else g
        scale = g.astype(accumulation_dtype(np.dtype(v.dtype))) / self._norm(v)
        return tie((v * weight.spread(scale, weight.rows)).astype(v.dtype), v, scale)

    def _norm(self, v: Array) -> Array:
        """Return the norms over the dimensions that are not `dim`, from this worker's block."""
        squares = jnp.square(v.astype(accumulation_dtype(np.dtype(v.dtype))))
        return jnp.sqrt(self._weight.sums(squares, self._weight.columns))

"""Weight and spectral normalisation of a layer whose weight may be split in any way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.functional.all_sum_reduce import all_sum_reduce
from distdl_jax.functional.copies import replicated
from distdl_jax.functional.plan import Plan, ShapeDtypes
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.layer import Layer, draws_numbers, keeps_state
from distdl_jax.nn.base.parameters import unboxed
from distdl_jax.nn.networks.remat_precision import Wrapper
from distdl_jax.partitions.tensors import TensorSpec, zero_volume_tensor
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import checked_boolean, checked_dtype, checked_integer, checked_integers, is_real

State = dict[str, Array]


@dataclass(frozen=True)
class SplitWeight:
    """The weight of `spec`, seen as a matrix whose rows are indexed by its dimensions `rows`."""

    spec: TensorSpec
    rows: tuple[int, ...]

    @property
    def columns(self) -> tuple[int, ...]:
        """The dimensions of the columns."""
        return tuple(d for d in range(len(self.spec.global_shape)) if d not in self.rows)

    def axes(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Return the dimensions of the partition that cut the given dimensions of the weight."""
        cut = [axis for axis in range(self.spec.partition.dim) if axis not in self.spec.replicated]
        return tuple(cut[d] for d in dims) if cut else ()

    def spec_along(self, dims: Sequence[int]) -> TensorSpec:
        """Return the spec of a replicated tensor with these dimensions of the weight."""
        P, axes = self.spec.partition, self.axes(dims)
        shape = tuple(self.spec.global_shape[d] for d in dims)
        return TensorSpec(shape, P, tuple(axis for axis in range(P.dim) if axis not in axes) if axes else True)

    def sums(self, x: Array, dims: Sequence[int]) -> Array:
        """Return the sums along dimensions of x, a block of the weight's shape, over its workers; without these."""
        return self.sums_over_workers(tie(jnp.sum(x, tuple(dims)), x), dims)

    def sums_over_workers(self, x: Array, dims: Sequence[int]) -> Array:
        """Return the sum of x over the workers along dimensions of the weight."""
        axes = self.axes(dims)
        return all_sum_reduce(x, self.spec.partition, axes_reduce=axes) if axes else x

    def spread(self, x: Array, dims: Sequence[int]) -> Array:
        """Return a tensor with these dimensions of the weight, reshaped to broadcast with the weight's block."""
        lengths = dict(zip(dims, x.shape, strict=True))
        return x.reshape([lengths.get(d, 1) for d in range(len(self.spec.global_shape))])


def split_weight(specs: Any, name: Any, dim: Any) -> SplitWeight:
    """Return the weight `name` of parameters of `specs`, with rows along `dim`: a dimension, several, or None.

    **Raises:** `InvalidArgumentError` if there is no such weight, or no such dimension.
    """
    entries = specs.items() if isinstance(specs, Mapping) else ()
    names = sorted(each for each, spec in entries if isinstance(spec, TensorSpec))
    if name not in names:
        raise InvalidArgumentError(
            f"`name` (={name!r}) must be one of the layer's parameters, {', '.join(map(repr, names)) or 'none'}."
        )
    spec: TensorSpec = specs[name]
    dims = len(spec.global_shape)
    given = () if dim is None else checked_integers("dim", dim, or_one=True)
    rows = tuple(sorted({d % dims for d in given if -dims <= d < dims}))
    if len(rows) != len(given):
        raise InvalidArgumentError(
            f"`dim` (={dim!r}) must name dimensions of {name!r}, 0 to {dims - 1}, each at most once."
        )
    return SplitWeight(spec, rows)


@dataclass(frozen=True)
class WeightNorm(Wrapper):
    r"""A layer whose weight is w = g v / |v|, with separate parameters for length and direction: PyTorch's weight_norm.

    |v| is the norm over all dimensions of the weight but `dim`, so that of each output there is one. In place of the
    layer's `weight` (or `name`) the parameters have

    | tensor | global shape | partition |
    |---|---|---|
    | `weight_v` | the weight's | the weight's |
    | `weight_g` | the weight's along `dim` alone; () without any | like the weight's; copies along its others |

    Everything else (partitions, state, options of a call) is the layer's. If the weight is split along other dimensions
    than `dim`, the workers along them sum one number for each norm, forward and backward, and the gradient of
    `weight_g`; otherwise there is no communication. In half precision norms are computed in float32.

    **Arguments:**

    - `layer`: a layer whose parameters are a dictionary.
    - `name`: the parameter.
    - `dim`: the dimension along which each index has its own norm, or several; None for one norm in total. PyTorch's
      rows are dimensions 0 and 1 of the weights of a recurrent cell (gates and features) and of queries, keys and
      values (heads and features).

    **Raises:** `InvalidTypeError` if `layer` is not a layer; `InvalidArgumentError`, on every worker, if it has no such
    parameter, or the parameter no such dimension.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = WeightNorm(dj.nn.DistributedLinear(P, P, P, 3, 2))
    >>> params = layer.init(jax.random.key(0))
    >>> sorted(params), params["weight_g"].shape
    (['bias', 'weight_g', 'weight_v'], (2,))

    Source: Salimans and Kingma (2016), arXiv:1602.07868; PyTorch's weight_norm (whose g also has dimensions of 1).
    """

    layer: Layer
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
        """Return this worker's blocks of the layer's initial parameters, with g = |v|, so the weight is the layer's.

        If the weight is split along other dimensions than `dim`, its workers sum the squares collectively.
        """
        params = dict(self.layer.init(key, dtype))
        v = params.pop(self.name)
        g = self._norm(v).astype(v.dtype) if self._weight.spec.box is not None else v
        return params | dict(zip(self._names, (g, v), strict=True))

    def plan(self, x: ShapeDtypes, params: Any = None) -> Plan:
        """Plan the layer for all workers' blocks; see `Layer.plan`."""
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
        """Return this worker's block of the weight; a placeholder if it holds none."""
        weight = self._weight
        if weight.spec.box is None:
            return tie(v, g)
        axes = weight.axes(weight.columns)
        g = replicated(g, weight.spec.partition, axes) if axes else g
        scale = g.astype(accumulation_dtype(np.dtype(v.dtype))) / self._norm(v)
        return tie((v * weight.spread(scale, weight.rows)).astype(v.dtype), v, scale)

    def _norm(self, v: Array) -> Array:
        """Return the norms over all dimensions except `dim`, from this worker's block."""
        squares = jnp.square(v.astype(accumulation_dtype(np.dtype(v.dtype))))
        return jnp.sqrt(self._weight.sums(squares, self._weight.columns))


@dataclass(frozen=True)
class SpectralNorm(Wrapper):
    r"""A layer whose weight is divided by its largest singular value: PyTorch's spectral_norm.

    With the weight as a matrix W, rows along `dim` and columns along all other dimensions, the layer uses W / sigma,
    sigma = u^T W v. The vectors u and v are the state. In training a call first updates them, `n_power_iterations`
    times:

        v = W^T u / max(|W^T u|, eps)
        u = W v / max(|W v|, eps)

    Sigma is differentiated with u and v constant. Parameters, partitions and options of a call are the layer's.

    | state | global shape | partition |
    |---|---|---|
    | `weight_u` | the weight's, of the dimensions `dim` alone | like the weight's; copies along its others |
    | `weight_v` | the weight's, of all others | like the weight's; copies along `dim` |

    In each iteration the workers of a weight that is split along its rows sum a number for each of their columns, and
    one more; along its columns a number for each row, and one more. Sigma is one number, forward and backward. Half
    precisions are computed in float32.

    **Arguments:**

    - `layer`: a layer whose parameters are a dictionary. Its own state, if it has one, becomes part of the state.
    - `name`: the parameter.
    - `n_power_iterations`: the number in each call in training.
    - `eps`: the smallest divisor of the vectors.
    - `dim`: the dimension of the rows, or several: 1 for a transposed convolution, as in PyTorch, which has 0 for all
      others; (0, 1) for the weights of a recurrent cell, and for queries, keys and values.

    **Call:** `y, state = layer(params, x, state=state, training=True)`, with the state from `init_state` (random unit
    vectors, the same in all runs), or the previous call; it is not differentiated. In evaluation the state is
    unchanged. Without a state the layer returns y alone, each time starting from `init_state`.

    **Raises:** `InvalidTypeError` if `layer` is not a layer; `InvalidArgumentError`, on every worker, if it has no such
    parameter, or an argument is invalid.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = SpectralNorm(dj.nn.DistributedLinear(P, P, P, 3, 2))
    >>> params, state = layer.init(jax.random.key(0)), layer.init_state()
    >>> y, state = layer(params, jax.numpy.ones((5, 3)), state=state, training=True)
    >>> y.shape, state["weight_u"].shape, state["weight_v"].shape
    ((5, 2), (2,), (3,))

    Source: Miyato et al. (2018), arXiv:1802.05957; PyTorch's spectral_norm.
    """

    layer: Layer
    name: str = "weight"
    n_power_iterations: int = 1
    eps: float = 1e-12
    dim: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_integer("n_power_iterations", self.n_power_iterations, 1, 2**12)  # each is traced
        if not is_real(self.eps) or self.eps <= 0:
            raise InvalidArgumentError(f"`eps` (={self.eps!r}) must be a number above 0.")
        if not self._weight.rows:
            raise InvalidArgumentError(f"`dim` (={self.dim!r}) must name a dimension of {self.name!r}, or several.")
        self._store(dim=self._weight.rows)

    @cached_property
    def _weight(self) -> SplitWeight:
        return split_weight(self.layer.param_specs(), self.name, self.dim)

    @property
    def _names(self) -> tuple[str, str]:
        return f"{self.name}_u", f"{self.name}_v"

    def state_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each part of the state: a pytree like it."""
        weight, inner = self._weight, self.layer.state_specs() if keeps_state(self.layer) else {}
        vectors = (weight.spec_along(dims) for dims in (weight.rows, weight.columns))
        return inner | dict(zip(self._names, vectors, strict=True))

    def init_state(self, dtype: DTypeLike = jnp.float32) -> State:
        """Return this worker's part of the initial state: random unit vectors; zero-volume if it holds no weight."""
        found, specs = checked_dtype("dtype", dtype), self.state_specs()
        state = dict(self.layer.init_state(dtype)) if keeps_state(self.layer) else {}
        for seed, name in enumerate(self._names):
            spec = specs[name]
            if spec.box is None:
                state[name] = zero_volume_tensor(dtype=found)
                continue
            # Each worker generates the whole vector, which is short compared to the weight.
            whole = np.random.default_rng(seed).standard_normal(spec.global_shape)
            unit = whole / np.linalg.norm(whole.reshape(-1))
            state[name] = jnp.asarray(unit[tuple(slice(*side) for side in spec.box)], found)
        return state

    def plan(self, x: ShapeDtypes, params: Any = None) -> Plan:
        """Plan the layer for all workers' blocks; see `Layer.plan`."""
        return self.layer.plan(x, params)

    @layer_call
    def __call__(
        self, params: Any, x: Array, *, state: State | None = None, training: bool = True, **options: Any
    ) -> Any:
        """Return this worker's block of the output, and with `state` the new state, as a pair.

        `options` are the layer's, such as `key`; additional results of it are placed between the two.
        """
        training = checked_boolean("training", training)
        params, vectors = unboxed(params), self.init_state() if state is None else state
        if missing := [name for name in self._names if name not in vectors]:
            raise InvalidTypeError(f"`state` must hold {missing[0]!r}, from `init_state` or the previous call.")
        with jax.named_scope(type(self).__name__):
            u, v = (vectors[name] for name in self._names)
            weight, *after = self._normalized(params[self.name], u, v, training)
        if has_state := keeps_state(self.layer):
            options["state"] = None if state is None else {k: v for k, v in state.items() if k not in self._names}
        if has_state or draws_numbers(self.layer):
            options["training"] = training
        result: Any = self.layer({**params, self.name: weight}, x, **options)
        if state is None:
            return result
        outputs = list(result) if isinstance(result, tuple) else [result]
        inner = outputs.pop() if has_state else {}
        return (*outputs, inner | dict(zip(self._names, after, strict=True)))

    apply = __call__

    def _normalized(self, w: Array, u: Array, v: Array, training: bool) -> tuple[Array, Array, Array]:
        """Return this worker's blocks of W / sigma, and of u and v afterwards."""
        weight = self._weight
        if weight.spec.box is None:
            return w, u, v
        wide, rows, columns = accumulation_dtype(np.dtype(w.dtype)), weight.rows, weight.columns
        matrix, constant = w.astype(wide), lax.stop_gradient(w).astype(wide)
        new_u, new_v = (lax.stop_gradient(vector).astype(wide) for vector in (u, v))
        for _ in range(self.n_power_iterations if training else 0):
            new_v = self._unit(weight.sums(constant * weight.spread(new_u, rows), rows), columns)
            new_u = self._unit(weight.sums(constant * weight.spread(new_v, columns), columns), rows)
        outer = weight.spread(new_u, rows) * weight.spread(new_v, columns)
        sigma = weight.sums(matrix * outer, (*rows, *columns))
        return tie((matrix / sigma).astype(w.dtype), w, sigma), new_u.astype(u.dtype), new_v.astype(v.dtype)

    def _unit(self, vector: Array, dims: Sequence[int]) -> Array:
        """Return a vector along dimensions of the weight, of length 1."""
        squares = self._weight.sums_over_workers(tie(jnp.sum(jnp.square(vector)), vector), dims)
        return vector / jnp.maximum(jnp.sqrt(squares), self.eps)

"""Batch normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional.block_checks import outside
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.parameters import Params, check_params
from distdl_jax.nn.norm.normalization import ChannelNorm, NormPlan, check_norm, filled
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.validation import checked_boolean, checked_integer, is_real

State = dict[str, Array]

_STATE = "state."
"""The prefix of a state's entries when workers exchange shapes of parameters and state."""


@dataclass(frozen=True)
class DistributedBatchNorm(ChannelNorm):
    r"""Normalise each channel over batch and features; all dimensions may be split, including the channels.

    y = (x - mean) / sqrt(var + eps) * weight + bias, with one mean and variance per channel. In training they are
    computed from x, over all workers (with the biased variance, as in PyTorch); in evaluation the running ones of the
    state are used.

    | tensor | global shape | partition |
    |---|---|---|
    | x, y | n_b x n_c x n_{D-1} x ... x n_0 | P_x: P_n x P_c x P_{D-1} x ... x P_0 |
    | weight, bias, running_mean, running_var | n_c | P_c; copies along all other dimensions of P_x |
    | num_batches_tracked | a scalar | a copy on every worker of P_x |

    In training, the workers of the same channels sum one number per channel, then two, and two for the gradient;
    evaluation needs no communication. Gradients of weight and bias are summed over the copies. Blocks of x are balanced
    along the channels, and have any length, including 0, along the rest. Half precisions are summed in float32.

    **Arguments:**

    - `P_x`: the partition of input and output, of 2 dimensions or more.
    - `num_features`: n_c, the number of channels.
    - `eps`: added to the variance.
    - `momentum`: the weight of the new value in running_mean and running_var, which uses the unbiased variance; None
      for the mean over all batches.
    - `affine`: whether there are weight and bias.
    - `track_running_stats`: whether there is a state. Without one, x's own statistics are used in evaluation, too.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = DistributedBatchNorm(P, num_features=3)
    >>> params, state = layer.init(jax.random.key(0)), layer.init_state()
    >>> y, state = layer(params, jax.numpy.ones((5, 3)), state=state, training=True)
    >>> state["running_mean"].tolist() == [0.1 * jax.numpy.float32(1)] * 3
    True

    Source: Ioffe and Szegedy (2015), arXiv:1502.03167; PyTorch's BatchNorm1d, 2d and 3d.
    """

    P_x: Partition
    num_features: int
    eps: float = 1e-5
    momentum: float | None = 0.1
    affine: bool = True
    track_running_stats: bool = True

    def __post_init__(self) -> None:
        check_norm(self.P_x, self.eps, 2)
        checked_integer("num_features", self.num_features, 1)
        if self.momentum is not None and not (is_real(self.momentum) and 0 <= self.momentum <= 1):
            raise InvalidArgumentError(f"`momentum` (={self.momentum!r}) must be a number from 0 to 1, or None.")

    @property
    def _channels(self) -> int:
        return self.num_features

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(d for d in range(self.P_x.dim) if d != 1)

    def state_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each part of the state: a pytree like it."""
        if not self.track_running_stats:
            return {}
        scalar = TensorSpec((), self.P_x, True)
        return {**dict.fromkeys(("running_mean", "running_var"), self._spec), "num_batches_tracked": scalar}

    def init_state(self, dtype: DTypeLike = jnp.float32) -> State:
        """Return this worker's part of the initial state: means 0, variances 1; {} if nothing is tracked."""
        values = {"running_mean": (0, dtype), "running_var": (1, dtype), "num_batches_tracked": (0, jnp.int32)}
        return {name: filled(spec, *values[name]) for name, spec in self.state_specs().items()}

    @overload
    def __call__(self, params: Params, x: Array) -> Array: ...
    @overload
    def __call__(self, params: Params, x: Array, *, state: State, training: bool = True) -> tuple[Array, State]: ...
    @layer_call
    def __call__(self, params: Params, x: Array, *, state: State | None = None, training: bool = True) -> Any:
        """Apply the layer: `y, state = layer(params, x, state=state, training=True)`.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `x`: this worker's block on P_x, which may be empty; outside P_x a zero-volume array.
        - `state`: from `init_state`, or the previous call. Without it the layer returns y alone, from x's statistics.
        - `training`: whether to use x's statistics, and update the state with them; otherwise the state's are used.

        **Returns:** this worker's block of y, and the new state; outside P_x, `x` and `state`.

        **Raises:** `InvalidTypeError` if `training` is not True or False, or `state` is not a dictionary; `PlanError`,
        on every worker of P_x, if x, a parameter or the state does not fit, or there is one value per channel in
        training; `InvalidArgumentError` for evaluation without a state.
        """
        training = checked_boolean("training", training)
        if state is None and not training and self.track_running_stats:
            raise InvalidArgumentError(
                "`state` (=None) must be given if `training` is False: evaluation uses the running statistics. "
                "layer.init_state() makes one."
            )
        if not (state is None or isinstance(state, Mapping)):
            raise InvalidTypeError(
                f"`state` (={state!r}) must be a dictionary, from `init_state` or the previous call."
            )
        if self.P_x.rank is None:
            outside(self.P_x.world, x)
            return x if state is None else (x, state)
        with jax.named_scope(type(self).__name__):
            (plan, params), new = self._agreed(params, x, state), state
            world = self.P_x.world
            # Without running statistics evaluation uses the batch's own, as PyTorch's does.
            if training or not self.track_running_stats:
                self._check_values(plan)
                mean, variance = plan.moments.run(world, x)
                y = plan.normalized(world, params, x, mean, variance)
                if state is not None and self.track_running_stats:
                    new = self._updated(state, plan, mean, variance)
            else:
                assert state is not None
                stored = (self._as_sums(state[name], plan) for name in ("running_mean", "running_var"))
                y = plan.normalized(world, params, x, *stored)
            return y if state is None else (y, new)

    @layer_call
    def apply(self, params: Params, x: Array, **options: Any) -> Any:
        """Call the layer."""
        return self(params, x, **options)

    def _agreed(self, params: Params, x: Array, state: State | None) -> tuple[NormPlan, Params]:
        """Plan this call with the workers of P_x, which also check the state; return it and unboxed parameters."""
        params = self._opened(params)
        if state is None:
            return self._agree_on_plan(params, x), params
        entries = {f"{_STATE}{name}": value for name, value in state.items()}
        params_and_state = {**params, **entries} if isinstance(params, Mapping) else params
        x_shapes, shapes = self._agree_on_shapes(params_and_state, x)
        state_shapes = {
            worker: {name.removeprefix(_STATE): shape for name, shape in own.items() if name.startswith(_STATE)}
            for worker, own in shapes.items()
        }
        check_params(state_shapes, self.state_specs(), "state")
        return self._plan(*self._checked(x_shapes, shapes)), params

    def _check_values(self, plan: NormPlan) -> None:
        extent = plan.moments.grid.extent
        if int(np.prod([n for d, n in enumerate(extent) if d != 1])) == 1:
            raise PlanError(f"`x` (of shape {extent}) must have more than one value per channel in training.")

    def _as_sums(self, stored: Array, plan: NormPlan) -> Array:
        return stored.astype(plan.moments.dtype).reshape(1, -1, *(1,) * (self.P_x.dim - 2))

    def _updated(self, state: State, plan: NormPlan, mean: Array, variance: Array) -> State:
        """Return the state after this batch; it is not differentiated."""
        count = int(plan.moments.counts(self.P_x.world.rank).sum())
        tracked = state["num_batches_tracked"] + 1
        new = {"running_mean": mean, "running_var": variance * (count / max(count - 1, 1))}
        weight = 1 / tracked.astype(mean.dtype) if self.momentum is None else self.momentum
        for name, value in new.items():
            old = state[name].astype(mean.dtype)
            value = lax.stop_gradient(value).reshape(-1)
            new[name] = (old + weight * (value - old)).astype(state[name].dtype)
        return {**new, "num_batches_tracked": tracked}

"""A mixture of experts, distributed over workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.functional.block_checks import outside
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.input_checks import real_grid
from distdl_jax.nn.base.layer import PartitionedLayer
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes
from distdl_jax.nn.experts.mixture_plan import Dispatch, MixturePlan, Tokens, plan_mixture
from distdl_jax.nn.experts.routing import capacity_of
from distdl_jax.partitions.initialization import UniformFanIn, init_block
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.tensors import TensorSpec, zero_volume_tensor
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.transports.world import Workers
from distdl_jax.validation import (
    check_function,
    check_key,
    checked_axes,
    checked_boolean,
    checked_dtype,
    checked_integer,
    is_real,
)

State = dict[str, Array]


class Expert(Protocol):
    """One expert: a function of its parameters and of tokens; experts differ only in their parameters.

    It is immutable and hashable, like layers. It runs on its worker, under `jax.vmap`.
    """

    def init(self, key: Array, dtype: DTypeLike) -> dict[str, Array]:
        """Return the parameters of one expert, from its own random key."""

    def __call__(self, params: Any, tokens: Array) -> Array:
        """Return the output for tokens x features; some of the tokens are zeros, whose output is ignored."""


@dataclass(frozen=True)
class MLP:
    """y = down activation(up x + up_bias) + down_bias, with weights in PyTorch's layout and initialization."""

    features: int
    hidden: int
    activation: Callable[[Array], Array]

    def init(self, key: Array, dtype: DTypeLike) -> dict[str, Array]:
        """Return the parameters of one expert."""
        shapes = {"up": (self.hidden, self.features), "down": (self.features, self.hidden)}
        params = {}
        for (name, shape), own_key in zip(shapes.items(), jax.random.split(key), strict=True):
            uniform, keys = UniformFanIn(shape[1]), jax.random.split(own_key)
            params[f"{name}_weight"] = uniform(keys[0], shape, dtype)
            params[f"{name}_bias"] = uniform(keys[1], shape[:1], dtype)
        return params

    def __call__(self, params: Any, tokens: Array) -> Array:
        """Return the output, of the tokens' shape."""
        hidden = self.activation(tokens @ params["up_weight"].T + params["up_bias"])
        return jnp.asarray(hidden @ params["down_weight"].T + params["down_bias"])


@dataclass(frozen=True)
class DistributedMixtureOfExperts(PartitionedLayer):
    r"""Send each token to some of many experts, which are distributed over workers, and add up their outputs.

    With probabilities softmax(router token) and the k most probable experts of each token: y = sum over them of gate *
    expert(token). An expert accepts a limited number of tokens from a group, its *capacity*; for further ones it
    returns 0. So the layer should have a skip connection (`nn.Residual`).

    | tensor | global shape | partition |
    |---|---|---|
    | x, y | n_b x n_s x ... x n_e | P_x: P_n x P_s x ... x 1 |
    | `router` | n_x x n_e | the first worker of P_x; broadcast |
    | of the experts: `up_weight`, `up_bias` | n_x x n_h x n_e, n_x x n_h | the n_x experts over the workers of P_W |
    | ... `down_weight`, `down_bias` | n_x x n_e x n_h, n_x x n_e | the same |

    Tokens may be split in any way, and experts over any number of workers, divisible or not. y and all gradients are
    those on one worker, whatever the partitions, since tokens are dropped in a fixed order. An expert accepts the first
    choices of all tokens of the group, then the second ones, and so on; each in the row-major order of the whole
    tensor.

    *Groups.* The tokens of a group share the capacity: by default, the tokens of a sample. Each worker reserves for
    each expert as many slots as it may need: for each of its groups the capacity, or the number of tokens if that is
    less. So messages are smallest if each group is on one worker: k `capacity_factor` times its tokens. If the workers
    along the sequence cut the groups, reshape n_b x n_s x n_e to n_b x p x n_s/p x n_e, and use `group_axes=(0, 1)`.

    *Losses.* `layer(params, x)` returns y alone. With `y, state = layer(params, x, state=state)`, in training, the
    state holds the load-balancing losses on the first worker of P_x, and empty arrays on the others. So
    `jnp.sum(state["load_balancing_loss"])` is each worker's part of the loss. Add it to the loss with a small factor
    (0.01):

    - `load_balancing_loss`: n_x * sum over the experts of (share of assignments, before any is dropped) * (mean
      probability), over all tokens: 1 if balanced. Its gradient goes through the probabilities.
    - `router_z_loss`: the mean over all tokens of logsumexp(logits)^2.
    - `tokens_per_expert`: int32, n_x: the number of assignments to each expert. Those beyond the capacity of a group
      were dropped.

    Per call a worker sends its slots to the experts, n_x * slots * n_e, and a number for each slot; as much returns. If
    a group is cut over workers, they gather n_x * k numbers for each row of its tokens. With a state, 2 n_x + 1 numbers
    are summed to the first worker.

    **Arguments:**

    - `P_x`: the partition of input and output, of 2 dimensions or more, the last of them the features: 1.
    - `embed_dim`, `num_experts`: n_e and n_x.
    - `hidden_dim`: n_h. Default: 4 n_e.
    - `top_k`: k, the number of experts for a token, at most n_x.
    - `capacity_factor`: an expert accepts ceil(factor * k * tokens / n_x) assignments from a group, at least 1. None:
      all, with as many slots as tokens, so nothing is dropped.
    - `group_axes`: the dimensions of x along which each index is a separate group. Default: 0, the samples; none if x
      is tokens x features. () makes all tokens one group.
    - `normalize`: whether the gates of a token are normalised to sum to 1. Default: if k is above 1.
    - `activation`: of the experts' hidden layer.
    - `expert`: a custom expert, instead of `hidden_dim` and `activation`: a hashable object with `init(key, dtype)`,
      which returns a dictionary of the arrays of one expert, and `expert(params, tokens)`, from n x n_e to n x any
      number of features. It runs under `jax.vmap` over the experts of a worker. Rows without a token are 0.
    - `P_W`: the workers with experts, a partition of one dimension, of any workers. Default: all of P_x.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; when applied,
    `PlanError`.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> layer = DistributedMixtureOfExperts(P, embed_dim=8, num_experts=4)
    >>> params = layer.init(jax.random.key(0))
    >>> y, state = layer(params, jax.numpy.ones((2, 5, 8)), state=layer.init_state())
    >>> y.shape, state["tokens_per_expert"].sum().item()
    ((2, 5, 8), 20)

    Source: Shazeer et al. (2017), arXiv:1701.06538; Lepikhin et al. (2020), arXiv:2006.16668 (GShard: groups, capacity
    and order); Fedus et al. (2021), arXiv:2101.03961 (load-balancing loss); Zoph et al. (2022), arXiv:2202.08906
    (z-loss).
    """

    P_x: Partition
    embed_dim: int
    num_experts: int
    hidden_dim: int | None = None
    top_k: int = 2
    capacity_factor: float | None = 1.25
    group_axes: int | Sequence[int] | None = None
    normalize: bool | None = None
    activation: Callable[[Array], Array] = jax.nn.gelu
    expert: Expert | None = None
    P_W: Partition | None = None

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x, **({} if self.P_W is None else {"P_W": self.P_W}))
        if self.P_x.dim < 2 or self.P_x.shape[-1] > 1:
            raise InvalidArgumentError(
                f"`P_x` ({shape_text(self.P_x.shape)}) must have 2 dimensions or more, and one worker along the last, "
                "the features: tokens can't be split."
            )
        if self.P_W is not None and (self.P_W.dim != 1 or self.P_W.size == 0):
            raise InvalidArgumentError(
                f"`P_W` ({shape_text(self.P_W.shape)}) must have one dimension, along the experts."
            )
        for name in ("embed_dim", "num_experts", "top_k"):
            checked_integer(name, getattr(self, name), 1)
        if self.hidden_dim is not None:
            checked_integer("hidden_dim", self.hidden_dim, 1)
        if self.top_k > self.num_experts:
            raise InvalidArgumentError(f"`top_k` (={self.top_k}) must be at most `num_experts` (={self.num_experts}).")
        factor = self.capacity_factor
        if factor is not None and not (is_real(factor) and 0 < factor < float("inf")):
            raise InvalidArgumentError(
                f"`capacity_factor` (={factor!r}) must be a number above 0, or None for no limit."
            )
        given = self.group_axes
        axes = checked_axes("group_axes", (0,) * (self.P_x.dim > 2) if given is None else given, self.P_x.shape)
        if self.P_x.dim - 1 in axes:
            raise InvalidArgumentError(
                f"`group_axes` (={given}) must be dimensions of tokens, 0 to {self.P_x.dim - 2}, not the features."
            )
        normalize = self.top_k > 1 if self.normalize is None else checked_boolean("normalize", self.normalize)
        self._store(group_axes=axes, normalize=normalize)
        check_function("activation", self.activation)
        self._check_expert()

    def _check_expert(self) -> None:
        if self.expert is None:
            return
        if not (callable(self.expert) and callable(getattr(self.expert, "init", None))):
            raise InvalidTypeError(
                f"`expert` (={self.expert!r}) must have `init(key, dtype)` and `expert(params, tokens)`."
            )
        if self.hidden_dim is not None:
            raise InvalidArgumentError(
                f"`hidden_dim` (={self.hidden_dim}) belongs to the default expert; omit it if `expert` is given."
            )
        made = self._expert_shapes
        if not isinstance(made, Mapping) or "router" in made or not all(hasattr(x, "shape") for x in made.values()):
            raise InvalidArgumentError(
                f"`expert.init` must return a dictionary of arrays, none of them named 'router', but returns {made}."
            )

    @cached_property
    def _expert(self) -> Expert:
        return self.expert or MLP(self.embed_dim, self.hidden_dim or 4 * self.embed_dim, self.activation)

    @cached_property
    def _expert_shapes(self) -> Any:
        """The parameters of one expert, as shapes and dtypes."""
        return jax.eval_shape(lambda: self._expert.init(jax.random.key(0), jnp.float32))

    @cached_property
    def _owners(self) -> Partition:
        """The workers with experts, in one dimension."""
        return self.P_W or self.P_x.create_cartesian_topology_partition([self.P_x.size])

    @cached_property
    def _team(self) -> Workers:
        return tuple(sorted({*self.P_x.ranks, *self._owners.ranks}))

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each parameter: a pytree like the parameters."""
        n, grid = self.num_experts, self._owners.create_cartesian_topology_partition
        router = TensorSpec((n, self.embed_dim), self.P_x.grid([1, 1], [0]))
        return {"router": router} | {
            name: TensorSpec((n, *one.shape), grid([self._owners.size, *(1,) * len(one.shape)]))
            for name, one in self._expert_shapes.items()
        }

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """Return this worker's initial parameters: a linear layer's for the router, and experts with separate keys."""
        check_key("key", key)
        dtype, specs = checked_dtype("dtype", dtype), self.param_specs()
        router_key, experts_key = jax.random.split(key)
        params = {"router": init_block(UniformFanIn(self.embed_dim), router_key, specs["router"], dtype)}
        box = next(spec.box for name, spec in specs.items() if name != "router")
        if box is None or box[0][0] == box[0][1]:
            return params | {
                name: zero_volume_tensor(dtype=dtype) if box is None else jnp.zeros(spec.local_shape, dtype)
                for name, spec in specs.items()
                if name != "router"
            }
        keys = jax.random.split(experts_key, self.num_experts)[slice(*box[0])]
        return params | jax.vmap(lambda key: self._expert.init(key, dtype))(keys)

    def state_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each part of the state: a pytree like it."""
        first = self.P_x.grid([1], [0])
        losses = dict.fromkeys(("load_balancing_loss", "router_z_loss"), TensorSpec((), first))
        return losses | {"tokens_per_expert": TensorSpec((self.num_experts,), first)}

    def init_state(self, dtype: DTypeLike = jnp.float32) -> State:
        """Return this worker's part of a zero state, with losses of `dtype`."""
        dtype = checked_dtype("dtype", dtype)
        return {
            name: jnp.zeros(spec.local_shape, jnp.int32 if name == "tokens_per_expert" else dtype)
            for name, spec in self.state_specs().items()
        }

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> MixturePlan:
        assert isinstance(self.group_axes, tuple) and self.normalize is not None
        grid, _ = real_grid("x", x, self.P_x, {self.P_x.dim - 1: self.embed_dim})
        tokens = Tokens(grid, self.group_axes)
        capacity = capacity_of(tokens.whole[1], self.num_experts, self.top_k, self.capacity_factor)
        dispatch = Dispatch(tokens, self.num_experts, self.top_k, capacity)
        return plan_mixture(dispatch, self._expert, self.normalize, x, params, self.P_x, self._owners)

    @overload
    def __call__(self, params: Params, x: Array) -> Array: ...
    @overload
    def __call__(self, params: Params, x: Array, *, state: State, training: bool = True) -> tuple[Array, State]: ...
    @layer_call
    def __call__(self, params: Params, x: Array, *, state: State | None = None, training: bool = True) -> Any:
        """Apply the layer: `y = layer(params, x)`, or `y, state = layer(params, x, state=state)`.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `x`: this worker's block on P_x, which may be empty; outside P_x a zero-volume array.
        - `state`: from `init_state`, or the previous call; its values are ignored.
        - `training`: whether the losses are computed; otherwise the state is unchanged, and its movements don't run.

        **Returns:** this worker's block of y on P_x, elsewhere in P_W a zero-volume array, outside both `x`; with a
        state, the pair of that and the new state.

        **Raises:** `InvalidTypeError` if `training` is not True or False, or `state` is not a dictionary; `PlanError`,
        on every worker of the layer, if x or a parameter does not fit.
        """
        training = checked_boolean("training", training)
        if not (state is None or (isinstance(state, Mapping) and state.keys() == self.state_specs().keys())):
            raise InvalidTypeError(
                f"`state` (={state!r}) must be a dictionary of {sorted(self.state_specs())}, from `init_state` or the "
                "previous call."
            )
        world = self.P_x.world
        if world.rank not in self._team:
            outside(world, x)
            return x if state is None else (x, state)
        with jax.named_scope("DistributedMixtureOfExperts"):
            params = self._opened(params)
            plan = self._agree_on_plan(params, x)
            y, choices = plan.run(world, params, x)
            if state is None:
                return y
            if training and choices is not None:
                state = plan.losses(world, choices, np.dtype(state["load_balancing_loss"].dtype))
            return y, state

    apply = __call__

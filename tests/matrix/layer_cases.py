"""Entries of the matrix that are layers of fixed parameters: the layer, and the same of the whole tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from blocks import block_of
from convolution import direct

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.fourier.fft import plan_fourier
from distdl_jax.functional.plan import Plan
from distdl_jax.plans.shape_dtype import ShapeDtype
from matrix import reference
from matrix.case import Case, Operator, painted
from matrix.movement_cases import listed, movement
from matrix.partitions import On, Shape, blocks


def linear(
    P_x: On,
    P_y: On,
    P_W: On,
    n_in: int,
    n_out: int,
    batch: int = 2,
    world: int = 4,
    of_params: bool = False,
    sharded: bool = False,
) -> Case:
    """The layer as a function of x with fixed parameters, or of the parameters with fixed x."""
    slices = P_W.grid.reshape(-1, *P_W.shape[-2:])  # along the batch, of which the first has the parameters
    stored = (slices if sharded else slices[:1]).swapaxes(0, 1).reshape(-1, P_W.shape[-1])
    weights = blocks(On(stored.shape, tuple(stored.flat)), n_out, n_in, world=world)
    biases = blocks(On(stored.shape[:1], tuple(stored[:, 0])), n_out, world=world)
    params = tuple({"weight": w, "bias": b} for w, b in zip(weights, biases, strict=True))
    xs = blocks(P_x, batch, n_in, world=world, elsewhere=(batch, 0))
    name = f"linear{'_of_parameters' * of_params} {P_x} -> {P_y}, weights{' sharded' * sharded} on {P_W}"
    fixed = painted(name, xs if of_params else params, np.float64)

    def layer(P: dj.Partition) -> nn.DistributedLinear:
        partitions = (each.partition(P) for each in (P_x, P_y, P_W))
        return nn.DistributedLinear(*partitions, n_in, n_out, sharded=sharded)

    def operator(P: dj.Partition) -> Operator:
        F, mine = layer(P), fixed[P.rank]
        if of_params:
            return lambda params: F(params, mine.astype(params["weight"].dtype))
        return lambda x: F(jax.tree.map(lambda p: p.astype(x.dtype), mine), x)

    def plan(P: dj.Partition, params: dict[int, Any]) -> Plan:
        if not of_params:
            return layer(P).plan(params)
        return layer(P).plan({worker: ShapeDtype(x, params[0]["weight"].dtype) for worker, x in enumerate(xs)}, params)

    def dense(arrays: list[Any]) -> list[Any]:
        both = (fixed, arrays) if of_params else (arrays, fixed)
        return reference.linear(*both, P_x.grid, P_y.grid, stored)

    return Case(name, world, params if of_params else xs, operator, dense, plan, any_dtype=False)


def conv(
    P_x: On, P_y: On | None, P_W: On | None, sizes: Shape, kernel: Shape, world: int = 4, batch: int = 1,
    of_params: bool = False, sharded: bool = False, **options: Any,
) -> Case:  # fmt: skip
    """The convolution of two channels with a fixed weight, without a bias, as a function of x of batch x 2 x `sizes`;
    or of the parameters with fixed x.

    `options` are stride and padding, an integer for each feature.
    """
    dims, of = len(kernel), f"conv{'_of_parameters' * of_params}"
    name = f"{of} {listed([sizes])} kernel {listed([kernel])} {options} {P_x} -> {P_y}, weights on {P_W}"
    (weight,) = painted(name, [(3, 2, *kernel)], np.float64)
    xs = blocks(P_x, batch, 2, *sizes, world=world, elsewhere=(batch, 0))
    fixed = painted(f"{name} x", xs, np.float64)

    def layer(P: dj.Partition) -> Any:
        on = (None if each is None else each.partition(P) for each in (P_x, P_y, P_W))
        layer_type = getattr(nn, f"DistributedConv{dims}d")
        channels = {"in_channels": 2, "out_channels": 3, "kernel_size": kernel, "bias": False}
        return layer_type(*on, sharded=sharded, **channels, **options)

    specs = [layer(dj.planning_world(world, worker)).param_specs()["weight"] for worker in range(world)]

    def operator(P: dj.Partition) -> Operator:
        F = layer(P)
        if of_params:
            return lambda params: F(params, fixed[P.rank].astype(params["weight"].dtype))
        mine = block_of(weight, F.param_specs()["weight"])
        return lambda x: F({"weight": mine.astype(x.dtype)}, x)

    def plan(P: dj.Partition, given: dict[int, Any]) -> Plan:
        if not of_params:
            return layer(P).plan(given)
        held = {worker: ShapeDtype(x, given[worker]["weight"].dtype) for worker, x in enumerate(xs)}
        return layer(P).plan(held, given)

    def dense(arrays: list[Any]) -> list[Any]:
        if not of_params:
            return reference.of_whole(arrays, P_x.grid, (P_y or P_x).grid, lambda x: whole(x, weight))
        of_blocks = np.zeros(weight.shape, arrays[0]["weight"].dtype)
        for spec, params in zip(specs, arrays, strict=True):
            if spec.box is not None:
                of_blocks[tuple(slice(*side) for side in spec.box)] = params["weight"]
        return reference.of_whole(list(fixed), P_x.grid, (P_y or P_x).grid, lambda x: whole(x, of_blocks))

    def whole(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        padded = direct.pad(x, [(p, p) for p in options.get("padding", (0,) * dims)])
        return direct.convolve(padded, weight, options.get("stride", (1,) * dims), (1,) * dims, 1)

    shapes = tuple({"weight": spec.local_shape} for spec in specs) if of_params else xs
    return Case(name, world, shapes, operator, dense, plan, any_dtype=False)


def average_pool(P_x: On, sizes: Shape, kernel: Shape, stride: Shape, padding: Shape, world: int = 4) -> Case:
    """The pooling of three channels; kernels of a power of two, so that nothing is rounded."""

    def whole(x: np.ndarray) -> np.ndarray:
        return direct.sum_pool(direct.pad(x, [(p, p) for p in padding]), kernel, stride) / prod(kernel)

    return movement(
        f"average_pool {listed([sizes])} {listed([kernel, stride, padding])} {P_x}",
        blocks(P_x, 2, 3, *sizes, world=world, elsewhere=(2, 0)),
        lambda P: getattr(nn, f"DistributedAvgPool{len(kernel)}d")(P_x.partition(P), kernel, stride, padding),
        lambda xs: reference.of_whole(xs, P_x.grid, P_x.grid, whole),
        any_dtype=False,
    )


def layer(
    name: str,
    P_x: On,
    sizes: Sequence[Any],
    build: Callable[[dj.Partition, dj.Partition], Any],
    whole: Callable[[Any, Any], Any],
    P_y: On | None = None,
    world: int = 4,
    linear: bool = True,
    scale: float = 1.0,
) -> Case:
    """`build` makes the layer from the partition of x and that of all workers; `whole` makes its output from the whole
    parameters and x.

    `scale`: of the parameters; a layer that is applied to its own output again and again has to stay gentle.
    """
    name = f"layer {name} {P_x}" + (f" -> {P_y}" if P_y else "")

    def made(world: dj.Partition) -> Any:
        return build(P_x.partition(world), world)

    def values(specs: Any) -> Any:
        """Whole parameters: small integers, times the scale."""
        leaves, structure = jax.tree.flatten(specs)
        numbers = painted(name, [spec.global_shape for spec in leaves], np.float64)
        return structure.unflatten([scale * number for number in numbers])

    def operator(P: dj.Partition) -> Operator:
        F = made(P)
        specs = F.param_specs()
        own = jax.tree.map(block_of, values(specs), specs)
        return lambda x: F(jax.tree.map(lambda leaf: jnp.asarray(leaf, x.dtype), own), x)

    def dense(xs: list[Any]) -> list[Any]:
        params = values(made(dj.planning_world(world)).param_specs())
        return reference.of_whole(xs, P_x.grid, (P_y or P_x).grid, lambda x: whole(params, x))

    return Case(
        name,
        world,
        blocks(P_x, *sizes, world=world, elsewhere=(sizes[0] if isinstance(sizes[0], int) else 0, 0)),
        operator,
        dense,
        lambda P, x: made(P).plan(x),
        any_dtype=False,
        any_complex=linear,
        linear=linear,
        exact=linear,
    )


def hartley(P_x: On, sizes: Sequence[Any], axes: tuple[int, ...], world: int = 4) -> Case:
    """Real and imaginary part of the frequencies, added: from real numbers to real numbers."""

    def operator(P: dj.Partition) -> Operator:
        def transform(x: Any) -> Any:
            y = dj.functional.fft(x, P_x.partition(P), axes)
            return y.real + y.imag

        return transform

    def whole(x: Any) -> Any:
        y = np.fft.fftn(x, axes=axes)
        return y.real + y.imag

    return Case(
        f"layer hartley {P_x} along {axes}",
        world,
        blocks(P_x, *sizes, world=world),
        operator,
        lambda xs: reference.of_whole(xs, P_x.grid, P_x.grid, whole),
        lambda P, x: RealPlan(plan_fourier("fft", x, P_x.partition(P), axes)),
        any_dtype=False,
        any_complex=False,
        exact=False,
        silent=all(P_x.shape[axis] == 1 for axis in axes),
    )


def function(
    name: str,
    P_x: On,
    sizes: Sequence[Any],
    apply: Callable[[Any, dj.Partition], Any],
    plan: Callable[[Any, dj.Partition], Plan],
    whole: Callable[[Any], Any],
    P_y: On | None = None,
    world: int = 4,
    exact: bool = True,
) -> Case:
    """A linear function of x and P_x with its plan, and the same of the whole tensor; the output is on `P_y`."""

    def dense(xs: list[Any]) -> list[Any]:
        results = reference.of_whole(xs, P_x.grid, (P_y or P_x).grid, whole)
        return [y if worker in P_x.ranks else xs[worker] for worker, y in enumerate(results)]

    return Case(
        f"layer {name} {P_x}",
        world,
        blocks(P_x, *sizes, world=world),
        lambda P: lambda x: apply(x, P_x.partition(P)),
        dense,
        lambda P, x: plan(x, P_x.partition(P)),
        any_dtype=exact,
        exact=exact,
    )


@dataclass(frozen=True)
class RealPlan(Plan):
    """The plan of real numbers made of complex ones."""

    of: Plan

    @property
    def workers(self) -> Any:
        return self.of.workers

    def output(self, worker: int) -> ShapeDtype:
        block = self.of.output(worker)
        return ShapeDtype(block.shape, np.zeros(0, block.dtype).real.dtype)


def low_frequencies(weight: Any, x: Any) -> Any:
    """x with each frequency from 0 on multiplied with a matrix, and no others, along the last dimension."""
    modes = weight.shape[2]
    spectrum = jnp.fft.rfft(x)[..., :modes]
    return jnp.fft.irfft(jnp.einsum("bik,iok->bok", spectrum, weight[..., 0] + 1j * weight[..., 1]), x.shape[-1])


def normalised(x: Any, axes: tuple[int, ...]) -> Any:
    return (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + 1e-5)


def spread(weight: Any, x: Any) -> np.ndarray:
    """The transposed convolution of stride 1 along the last dimension."""
    reach = weight.shape[2]
    y = np.zeros((len(x), weight.shape[1], x.shape[2] + reach - 1), np.result_type(x, weight))
    for k in range(reach):
        y[..., k : k + x.shape[2]] += np.einsum("bin,io->bon", x, weight[..., k])
    return y


def largest_of_three(x: Any) -> Any:
    """Of each entry along the last dimension and its neighbours; of equal ones the first, which gets the derivative."""
    wide = jnp.pad(x, [(0, 0), (0, 0), (1, 1)], constant_values=-jnp.inf)
    windows = jnp.stack([wide[..., :-2], wide[..., 1:-1], wide[..., 2:]], -1)
    return jnp.take_along_axis(windows, jnp.argmax(windows, -1, keepdims=True), -1)[..., 0]


def one_step(params: Any, x: Any) -> Any:
    """h of a GRU after a step from zeros, without biases."""
    r, z, n = (x @ params["weight_ih"][gate].T for gate in range(3))
    return (1 - jax.nn.sigmoid(z)) * jnp.tanh(n) + 0 * r


def conv_step(params: Any, x: Any) -> Any:
    """h of a convolutional LSTM after a step from zeros, with a kernel of 3."""
    wide, weight = jnp.pad(x, [(0, 0), (0, 0), (1, 1)]), params["weight"]
    i, _, g, o = jnp.split(
        sum(jnp.einsum("bin,oi->bon", wide[..., k : k + x.shape[2]], weight[:, : x.shape[1], k]) for k in range(3)),
        4,
        1,
    )
    return jax.nn.sigmoid(o) * jnp.tanh(jax.nn.sigmoid(i) * jnp.tanh(g))


def with_rows_of_length(params: Any, x: Any) -> Any:
    """A linear layer with weight normalisation."""
    v = params["weight_v"]
    return x @ (v * (params["weight_g"] / jnp.sqrt((v**2).sum(1)))[:, None]).T


def attention_of_two_heads(params: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("nse,hde->nhsd", x, params[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("nhsd,nhtd->nhst", q, k) / np.sqrt(2)
    return jnp.einsum("nhst,nhtd,ehd->nse", jax.nn.softmax(scores), v, params["out"])


def mixture_of_experts(
    params: Any,
    x: Any,
    k: int,
    factor: float | None,
    group_axes: Sequence[int] = (0,),
    normalize: bool = True,
    expert: Callable[[Any, Any], Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """y and losses of tokens that go to experts one after the other, each counted; every expert sees all tokens."""
    n = len(params["router"])
    order = [*group_axes, *(d for d in range(x.ndim - 1) if d not in group_axes)]
    by_group = x.transpose(*order, x.ndim - 1)
    sizes = by_group.shape[: len(group_axes)]
    tokens = by_group.reshape(int(np.prod(sizes)), -1, x.shape[-1])
    capacity = tokens.shape[1] if factor is None else max(1, int(np.ceil(factor * k * tokens.shape[1] / n)))
    logits = tokens @ params["router"].T
    probabilities = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    ranked = jnp.argsort(-probabilities, -1, stable=True)[..., :k]

    def assign(counts: Any, chosen: Any) -> tuple[Any, Any]:
        return counts.at[chosen].add(1), counts[chosen] < capacity

    def kept(ranked: Any) -> Any:
        counts, taken = jax.lax.scan(assign, jnp.zeros(n, int), ranked.T.ravel())
        return counts, taken.reshape(k, -1).T

    counts, taken = jax.vmap(kept)(ranked)
    gates = jnp.take_along_axis(probabilities, ranked, -1)
    if normalize:
        gates = gates / gates.sum(-1, keepdims=True)
    weights = ((gates * taken)[..., None] * jax.nn.one_hot(ranked, n)).sum(2)
    own = {name: value for name, value in params.items() if name != "router"}
    outputs = jax.vmap(lambda one: (expert or two_layers)(one, tokens), out_axes=2)(own)
    y = jnp.einsum("gtn,gtne->gte", weights, outputs).reshape(*by_group.shape[:-1], -1)
    shares, mean = counts.sum(0) / counts.sum(), probabilities.mean((0, 1))
    losses = {
        "load_balancing_loss": n * (shares * mean).sum(),
        "router_z_loss": (jnp.log(jnp.exp(logits).sum(-1)) ** 2).mean(),
        "tokens_per_expert": counts.sum(0),
    }
    return y.transpose(*np.argsort(order).tolist(), x.ndim - 1), losses


def two_layers(one: Any, tokens: Any) -> Any:
    hidden = jnp.tanh(tokens @ one["up_weight"].T + one["up_bias"])
    return hidden @ one["down_weight"].T + one["down_bias"]

"""Layers of x with fixed parameters, each in a line: the layer, and the same of the whole tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from blocks import block_of

import distdl_jax as dj
from distdl_jax.functional.fourier.fft import plan_fourier
from distdl_jax.functional.plan import Plan
from distdl_jax.plans.shape_dtype import ShapeDtype
from matrix import reference
from matrix.case import Case, Operator
from matrix.painting import painted
from matrix.partitions import On, blocks


def layer(
    name: str,
    P_x: On,
    sizes: Sequence[Any],
    build: Callable[[dj.Partition, dj.Partition], Any],
    whole: Callable[[Any, Any], Any],
    P_y: On | None = None,
    world: int = 4,
    linear: bool = True,
    silent: bool = False,
    scale: float = 1.0,
) -> Case:
    """`build` makes the layer from the partition of x and that of all workers; `whole` makes its output from the whole
    parameters and x.

    `scale`: of the parameters; a layer that is applied to its own output again and again has to stay gentle.
    """
    xs = blocks(P_x, *sizes, world=world, elsewhere=(sizes[0] if isinstance(sizes[0], int) else 0, 0))
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

    def dense(arrays: list[Any]) -> list[Any]:
        params = values(made(dj.planning_world(world)).param_specs())
        if linear:
            return reference.windowed(arrays, P_x.grid, (P_y or P_x).grid, lambda x: whole(params, x))
        results = cut(whole(params, assembled(arrays, P_x.grid)), (P_y or P_x).grid)
        return [results.get(worker, jnp.zeros((len(x), 0))) for worker, x in enumerate(arrays)]

    return Case(
        name,
        world,
        xs,
        operator,
        dense,
        lambda P, x: made(P).plan(x),
        any_dtype=False,
        any_complex=linear,
        linear=linear,
        exact=linear,
        silent=silent,
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
        lambda xs: reference.windowed(xs, P_x.grid, P_x.grid, whole),
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
        results = reference.windowed(xs, P_x.grid, (P_y or P_x).grid, whole)
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


def assembled(arrays: Sequence[Any], grid: np.ndarray) -> Any:
    """As in `reference`, of arrays that JAX traces."""
    if grid.ndim == 0:
        return arrays[int(grid)]
    return jnp.concatenate([assembled(arrays, part) for part in grid], axis=-grid.ndim)


def cut(whole: Any, grid: np.ndarray) -> dict[int, Any]:
    """As in `reference`, of arrays that JAX traces."""
    if grid.ndim == 0:
        return {int(grid): whole}
    parts = zip(grid, jnp.array_split(whole, len(grid), axis=-grid.ndim), strict=True)
    return {worker: block for part, whole in parts for worker, block in cut(whole, part).items()}


def normalised(x: Any, axes: tuple[int, ...]) -> Any:
    return (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + 1e-5)


def enlarged(x: Any) -> Any:
    """Twice as long, and twice as wide."""
    return x.repeat(2, 2).repeat(2, 3)


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


def past_a_linear_layer(params: Any, x: Any) -> Any:
    return x + x @ params["body"]["weight"].T


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

"""Networks that know nothing of workers, written in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from distribute.beside_one_process import Network, network
from jax import lax


def weights(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Return drawn arrays of these shapes, of variance 1 / n for n inputs."""
    rng = np.random.default_rng(len(shapes))
    return [jnp.asarray(rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]) or 1)) for shape in shapes]


def normalised(x: Any, axis: int = -1) -> Any:
    """Return x with mean 0 and variance 1 along an axis."""
    return (x - x.mean(axis, keepdims=True)) * lax.rsqrt(x.var(axis, keepdims=True) + 1e-3)


def attended(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Return attention over ... x tokens x heads x features."""
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / np.sqrt(q.shape[-1])
    scores = scores if mask is None else jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)


@network
def convnext() -> Network:
    def f(p: Any, x: Any) -> Any:
        stem, depthwise, wide, narrow, scale = p
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, stem, (2, 2), "VALID", dimension_numbers=numbers)
        y = lax.conv_general_dilated(x, depthwise, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4)
        y = jax.nn.gelu(normalised(y) @ wide)
        norm = jnp.sqrt(jnp.sum(y**2, (1, 2), keepdims=True) + 1e-6)  # global response normalisation
        return x + scale * ((y * norm / (norm.mean(-1, keepdims=True) + 1e-3)) @ narrow)

    return Network(
        f, weights((2, 2, 3, 4), (7, 7, 1, 4), (4, 16), (16, 4), (4,)), (2, 22, 14, 3), ((1, 3, 1, 1), (1, 2, 2, 1))
    )


@network
def swin() -> Network:
    """Attention in shifted windows of 4 x 4, with a relative position table and a mask of the seams."""
    n, w, heads = 12, 4, 2
    place = np.stack(np.meshgrid(range(w), range(w), indexing="ij"), -1).reshape(-1, 2)
    relative = place[:, None] - place[None] + w - 1
    seam = np.zeros((n, n))
    for k, (a, b) in enumerate([(0, n - w), (n - w, n - 2), (n - 2, n)]):
        seam[a:b] += 3 * k
        seam[:, a:b] += k

    def windows(x: Any) -> Any:
        x = x.reshape(*x.shape[:-3], n // w, w, n // w, w, x.shape[-1])
        return jnp.swapaxes(x, -4, -3).reshape(*x.shape[:-5], -1, w * w, x.shape[-1])

    of_window = windows(jnp.asarray(seam)[..., None])[..., 0]
    same = of_window[:, None, :, None] == of_window[:, None, None, :]

    def f(p: Any, x: Any) -> Any:
        qkv, out, table = p
        x = jnp.roll(x, (-2, -2), (1, 2))
        q, k, v = jnp.moveaxis((windows(x) @ qkv).reshape(x.shape[0], -1, w * w, 3, heads, 3), 3, 0)
        bias = table[relative[..., 0], relative[..., 1]]
        scores = jnp.einsum("bnqhd,bnkhd->bnhqk", q, k) + jnp.moveaxis(bias, -1, 0)
        y = jnp.einsum("bnhqk,bnkhd->bnqhd", jax.nn.softmax(jnp.where(same, scores, -1e9)), v)
        y = y.reshape(x.shape[0], n // w, n // w, w, w, 6)
        y = jnp.swapaxes(y, 2, 3).reshape(x.shape) @ out
        return jnp.roll(x + y, (2, 2), (1, 2))

    return Network(f, weights((6, 18), (6, 6), (7, 7, heads)), (2, n, n, 6), ((1, 2, 1, 1), (1, 2, 2, 1), (1, 1, 3, 1)))


@network
def mixer() -> Network:
    def f(p: Any, x: Any) -> Any:
        embed, first, second, third, fourth = p
        b, h, w, c = x.shape
        x = x.reshape(b, h // 4, 4, w // 4, 4, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, 16 * c) @ embed
        x = x + (jax.nn.gelu(normalised(x).swapaxes(1, 2) @ first) @ second).swapaxes(1, 2)
        return (x + jax.nn.gelu(normalised(x) @ third) @ fourth).mean(1)

    return Network(
        f, weights((32, 5), (9, 7), (7, 9), (5, 6), (6, 5)), (3, 12, 12, 2), ((1, 2, 1, 1), (3, 1, 1, 1), (1, 2, 2, 1))
    )


@network
def messages_on_a_graph() -> Network:
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, 17, (2, 60))

    def f(p: Any, x: Any) -> Any:
        for message, update in zip(p[::2], p[1::2], strict=True):
            edges = jax.nn.silu(jnp.concatenate([x[senders], x[receivers]], -1) @ message)
            score = jax.ops.segment_max(edges[:, 0], receivers, 17)
            alpha = jnp.exp(edges[:, 0] - jnp.where(jnp.isfinite(score), score, 0)[receivers])
            total = jax.ops.segment_sum(alpha, receivers, 17)
            pooled = jax.ops.segment_sum(alpha[:, None] * edges, receivers, 17) / (total[:, None] + 1e-3)
            x = x + jnp.tanh(pooled @ update)
        return x

    return Network(f, weights((6, 5), (5, 3), (6, 4), (4, 3)), (17, 3), ((3, 1), (2, 1), (1, 2)))


@network
def selective_scan() -> Network:
    """A recurrence with gates that depend on the tokens, as an associative scan over time."""

    def combined(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    def f(p: Any, x: Any) -> Any:
        step, inward, outward, decay, taps = p
        padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        x = jax.nn.silu(sum(padded[:, k : k + x.shape[1]] * taps[k] for k in range(4)))
        delta = jax.nn.softplus(x @ step)
        a = jnp.exp(-delta[..., None] * jnp.exp(decay))
        b = (delta * x)[..., None] * (x @ inward)[:, :, None]
        h = lax.associative_scan(combined, (a, b), axis=1)[1]
        return jnp.einsum("blcn,bln->blc", h, x @ outward) + x

    return Network(
        f, weights((4, 4), (4, 3), (4, 3), (4, 3), (4, 4)), (2, 13, 4), ((1, 3, 1), (2, 1, 1), (1, 2, 2), (1, 4, 1))
    )


@network
def deeponet() -> Network:
    def f(p: Any, x: Any) -> Any:
        branch, trunk, second, bias = p
        at = jnp.linspace(0, 1, x.shape[1])
        of_function = jnp.tanh(x @ branch)
        of_place = jnp.tanh(jnp.sin(at[:, None] * jnp.arange(1.0, 5)) @ trunk) @ second
        y = of_function @ of_place.T + bias
        return y - jnp.gradient(y, axis=1) + jnp.interp(jnp.linspace(0.1, 0.9, 7), at, jnp.cumsum(at**2)).sum()

    return Network(f, weights((11, 6), (4, 6), (6, 6), (1,)), (6, 11), ((4, 1), (1, 3), (2, 2)))


@network
def decoder() -> Network:
    """Causal attention with rotary positions over a cache of keys, tied embeddings, and a loss over numbers."""
    vocabulary, heads, size = 11, 2, 4

    def rotary(x: Any) -> Any:
        angles = jnp.arange(x.shape[1])[:, None] * 10.0 ** -jnp.arange(size // 2)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def f(p: Any, x: Any) -> Any:
        table, qkv, out, up, gate, down = p
        tokens = jnp.clip(jnp.floor(4 * x), -5, 5).astype(int) % vocabulary
        h = table[tokens]
        b, length, _ = h.shape
        q, k, v = jnp.split((normalised(h) @ qkv).reshape(b, length, 3 * heads, size), 3, 2)
        cache = jnp.zeros((b, length + 3, heads, size))
        k, v = (lax.dynamic_update_slice(cache, y, (0, 0, 0, 0)) for y in (rotary(k), v))
        mask = jnp.arange(length)[:, None] >= jnp.arange(length + 3)
        h = h + attended(rotary(q), k, v, mask).reshape(b, length, -1) @ out
        h = h + (jax.nn.silu(normalised(h) @ gate) * (normalised(h) @ up)) @ down
        logits = jax.nn.log_softmax(h @ table.T)
        return jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]

    shapes = (vocabulary, 6), (6, 24), (8, 6), (6, 10), (6, 10), (10, 6)
    return Network(f, weights(*shapes), (3, 10), ((1, 3), (2, 1), (1, 4)))


@network
def neural_ode() -> Network:
    import diffrax

    def field(t: Any, y: Any, p: Any) -> Any:
        return jnp.tanh(jnp.roll(y, 1, 0) @ p[0] + t) @ p[1] - y

    def f(p: Any, x: Any) -> Any:
        solver, terms = diffrax.Tsit5(), diffrax.ODETerm(field)
        steps = diffrax.PIDController(rtol=1e-4, atol=1e-6)
        return diffrax.diffeqsolve(terms, solver, 0.0, 1.0, 0.1, x, p, stepsize_controller=steps, max_steps=64).ys

    return Network(f, weights((3, 4), (4, 3)), (7, 3), ((3, 1), (2, 1)))

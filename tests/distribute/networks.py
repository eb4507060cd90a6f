"""Networks that know nothing of workers, written here and by others, on blocks, beside one process.

`python -m distribute.networks [NAMES]` runs all whose packages are installed: the loss, its gradients with the
derivative inside and outside, and three steps of Adam.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import distdl_jax as dj
from distdl_jax import TensorSpec


class Network(NamedTuple):
    """A function of parameters and an array, with drawn parameters, the array's shape, and the grids that cut it."""

    f: Callable[[Any, Any], Any]
    params: Any
    shape: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]


NETWORKS: dict[str, Callable[[], Network]] = {}


def network(build: Callable[[], Network]) -> Callable[[], Network]:
    """Register a network."""
    NETWORKS[build.__name__] = build
    return build


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


# --- networks of our own ----------------------------------------------------------------------------------------------


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


# --- networks of others -----------------------------------------------------------------------------------------------


def moved(tree: Any) -> Any:
    """Return parameters in float64, moved off zeros and ones."""

    def one(p: Any) -> Any:
        return p.astype(jnp.float64) + 0.05 * jnp.cos(jnp.arange(p.size)).reshape(p.shape)

    return jax.tree.map(one, tree)


def of_equinox(model: Any, shape: tuple[int, ...], *grids: tuple[int, ...], **options: Any) -> Network:
    """Return a network of a module of Equinox; its arrays of floating point are the parameters."""
    import equinox as eqx

    params, rest = eqx.partition(model, eqx.is_inexact_array)
    return Network(lambda p, x: eqx.combine(p, rest)(x, **options), moved(params), shape, grids)


def of_haiku(net: Callable[[Any], Any], shape: tuple[int, ...], *grids: tuple[int, ...]) -> Network:
    """Return a network of Haiku, with its state as it is at first."""
    import haiku as hk

    f = hk.without_apply_rng(hk.transform_with_state(net))
    params, state = f.init(jax.random.key(0), jnp.zeros(shape))
    return Network(lambda p, x: f.apply(p, state, x)[0], moved(params), shape, grids)


@network
def flax_unet_with_statistics() -> Network:
    """Three dimensions, batch statistics, dropout of a fixed key."""
    from flax import nnx

    options: dict[str, Any] = {"param_dtype": jnp.float64}

    class Block(nnx.Module):
        def __init__(self, a: int, b: int, rngs: nnx.Rngs) -> None:
            self.conv = nnx.Conv(a, b, (3, 3, 3), rngs=rngs, **options)
            self.norm = nnx.BatchNorm(b, rngs=rngs, **options)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dropout(nnx.gelu(self.norm(self.conv(x))))

    class UNet(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.fine, self.coarse, self.joined = Block(1, 2, rngs), Block(2, 3, rngs), Block(4, 2, rngs)
            self.up = nnx.ConvTranspose(3, 2, (2, 2, 2), (2, 2, 2), rngs=rngs, **options)
            self.last = nnx.Conv(2, 1, (1, 1, 1), rngs=rngs, **options)

        def __call__(self, x: Any) -> Any:
            fine = self.fine(x)
            up = self.up(self.coarse(nnx.max_pool(fine, (2, 2, 2), (2, 2, 2))))
            return self.last(self.joined(jnp.concatenate([fine, up], -1)))

    graph, params, rest = nnx.split(UNet(nnx.Rngs(0, dropout=1)), nnx.Param, ...)
    return Network(
        lambda p, x: nnx.merge(graph, p, rest)(x), moved(params), (2, 10, 6, 4, 1), ((1, 3, 1, 1, 1), (2, 2, 1, 1, 1))
    )


@network
def haiku_resnet() -> Network:
    import haiku as hk

    return of_haiku(lambda x: hk.nets.ResNet18(10)(x, is_training=True), (2, 64, 64, 3), (1, 2, 1, 1))


@network
def haiku_mobilenet() -> Network:
    import haiku as hk

    return of_haiku(lambda x: hk.nets.MobileNetV1(num_classes=5)(x, is_training=True), (2, 64, 64, 3), (1, 2, 1, 1))


@network
def pdequinox_unet() -> Network:
    import pdequinox

    model = pdequinox.arch.ClassicUNet(
        3, 1, 1, hidden_channels=4, num_levels=2, boundary_mode="periodic", key=jax.random.key(0)
    )
    return of_equinox(model, (1, 20, 12, 8), (1, 3, 1, 1), (1, 2, 2, 1))


@network
def pdequinox_fno() -> Network:
    import pdequinox

    model = pdequinox.arch.ClassicFNO(3, 1, 1, hidden_channels=4, num_modes=3, num_blocks=2, key=jax.random.key(0))
    return of_equinox(model, (1, 20, 12, 8), (1, 3, 1, 1))


@network
def pdequinox_dilated() -> Network:
    import pdequinox

    model = pdequinox.arch.DilatedResNet(
        2, 1, 1, hidden_channels=4, num_blocks=1, boundary_mode="dirichlet", key=jax.random.key(0)
    )
    return of_equinox(model, (1, 20, 12), (1, 4, 1))


@network
def foundax_unet() -> Network:
    import foundax

    model = foundax.unet3d(1, 1, depth=2, wf=2, norm="layer", activation=jax.nn.celu, key=jax.random.key(0))
    return of_equinox(model, (16, 16, 16, 1), (3, 1, 1, 1), (2, 2, 1, 1))


@network
def foundax_mpp() -> Network:
    from foundax import mpp

    model = mpp._build(embed_dim=24, processor_blocks=1, n_states=2, num_heads=3, key=jax.random.key(0))
    return of_equinox(model, (1, 2, 64, 64, 2), (1, 1, 2, 1, 1))


@network
def norax_fno() -> Network:
    from norax import models

    return of_equinox(
        models.FNO(jax.random.key(0), 1, 1, n_modes=(4, 4, 4), width=8, depth=2), (1, 12, 10, 8), (1, 3, 1, 1)
    )


@network
def equimo_vit() -> Network:
    import equimo.vision.models as models

    key = jax.random.key(0)
    model = models.VisionTransformer(
        img_size=32, in_channels=3, dim=24, patch_size=4, num_heads=[2], depths=[2], num_classes=5, key=key
    )
    return of_equinox(model, (3, 32, 32), (1, 3, 1), (1, 2, 2), key=key, inference=False)


# --- beside one process -----------------------------------------------------------------------------------------------


def problem(net: Network, grid: tuple[int, ...], gather: int | None = 2**20, steps: int = 3) -> str | None:
    """Return how the network differs from that of one process; None if it doesn't."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=net.shape))

    def loss(p: Any, x: Any) -> Any:
        y = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(net.f(p, x))])
        return jnp.mean((y - jnp.cos(jnp.arange(y.size))) ** 2)

    optimizer = optax.adam(1e-2, eps=1e-3)

    def step(p: Any, state: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(p, x)
        updates, state = optimizer.update(gradient, state, p)
        return optax.apply_updates(p, updates), state, value

    of_both = jax.jit(jax.value_and_grad(loss, (0, 1)))(net.params, x)
    trained = [net.params, optimizer.init(net.params)]
    for _ in range(steps):
        *trained, last = jax.jit(step)(*trained, x)

    def program() -> str | None:
        spec = TensorSpec(net.shape, dj.Partition().grid(grid))
        block = spec.block(x)
        expected = of_both[0], (of_both[1][0], spec.block(of_both[1][1]))
        inside = dj.distribute(jax.value_and_grad(loss, (0, 1)), (None, spec), (None, (None, spec)), gather=gather)
        outside = dj.value_and_grad(dj.distribute(loss, (dj.VARIABLE, spec), dj.PARTS, gather=gather), (0, 1))
        found: list[Any] = [net.params, optimizer.init(net.params)]
        for way, f in (("inside", inside), ("outside", outside)):
            if text := _difference(jax.jit(f)(net.params, block), expected):
                return f"{way}: {text}"
        run = jax.jit(dj.distribute(step, (None, None, spec), gather=gather))
        for _ in range(steps):
            *found, value = run(*found, block)
        text = _difference([found, value], [trained, last]) if steps else None
        return text and f"after {steps} steps: {text}"

    return next((text for text in dj.simulate(int(np.prod(grid)), program) if text), None)


def _difference(found: Any, expected: Any) -> str | None:
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        error = np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0) if np.shape(a) == np.shape(b) else np.inf
        if not error <= 1e-10 * max(1, np.max(np.abs(b), initial=0)):
            return f"{jax.tree_util.keystr(path)}: {error:.1e}"
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warnings of others' packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> int:
    """Run the networks whose names are given, or all; return how many differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of networks; default: all")
    parser.add_argument("--steps", type=int, default=3, help="of Adam")
    parser.add_argument("--grids", type=int, help="so many grids of each; default: all")
    options = parser.parse_args()
    wrong = 0
    for name in options.names or NETWORKS:
        with jax.enable_x64(True), quiet():
            try:
                net = NETWORKS[name]()
            except ImportError as error:
                print(f"{name}: skipped: {error}", flush=True)
                continue
            for grid in net.grids[: options.grids]:
                try:
                    text = problem(net, grid, steps=options.steps)
                except Exception as error:
                    traceback.print_exc()
                    text = f"{type(error).__name__}: {str(error)[:500]}"
                wrong += text is not None
                print(f"{name} on {grid}: {text or 'equal'}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main() else 0)

"""A character transformer that learns Python's documentation by heart, beside the same network on one worker.

    mpirun -n 4 python -m distdl_jax examples/transformer.py                   # heads, features and vocabulary split
    mpirun -n 4 python -m distdl_jax examples/transformer.py --partition ring  # the sequence split, keys and values go
    mpirun -n 4 python -m distdl_jax examples/transformer.py --partition heads # the sequence split, exchanged for heads
    python examples/transformer.py --simulate 2

On p workers, with a batch of n texts of s characters, e features, and v different characters:

    --partition tensor                                               ring, heads
    embedding         vocabulary split, v/p x e                      a copy of the table, gathered; s/p characters
    norms, residuals  n x s/p x e                                    n x s/p x e
    attention         gathers s, has 1/p of the heads, scatters s    ring: all heads; heads: exchanges s for heads
    two linear        4e/p of the 4e features in between             copies of the weights, gathered
    output, tied      logits n x s x v/p, never gathered             logits n x s/p x v

Gathered weights are cut over all workers between steps: each keeps, and updates, 1/p of them.

At the end the network, with its heads split, goes on with a text, character by character, with a cache of keys and
values. A network that was trained with its sequence split is gathered and scattered for that.

Source: Vaswani et al. (2017); Korthikanti et al. (2022), arXiv:2205.05198 (tensor); Liu et al. (2023),
arXiv:2310.01889 (ring); Jacobs et al. (2023), arXiv:2309.14509 (heads).
"""

import argparse
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
import optax
from distdl_jax import nn

import launch
from training import DIFFERENCE, say
from transformer_text import Text, documentation

BASE = 10_000.0  # of the rotary positions

Params = dict[str, Any]


# --- The network ------------------------------------------------------------------------------------------------------


class Transformer:
    """The layers on all workers of `P_world`, for a vocabulary of so many characters."""

    def __init__(self, P_world: dj.Partition, vocabulary: int, options: Namespace, partition: str) -> None:
        p, e, grid = P_world.size, options.width, P_world.grid
        self.partition, self.vocabulary = partition, vocabulary
        self.stream = grid([1, p, 1])
        if partition == "tensor":
            P_one = P_world.grid([1, 1])
            column, split = grid([p, 1]), grid([1, 1, p])
            self.embed = nn.DistributedEmbedding(P_one, self.stream, column, vocabulary, e)
            self.up = nn.DistributedLinear(self.stream, split, column, e, 4 * e)
            self.down = nn.DistributedLinear(split, self.stream, grid([1, p]), 4 * e, e)
            self.output = nn.DistributedLinear(self.stream, split, column, e, vocabulary, bias=False)
            self.loss = nn.DistributedCrossEntropyLoss(self.stream, ignore_index=None)
        else:  # the sequence in front, split as a batch is
            rows = grid([p, 1, 1])
            self.embed = nn.DistributedEmbedding(grid([p, 1]), rows, rows, vocabulary, e, sharded=True)
            self.up = nn.DistributedLinear(rows, rows, rows, e, 4 * e, sharded=True)
            self.down = nn.DistributedLinear(rows, rows, rows, 4 * e, e, sharded=True)
            self.output = nn.DistributedLinear(rows, rows, rows, e, vocabulary, bias=False, sharded=True)
            self.loss = nn.DistributedCrossEntropyLoss(rows, ignore_index=None)
        self.norm = nn.DistributedRMSNorm(self.stream, e)
        self.attention = nn.DistributedMultiHeadAttention(
            self.stream,
            e,
            options.heads,
            causal=True,
            rotary=BASE,
            bias=False,
            fused=True,
            exchange="gather" if partition == "tensor" else partition,
        )
        self.layers = {"norm_1": self.norm, "attention": self.attention, "norm_2": self.norm}
        self.layers |= {"up": self.up, "down": self.down}
        self.blocks = options.layers

    def init(self, key: jax.Array, dtype: str) -> Params:
        """Return this worker's blocks of the initial parameters, the same global ones however the network is split."""
        first, *keys = jax.random.split(key, self.blocks + 1)
        small = jax.nn.initializers.normal(0.02)

        def block(key: jax.Array) -> Params:
            pairs = zip(self.layers.items(), jax.random.split(key, len(self.layers)), strict=True)
            return {name: layer.init(key, dtype) for (name, layer), key in pairs}

        return {
            "embed": self.embed.init(first, dtype, weight_init=small),
            "blocks": [block(key) for key in keys],
            "norm": self.norm.init(first, dtype),
        }

    def param_specs(self) -> Params:
        """Return the global shape and the partition of each parameter."""
        block = {name: layer.param_specs() for name, layer in self.layers.items()}
        return {
            "embed": self.embed.param_specs(),
            "blocks": [block] * self.blocks,
            "norm": self.norm.param_specs(),
        }

    def local_blocks(self, characters: np.ndarray) -> np.ndarray:
        """Return this worker's block of n x s characters."""
        if self.partition != "tensor":
            return np.array_split(characters, self.stream.size, axis=1)[self.stream.rank]
        return characters if self.embed.P_x.active else characters[:, :0]

    def __call__(self, params: Params, characters: Any, caches: list[Any] | None = None) -> tuple[Any, list[Any]]:
        """Return this worker's logits, n x s x v/p or n x s/p x v, and the caches after these characters."""
        x = self._by_rows(self.embed, params["embed"], characters)
        after = []
        for i, its in enumerate(params["blocks"]):
            with jax.named_scope(f"block_{i}"):  # rows of their own in dj.profile
                y = self.norm(its["norm_1"], x)
                if caches is None:
                    y = self.attention(its["attention"], y)
                else:
                    y, cache = self.attention(its["attention"], y, cache=caches[i])
                    after.append(cache)
                x = x + y
                y = jax.nn.gelu(self._by_rows(self.up, its["up"], self.norm(its["norm_2"], x)))
                x = x + self._by_rows(self.down, its["down"], y)
        with jax.named_scope("output"):
            return self._by_rows(self.output, params["embed"], self.norm(params["norm"], x)), after

    def _by_rows(self, layer: Callable, params: Params, x: Any) -> Any:
        """Apply a layer that takes the sequence in front, where that is split."""
        if self.partition == "tensor":
            return layer(params, x)
        return jnp.swapaxes(layer(params, jnp.swapaxes(x, 0, 1)), 0, 1)

    def part_of_loss(self, params: Params, texts: tuple[Any, Any]) -> jax.Array:
        """Compute this worker's part of the mean cross entropy of the next characters."""
        characters, following = texts
        logits, _ = self(params, characters)
        if self.partition == "tensor":
            return self.loss(jnp.moveaxis(logits, 2, 1), following)
        return self.loss(jnp.transpose(logits, (1, 2, 0)), following.T)

    def batch(self, text: np.ndarray) -> tuple[Any, Any]:
        """Return this worker's blocks of n x (s + 1) characters: inputs, and the characters that follow them."""
        following = text[:, 1:]
        return self.local_blocks(text[:, :-1]), following if self.partition == "tensor" else self.local_blocks(
            following
        )


def norm(params: Params, x: jax.Array) -> jax.Array:
    """Normalise by the root mean square."""
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * params["weight"]


def turned(x: jax.Array) -> jax.Array:
    """Turn pairs of features by angles that grow with the position."""
    low, high = jnp.split(x, 2, -1)
    angles = np.arange(x.shape[1])[:, None, None] * BASE ** (-2 * np.arange(low.shape[-1]) / x.shape[-1])
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def attention(params: Params, x: jax.Array) -> jax.Array:
    """Attend to all characters before, and to the character itself."""
    q, k, v = jnp.einsum("nse,hide->inshd", x, params["qkv"])
    scores = jnp.einsum("nshd,nthd->nhst", turned(q), turned(k)) / np.sqrt(q.shape[-1]).astype(x.dtype)
    scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("nhst,nthd,ehd->nse", jax.nn.softmax(scores), v, params["out"])


def plain(params: Params, characters: Any) -> jax.Array:
    """Compute the logits of the same network, n x s x v, in plain JAX."""

    def linear(params: Params, x: jax.Array) -> jax.Array:
        return x @ params["weight"].T + params["bias"]

    x = params["embed"]["weight"][characters]
    for its in params["blocks"]:
        x = x + attention(its["attention"], norm(its["norm_1"], x))
        x = x + linear(its["down"], jax.nn.gelu(linear(its["up"], norm(its["norm_2"], x))))
    return norm(params["norm"], x) @ params["embed"]["weight"].T


def plain_loss(params: Params, texts: tuple[Any, Any]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(plain(params, texts[0]), texts[1]).mean()


# --- Training and generating ------------------------------------------------------------------------------------------


def train(
    jit: Callable, value_and_grad: Callable, params: Params, batch: Callable, text: Text, options: Namespace
) -> tuple[Params, list[float], float]:
    """Return the trained parameters, the loss of each step, and seconds for a step, without the first one."""
    optimiser = optax.adam(options.learning_rate)

    @jit
    def step(params: Params, state: Any, texts: Any) -> tuple[Params, Any, jax.Array]:
        value, gradient = value_and_grad(params, texts)
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimiser.init(params), []
    start = time.perf_counter()
    for i in range(options.steps):
        params, state, value = step(params, state, batch(text.batch(i, options.batch_size, options.length)))
        losses.append(float(value))
        if i == 0:
            start = time.perf_counter()
        if (i + 1) % max(options.steps // 10, 1) == 0:
            say(f"  step {i + 1:5}  loss {losses[-1]:.4f}  ({np.exp(losses[-1]):.1f} characters to choose from)")
    return params, losses, (time.perf_counter() - start) / max(options.steps - 1, 1)


def generate(network: Transformer, params: Params, prompt: np.ndarray, noise: np.ndarray, dtype: str) -> np.ndarray:
    """Generate the characters after the prompt, 1 x s, one for each row of `noise`, which is added to its logits."""
    p, length = network.stream.size, prompt.shape[1] + len(noise)
    P_logits = network.stream.grid([1, p])
    caches = [network.attention.init_cache(1, length, dtype) for _ in range(network.blocks)]

    def chosen(params: Params, characters: Any, caches: list[Any], noise: Any) -> tuple[jax.Array, list[Any]]:
        logits, caches = network(params, characters, caches)
        return dj.functional.argmax(logits[:, -1] + noise, P_logits, axis=1), caches

    # Two programs: where the sequence is split, blocks of one character and of two may look alike to a worker.
    begin, go_on = dj.jit(chosen), dj.jit(lambda *args: chosen(*args))
    character, characters = prompt, []
    for i, its in enumerate(noise):
        mine = np.array_split(its[None], p, axis=1)[network.stream.rank]
        found, caches = (go_on if i else begin)(params, network.local_blocks(character), caches, mine)
        character = np.asarray(found)[:, None]
        characters.append(int(found[0]))
    return np.array(characters)


def continued(network: Transformer, params: Params, text: Text, options: Namespace) -> bool:
    """Go on with a text on split heads; whether the plain network would have chosen the same characters."""
    P_world = dj.Partition()
    on_heads = Transformer(P_world, len(text.alphabet), options, "tensor")
    whole = dj.gather(params, network.param_specs())
    prompt = text.encoded("The ")[None]
    noise = options.temperature * np.random.default_rng(0).gumbel(size=(options.generate, len(text.alphabet)))
    noise = noise.astype(options.dtype)
    found = generate(on_heads, dj.scatter(whole, on_heads.param_specs()), prompt, noise, options.dtype)
    say(f"It goes on:\n  {text.decoded(np.concatenate([prompt[0], found]))!r}")
    if P_world.rank != 0:
        return True
    logits = jax.jit(plain)(whole, np.concatenate([prompt[0], found])[None])[0, prompt.shape[1] - 1 : -1]
    same = int(np.sum(np.argmax(np.asarray(logits) + noise, -1) == found))
    say(f"The plain network, without a cache, would have chosen {same} of these {len(found)} characters.")
    return same == len(found)


def plot(losses: dict[str, list[float]], out: Path) -> None:
    """Write the losses as a picture, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")  # no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(values) + 1), values, style, label=name)
    axes.set(title="Training loss", xlabel="step", ylabel="cross entropy of the next character")
    axes.grid(alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    say(f"Training curve: {out}")


def main() -> int:
    launch.simulate_if_asked()
    parser = argparse.ArgumentParser(description="Train a character transformer.")
    parser.add_argument("--partition", default="tensor", choices=["tensor", "ring", "heads"])
    parser.add_argument("--dtype", default="float32", choices=list(DIFFERENCE))
    for name, default in {"layers": 2, "width": 64, "heads": 4, "length": 64, "batch-size": 16, "steps": 400}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--generate", type=int, default=200, metavar="CHARACTERS")
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("out/transformer.png"), help="where the training curve goes")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.dtype == "float64")

    P_world = dj.Partition()
    text = P_world.broadcast_data(documentation() if P_world.rank == 0 else None)
    network = Transformer(P_world, len(text.alphabet), options, options.partition)
    params, specs = network.init(jax.random.key(0), options.dtype), network.param_specs()
    count = sum(int(np.prod(spec.global_shape)) for spec in jax.tree.leaves(specs))
    say(
        f"{P_world.size} workers, {options.partition}, {options.dtype}: {count} parameters, "
        f"{len(text.characters)} characters of documentation, {len(text.alphabet)} different ones"
    )
    whole = dj.gather(params, specs)
    derivative = dj.value_and_grad(network.part_of_loss)
    params, losses, seconds = train(dj.jit, derivative, params, network.batch, text, options)
    trained = dj.gather(params, specs)

    good = True
    if P_world.rank == 0:  # nothing in here moves data between workers
        say("In plain JAX, from the same parameters, on one worker:")
        theirs, plain_losses, alone = train(jax.jit, jax.value_and_grad(plain_loss), whole, _pair, text, options)
        both = zip(jax.tree.leaves(trained), jax.tree.leaves(theirs), strict=True)
        apart = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in both)
        of_losses = max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True))
        say(f"Seconds a step: {seconds:.4f} on {P_world.size} workers, {alone:.4f} in plain JAX on one")
        say(f"Largest difference between their parameters: {apart:.1e}")
        say(f"Largest difference between their losses at any step: {of_losses:.1e}")
        plot({"distributed": losses, "plain JAX": plain_losses}, options.out)
        good = options.dtype != "float64" or max(apart, of_losses) < DIFFERENCE["float64"]
        if not good:
            say(f"FAILED: the differences must be below {DIFFERENCE['float64']:.0e} in float64.")
    same = continued(network, params, text, options)
    return 0 if P_world.broadcast_data(good and (same or options.dtype != "float64")) else 1


def _pair(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return text[:, :-1], text[:, 1:]


if __name__ == "__main__":
    sys.exit(main())

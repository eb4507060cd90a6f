"""A character transformer with a mixture of experts in each block, in place of the two linear layers.

    mpirun -n 4 python -m distdl_jax examples/moe_transformer.py
    mpirun -n 4 python -m distdl_jax examples/moe_transformer.py --partition 2x2x1
    python examples/moe_transformer.py --simulate 2 --beside

On p workers, P_n x P_s x 1 of them (default: p x 1 x 1), with n texts of s characters, e features, and x experts:

    embedding, output   n/p x s, a copy of the table, cut over all workers between steps
    norms, attention    n/P_n x s/P_s x e; keys and values go round along P_s
    experts             x/p of them on each worker; the characters go to the experts that they choose, and back

Each character chooses one expert of x, whose hidden layer is as wide as that of a dense network: so x times as many
parameters compute nothing more. Which characters an expert has no room for does not depend on the partition. A second
loss keeps the experts in balance. With `--beside` the dense network, and the mixture without the second loss, are
trained, too, and drawn.

Sources: Lepikhin et al. (2020), arXiv:2006.16668; Fedus et al. (2021), arXiv:2101.03961.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
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

import beside
import launch
from training import say
from transformer import BASE, attention, norm
from transformer_text import Text, documentation

PARTITION = "of the stream, as in 2x2x1: workers along the batch, along the sequence, and 1"

Params = dict[str, Any]


# --- The network ---------------------------------------------------------------------------------------------------


class Transformer:
    """The layers on all workers of `P_world`; with one expert a dense network."""

    def __init__(self, P_world: dj.Partition, vocabulary: int, given: Namespace, experts: int) -> None:
        p, e, grid = P_world.size, given.width, P_world.grid
        rows, stream = grid([p, 1, 1]), grid(given.partition or (p, 1, 1))
        self.embed = nn.DistributedEmbedding(grid([p, 1]), rows, rows, vocabulary, e, sharded=True)
        self.output = nn.DistributedLinear(rows, rows, rows, e, vocabulary, bias=False, sharded=True)
        self.to_stream, self.to_rows = nn.Repartition(rows, stream), nn.Repartition(stream, rows)
        self.norm = nn.DistributedRMSNorm(stream, e)
        self.attention = nn.DistributedMultiHeadAttention(
            stream, e, given.heads, causal=True, rotary=BASE, bias=False, fused=True
        )
        self.experts = nn.DistributedMixtureOfExperts(
            stream, e, experts, given.hidden, top_k=1, capacity_factor=given.capacity if experts > 1 else None
        )
        self.layers = {"norm_1": self.norm, "attention": self.attention, "norm_2": self.norm, "experts": self.experts}
        self.blocks = given.layers

    def init(self, key: jax.Array, dtype: str) -> Params:
        """Return this worker's blocks of the initial parameters, the same global ones however the network is split."""
        first, *keys = jax.random.split(key, self.blocks + 1)

        def block(key: jax.Array) -> Params:
            pairs = zip(self.layers.items(), jax.random.split(key, len(self.layers)), strict=True)
            return {name: layer.init(key, dtype) for (name, layer), key in pairs}

        return {
            "embed": self.embed.init(first, dtype, weight_init=jax.nn.initializers.normal(0.02)),
            "blocks": [block(key) for key in keys],
            "norm": self.norm.init(first, dtype),
        }

    def param_specs(self) -> Params:
        """Return the global shape and the partition of each parameter."""
        block = {name: layer.param_specs() for name, layer in self.layers.items()}
        return {"embed": self.embed.param_specs(), "blocks": [block] * self.blocks, "norm": self.norm.param_specs()}

    def init_state(self, dtype: str) -> list[Params]:
        """Return the state of the experts of each block: their losses, and how many characters chose each expert."""
        return [self.experts.init_state(dtype) for _ in range(self.blocks)]

    def state_specs(self) -> list[Params]:
        """Return the global shape and the partition of each part of the state."""
        return [self.experts.state_specs()] * self.blocks

    def __call__(self, params: Params, characters: Any, *, state: list[Params], training: bool) -> Any:
        """Return this worker's logits, n/p x s x v, with its part of the second loss; and the state."""
        x, after = self.to_stream(self.embed(params["embed"], characters)), []
        for its, before in zip(params["blocks"], state, strict=True):
            x = x + self.attention(its["attention"], self.norm(its["norm_1"], x))
            y, new = self.experts(its["experts"], self.norm(its["norm_2"], x), state=before, training=training)
            x = x + y
            after.append(new)
        logits = self.output(params["embed"], self.to_rows(self.norm(params["norm"], x)))
        return (logits, sum(jnp.sum(new["load_balancing_loss"]) for new in after)), after


def plain(given: Namespace, params: Params, state: Any, characters: Any, training: bool) -> Any:
    """Compute the same network on one worker, in plain JAX."""
    x, after = params["embed"]["weight"][characters], []
    for its in params["blocks"]:
        x = x + attention(its["attention"], norm(its["norm_1"], x))
        y, new = plain_experts(its["experts"], norm(its["norm_2"], x), given.capacity)
        x = x + y
        after.append(new)
    logits = norm(params["norm"], x) @ params["embed"]["weight"].T
    return (logits, sum(new["load_balancing_loss"] for new in after)), after


def plain_experts(params: Params, x: jax.Array, factor: float) -> tuple[jax.Array, Params]:
    """Let all experts see all characters, each weighted with 0 but for those that it has room for."""
    n, length = len(params["router"]), x.shape[1]
    logits = x @ params["router"].T
    probabilities = jax.nn.softmax(logits)
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), n)
    room = jnp.cumsum(chosen, 1) <= max(1, int(np.ceil(factor * length / n)))  # in each text by itself
    hidden = jax.nn.gelu(jnp.einsum("nse,xhe->nsxh", x, params["up_weight"]) + params["up_bias"])
    outputs = jnp.einsum("nsxh,xeh->nsxe", hidden, params["down_weight"]) + params["down_bias"]
    counts = chosen.sum((0, 1))
    return jnp.einsum("nsx,nsxe->nse", probabilities * chosen * room, outputs), {
        "load_balancing_loss": n * jnp.sum(counts / counts.sum() * probabilities.mean((0, 1))),
        "router_z_loss": jnp.mean(jax.nn.logsumexp(logits, -1) ** 2),
        "tokens_per_expert": counts.astype(np.int32),
    }


# --- The run -------------------------------------------------------------------------------------------------------


def make_data(text: Text, samples: int, length: int) -> beside.Arrays:
    """Return pieces of the text, samples x length, and the characters that follow each of theirs."""
    pieces = text.batch(0, samples, length)
    return pieces[:, :-1], pieces[:, 1:]


def losses(P_world: dj.Partition, weight: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return this worker's part of the loss, and the loss of the whole."""
    of_classes = nn.DistributedCrossEntropyLoss(P_world.grid([P_world.size, 1, 1]), ignore_index=None)

    def part(y: Any, following: Any) -> jax.Array:
        return of_classes(jnp.moveaxis(y[0], 2, 1), following) + weight * y[1]

    def whole(y: Any, following: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(y[0], following).mean() + weight * y[1]

    return part, whole


def counts(state: list[Params]) -> np.ndarray:
    """Return how many characters chose each expert, in all blocks; of no experts on all workers but one."""
    return np.sum([np.asarray(its["tokens_per_expert"]) for its in state], 0)


def draw(trainings: dict[str, beside.Training], out: Path) -> None:
    """Draw the losses, and the shares of characters of each expert; on the worker that calls it."""
    import matplotlib

    matplotlib.use("Agg")  # no screen
    from matplotlib import pyplot

    mixtures = {name: training for name, training in trainings.items() if len(training.watched[0]) > 1}
    figure, panels = pyplot.subplots(
        1, 1 + len(mixtures), figsize=(4.2 * (1 + len(mixtures)), 3.6), layout="constrained"
    )
    for name, training in trainings.items():
        width = max(len(training.losses) // 30, 1)
        panels[0].plot(np.convolve(training.losses, np.ones(width) / width, "valid"), label=name)
    panels[0].set(title="loss, of the next character and of balance", xlabel="step")
    panels[0].grid(alpha=0.3)
    panels[0].legend()
    for panel, (name, training) in zip(panels[1:], mixtures.items(), strict=True):
        watched = np.array(training.watched)
        panel.stackplot(range(len(watched)), (watched / watched.sum(1, keepdims=True)).T)
        panel.set(title=f"share of each expert: {name}", xlabel="step", ylim=(0, 1), xlim=(0, max(len(watched) - 1, 1)))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    say(f"Picture: {out}")


def main() -> int:
    launch.simulate_if_asked()
    defaults = {"steps": 400, "batch_size": 16, "learning_rate": 3e-3}
    parser = beside.options("Train a mixture-of-experts transformer.", "moe_transformer", PARTITION, **defaults)
    for name, default in {"layers": 2, "width": 32, "heads": 4, "hidden": 64, "experts": 8, "length": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--samples", type=int, default=4000, help="how many pieces of the text there are")
    parser.add_argument("--capacity", type=float, default=1.25, help="of an expert, as a multiple of its even share")
    parser.add_argument("--balance", type=float, default=0.01, help="the factor of the second loss")
    parser.add_argument("--beside", action="store_true", help="train the dense network, too, and without balance")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.dtype == "float64")

    P_world = dj.Partition()
    text = P_world.broadcast_data(documentation() if P_world.rank == 0 else None)
    data, P_rows = make_data(text, given.samples, given.length), P_world.grid([P_world.size, 1])
    network = Transformer(P_world, len(text.alphabet), given, given.experts)
    count = sum(int(np.prod(spec.global_shape)) for spec in jax.tree.leaves(network.param_specs()))
    say(f"{P_world.size} workers, {given.experts} experts, {given.dtype}: {count} parameters")

    def local_blocks(batch: beside.Arrays) -> tuple[jax.Array, jax.Array]:
        return beside.block(batch[0], P_rows), beside.block(batch[1], P_rows)

    on_both = losses(P_world, given.balance)
    ours, good = beside.train_both(network, partial(plain, given), on_both, data, local_blocks, given, watch=counts)
    trainings = {"mixture": ours}
    if given.beside:
        dense = Transformer(P_world, len(text.alphabet), given, 1)
        for name, other, weight in (("without balance", network, 0.0), ("dense", dense, 0.0)):
            say(f"{name}:")
            trainings[name] = beside.train(other, losses(P_world, weight)[0], data, local_blocks, given, watch=counts)
    if P_world.rank == 0:
        draw(trainings, given.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

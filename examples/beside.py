"""What the examples of whole networks share: a network trained on all workers, and beside it the same in plain JAX.

A network has `init`, `init_state`, `param_specs`, and is called as `y, state = network(params, x, state=state,
training=...)`, as `nn.Sequential`; the same in plain JAX is a function `plain(params, state, x, training)`.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
import optax

from training import DIFFERENCE, say

FIRST_STEPS = 10
"""In float32 training multiplies rounding without end, so that the losses of so many steps are what is to agree."""

Arrays = tuple[np.ndarray, np.ndarray]
Network = Callable[..., Any]


class Training(NamedTuple):
    """A training that is over.

    - `params`, `state`: in the end. - `losses`: before each step. - `seconds`: of a step, the median.
    - `watched`: what `watch` made of the state after each step, on this worker.
    """

    params: Any
    state: Any
    losses: list[float]
    seconds: float
    watched: list[Any]


def options(description: str, name: str, partition_help: str, **defaults: Any) -> argparse.ArgumentParser:
    """Add the options of all examples; `defaults` has the steps, the batch size, and the learning rate."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--partition", type=shape, metavar="SHAPE", help=partition_help)
    parser.add_argument("--dtype", default="float32", choices=list(DIFFERENCE))
    parser.add_argument("--steps", type=int, default=defaults["steps"])
    parser.add_argument("--batch-size", type=int, default=defaults["batch_size"])
    parser.add_argument(
        "--learning-rate", type=float, default=defaults["learning_rate"], help="it falls along a cosine"
    )
    parser.add_argument("--out", type=Path, default=Path(f"out/{name}.png"), help="where the picture goes")
    return parser


def shape(text: str) -> tuple[int, ...]:
    """Parse a partition's shape from the command line, as in 1x1x2x2."""
    sizes = text.split("x")
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of workers, as in 1x1x2x2.")
    return tuple(map(int, sizes))


def partition(P_world: dj.Partition, given: Sequence[int] | None, dims: int) -> dj.CartesianPartition:
    """Return the partition of x: as given, or all workers along the last `dims - 2` dimensions, as square as can be."""
    if given is None:
        features, left = [1] * (dims - 2), P_world.size
        for factor in sorted(_factors(left), reverse=True):
            features[features.index(min(features))] *= factor
        given = (1, 1, *features)
    if len(given) != dims or math.prod(given) > P_world.size:
        text = "x".join(map(str, given))
        raise SystemExit(
            f"--partition {text} must have {dims} numbers, batch, channels and features, and at most {P_world.size} "
            f"workers, those that there are: mpirun -n N, or --simulate N, starts more."
        )
    return P_world.grid(given)


def _factors(n: int) -> list[int]:
    found, factor = [], 2
    while n > 1:
        while n % factor:
            factor += 1
        found.append(factor)
        n //= factor
    return found


def block(whole: np.ndarray, P: dj.Partition) -> jax.Array:
    """Return this worker's block of a tensor on `P`; elsewhere a zero-volume array."""
    return dj.TensorSpec(whole.shape, P).block(whole)


def train_both(
    network: Any,
    plain: Network,
    losses: tuple[Callable[..., Any], Callable[..., Any]],
    data: Arrays,
    local_blocks: Callable[[Arrays], tuple[jax.Array, jax.Array]],
    given: argparse.Namespace,
    scaled: Callable[[Any], Any] = lambda params: params,
    watch: Callable[[Any], Any] | None = None,
) -> tuple[Training, bool]:
    """Train the network on all workers, then on worker 0 the one in plain JAX from the same parameters.

    `losses` are of a prediction and a target: this worker's part of the mean, and the whole; `data` is the whole of the
    inputs and targets, on every worker, and `local_blocks` gives this worker's blocks; `scaled` makes the initial
    parameters of PyTorch's. Gives the distributed training, and whether the two agree, on all workers.
    """
    params, state = scaled(network.init(jax.random.key(0), given.dtype)), network.init_state(given.dtype)
    specs = network.param_specs()
    whole = dj.gather((params, state), (specs, network.state_specs()))
    say("Distributed:")
    ours = train(network, losses[0], data, local_blocks, given, (params, state), watch)
    trained = dj.gather((ours.params, ours.state), (specs, network.state_specs()))
    good = True
    P_world = dj.Partition()
    if P_world.rank == 0:  # nothing in here moves data between workers
        say("In plain JAX, from the same parameters, on one worker:")
        theirs = _train(jax.jit, jax.value_and_grad, plain, losses[1], whole, data, _as_it_is, given)
        good = _compare(ours, theirs, trained, given)
    return ours, P_world.broadcast_data(good)


def train(
    network: Any,
    loss: Callable[..., Any],
    data: Arrays,
    local_blocks: Callable[[Arrays], tuple[jax.Array, jax.Array]],
    given: argparse.Namespace,
    start: tuple[Any, Any] | None = None,
    watch: Callable[[Any], Any] | None = None,
) -> Training:
    """Train a network on all workers, from the parameters and state of `start`, or from its own initial ones."""

    def distributed(params: Any, state: Any, x: jax.Array, training: bool) -> Any:
        return network(params, x, state=state, training=training)

    start = start or (network.init(jax.random.key(0), given.dtype), network.init_state(given.dtype))
    return _train(dj.jit, dj.value_and_grad, distributed, loss, start, data, local_blocks, given, watch)


def _as_it_is(batch: Arrays) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(batch[0]), jnp.asarray(batch[1])


def _train(
    jit: Callable[..., Any],
    value_and_grad: Callable[..., Any],
    network: Network,
    loss: Callable[..., Any],
    start: tuple[Any, Any],
    data: Arrays,
    local_blocks: Callable[[Arrays], tuple[jax.Array, jax.Array]],
    given: argparse.Namespace,
    watch: Callable[[Any], Any] | None = None,
) -> Training:
    optimiser = optax.adam(optax.cosine_decay_schedule(given.learning_rate, given.steps))

    @jit
    def step(params: Any, state: Any, opt_state: Any, x: jax.Array, target: jax.Array) -> tuple[Any, ...]:
        def part(params: Any) -> tuple[jax.Array, Any]:
            y, new = network(params, state, x, True)
            return loss(y, target), new

        (value, new), gradient = value_and_grad(part, has_aux=True)(params)
        updates, opt_state = optimiser.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), new, opt_state, value

    (params, state), losses, seconds, watched = start, [], [], []
    opt_state = optimiser.init(params)
    for n in range(given.steps):
        rows = np.random.default_rng(n).permutation(len(data[0]))[: given.batch_size]
        batch = local_blocks((data[0][rows], data[1][rows]))
        begin = time.perf_counter()
        params, state, opt_state, value = step(params, state, opt_state, *batch)
        losses.append(float(value))
        seconds.append(time.perf_counter() - begin)
        if watch is not None:
            watched.append(watch(state))
        if (n + 1) % max(given.steps // 8, 1) == 0:
            say(f"  step {n + 1:4}  loss {statistics.mean(losses[-10:]):.5f}  {sum(seconds):6.1f} s")
    return Training(params, state, losses, statistics.median(seconds[1:] or seconds), watched)


def _compare(ours: Training, theirs: Training, trained: Any, given: argparse.Namespace) -> bool:
    """Print how far apart they are; whether that is rounding."""

    def largest(mine: Any, its: Any) -> float:
        pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(its), strict=True)
        return max((float(jnp.max(jnp.abs(a - b))) for a, b in pairs), default=0.0)

    apart, states_apart = largest(trained[0], theirs.params), largest(trained[1], theirs.state)
    steps_apart = [abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    losses_apart = max(steps_apart)
    say(f"Seconds per step: {ours.seconds:.4f} distributed, {theirs.seconds:.4f} in plain JAX (medians)")
    say(f"Largest difference between their parameters: {apart:.1e}")
    say(f"Largest difference between their losses at any step: {losses_apart:.1e}")
    if jax.tree.leaves(theirs.state):
        say(f"Largest difference between their running statistics: {states_apart:.1e}")
    if given.dtype == "float64":
        judged, what = max(apart, losses_apart, states_apart), "the differences"
    else:
        judged, what = max(steps_apart[:FIRST_STEPS]), f"the differences of the first {FIRST_STEPS} losses"
        say(f"Largest difference between their losses in the first {FIRST_STEPS} steps: {judged:.1e}")
    if not judged < DIFFERENCE[given.dtype]:
        say(f"FAILED: {what} must be below {DIFFERENCE[given.dtype]:.0e} in {given.dtype}.")
    return judged < DIFFERENCE[given.dtype]


def draw(panels: dict[str, np.ndarray], losses: list[float], out: Path) -> None:
    """Draw images in a row, and the losses behind them; on the worker that calls it."""
    import matplotlib

    matplotlib.use("Agg")  # no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels) + 1, figsize=(3.2 * (len(panels) + 1), 3), layout="constrained")
    for panel, (name, values) in zip(axes, panels.items(), strict=False):
        panel.imshow(values)
        panel.set(title=name, xticks=[], yticks=[])
    axes[-1].semilogy(losses)
    axes[-1].set(title="loss", xlabel="step")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    say(f"Picture: {out}")

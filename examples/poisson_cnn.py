"""A CNN and a solver on the same blocks: what a plate conducts, learned from pictures of it and temperatures alone.

    mpirun -n 4 python -m distdl_jax examples/poisson_cnn.py
    python examples/poisson_cnn.py --simulate 4

A plate is heated evenly, and its border is kept cold: -div(a grad u) = 30 in the unit square, u = 0 on its border.
There are pictures of many plates, and the temperature u was measured in each of them. Sought is the law by which a
picture tells the conductivity a, of which nothing is known.

    picture            on P_x, 1 x 1 x 2 x 2 for four workers      n_b x 1 x n x n
    three convolutions the law that is learned                     n_b x 1 x n x n: a
    conjugate gradients, by finite volumes on the same blocks      n_b x 1 x n x n: u
    loss               the mean square of u's error

The loss is differentiated through the solver by `dj.solvers.cg`: one more system is solved, whatever the number of
steps was. Beside it runs the same in plain JAX on one worker, with `jax.scipy.sparse.linalg.cg`.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn
from jax import lax
from jax.scipy.sparse import linalg

import beside
import launch
from training import say

HEAT = 30.0
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}  # of the solver, relative
TESTED = 8  # samples
PARTITION = "of the tensors, as in 1x1x2x2: batch, channels (1), and two dimensions"

Field = jax.Array


# --- The solver ----------------------------------------------------------------------------------------------------


class Mesh(NamedTuple):
    """What makes the solver distributed or sequential: on blocks, or on whole fields.

    - `exchange`: a field with a row and a column more on each side, where another worker has them.
    - `border`: by dimension, whether the border of the plate is before this worker's cells, and behind them.
    - `cg`: conjugate gradients.
    """

    exchange: Callable[[Field], Field]
    border: tuple[tuple[bool, bool], ...]
    cg: Callable[..., tuple[Field, Any]]


def whole_mesh() -> Mesh:
    """The whole plate, in plain JAX."""
    return Mesh(lambda field: field, ((True, True), (True, True)), linalg.cg)


def split_mesh(P_x: dj.CartesianPartition) -> Mesh:
    """The blocks on P_x; a worker outside it calls the solver, which leaves it alone."""
    exchange = partial(dj.functional.halo_exchange, P_x=P_x, halo=((0, 0), (0, 0), (1, 1), (1, 1)))
    places = [(0, 1)] * 2 if P_x.index is None else list(zip(P_x.index, P_x.shape, strict=True))[2:]
    border = tuple((i == 0, i == p - 1) for i, p in places)
    return Mesh(exchange, border, lambda A, b, **options: dj.solvers.cg(A, b, P_x, **options))


def widened(mesh: Mesh, field: Field, sign: int) -> Field:
    """Return a field with a cell more on each side; beyond the border of the plate, `sign` times the cell before it."""
    field = mesh.exchange(field)
    for axis, (before, behind) in enumerate(mesh.border, start=2):
        first, last = (lax.slice_in_dim(field, k, k + 1, axis=axis) for k in (0, field.shape[axis] - 1))
        field = jnp.concatenate([sign * first] * before + [field] + [sign * last] * behind, axis=axis)
    return field


def temperature(mesh: Mesh, a: Field, size: int, tolerance: float) -> Field:
    """Solve -div(a grad u) = HEAT on the cells of `size` x `size`; u = 0 on the border, half a cell outside."""

    def minus_divergence(u: Field) -> Field:
        wide, wide_a = widened(mesh, u, -1), widened(mesh, a, 1)
        total = jnp.zeros_like(u)
        for axis, other in ((2, 3), (3, 2)):
            v, k = (lax.slice_in_dim(field, 1, -1, axis=other) for field in (wide, wide_a))
            left, right = (lax.slice_in_dim(k, start, start + k.shape[axis] - 1, axis=axis) for start in (0, 1))
            total -= jnp.diff(2 * left * right / (left + right) * jnp.diff(v, axis=axis), axis=axis)
        return total * size**2

    return mesh.cg(minus_divergence, jnp.full_like(a, HEAT), tol=tolerance, maxiter=20 * size)[0]


# --- The network ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plate:
    """A CNN from pictures to conductivities, and the solver from these to temperatures."""

    P_x: dj.CartesianPartition
    cnn: nn.Sequential
    size: int
    tolerance: float

    def init(self, key: jax.Array, dtype: Any) -> Any:
        return self.cnn.init(key, dtype)

    def param_specs(self) -> Any:
        return self.cnn.param_specs()

    def init_state(self, dtype: Any) -> Any:
        return self.cnn.init_state(dtype)

    def state_specs(self) -> Any:
        return self.cnn.state_specs()

    def __call__(self, params: Any, x: Field, *, state: Any, training: bool) -> tuple[Field, Any]:
        a = positive(self.cnn(params, x))
        return temperature(split_mesh(self.P_x), a, self.size, self.tolerance), state


def convolutions(P_x: dj.Partition, width: int) -> nn.Sequential:
    """Return the CNN."""
    conv = partial(nn.DistributedConv2d, P_x, kernel_size=3, padding=1, padding_mode="replicate")
    return nn.Sequential(
        conv(in_channels=1, out_channels=width),
        jnp.tanh,
        conv(in_channels=width, out_channels=width),
        jnp.tanh,
        nn.DistributedConv2d(P_x, in_channels=width, out_channels=1, kernel_size=1),
    )


def positive(y: Field) -> Field:
    """Return a conductivity, from any number."""
    return 2 * jnp.exp(y)


def plain_plate(size: int, tolerance: float, params: Any, state: Any, x: Field, training: bool) -> tuple[Field, Any]:
    """Compute the same on one worker, in plain JAX."""

    def conv(its: dict, x: Field) -> Field:
        margin = its["weight"].shape[-1] // 2
        x = jnp.pad(x, [(0, 0), (0, 0), (margin, margin), (margin, margin)], mode="edge")
        return lax.conv(x, its["weight"], (1, 1), "VALID") + its["bias"].reshape(-1, 1, 1)

    first, _, second, _, last = params
    y = conv(last, jnp.tanh(conv(second, jnp.tanh(conv(first, x)))))
    return temperature(whole_mesh(), positive(y), size, tolerance), state


# --- The data ------------------------------------------------------------------------------------------------------


def make_data(samples: int, size: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make pictures, temperatures and the conductivities that nobody knows, each n_b x 1 x n x n."""
    rng = np.random.default_rng(0)
    waves = np.stack(np.meshgrid(*[np.fft.fftfreq(size, 1 / size)] * 2, indexing="ij"))
    smooth = np.exp(-np.sum(waves**2, axis=0) / 18)
    fields = np.fft.ifft2(np.fft.fft2(rng.normal(size=(samples, 1, size, size))) * smooth).real
    pictures = fields / fields.std() + 0.1 * rng.normal(size=fields.shape)
    padded = np.pad(pictures, [(0, 0), (0, 0), (1, 1), (1, 1)], mode="edge")
    blurred = sum(padded[:, :, i : i + size, j : j + size] for i in range(3) for j in range(3)) / 9
    conductivities = (1 + 4 / (1 + np.exp(-3 * blurred))).astype(dtype)
    solve = jax.jit(lambda a: temperature(whole_mesh(), a, size, TOLERANCE[dtype]))
    return pictures.astype(dtype), np.asarray(solve(conductivities)), conductivities


# --- The run -------------------------------------------------------------------------------------------------------


def main() -> int:
    launch.simulate_if_asked()
    parser = beside.options(
        "Learn what plates conduct, through a solver.",
        "poisson_cnn",
        PARTITION,
        steps=200,
        batch_size=8,
        learning_rate=1e-2,
    )
    parser.add_argument("--size", type=int, default=24, help="cells along each side of a plate")
    parser.add_argument("--width", type=int, default=8, help="channels")
    parser.add_argument("--samples", type=int, default=64, help=f"to train on; {TESTED} more are to test on")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.dtype == "float64")
    P_world = dj.Partition()
    P_x = beside.partition(P_world, given.partition, 4)
    spec = dj.TensorSpec((given.batch_size, 1, given.size, given.size), P_x)
    cnn = nn.Sequential(*convolutions(P_x, given.width), x_spec=spec)
    network = Plate(P_x, cnn, given.size, TOLERANCE[given.dtype])
    say(cnn.table(given.dtype))
    made = make_data(given.samples + TESTED, given.size, given.dtype) if P_world.rank == 0 else None
    x, u, truth = P_world.broadcast_data(made)

    def local_blocks(batch: beside.Arrays) -> tuple[jax.Array, jax.Array]:
        return beside.block(batch[0], P_x), beside.block(batch[1], P_x)

    losses = (nn.DistributedMSELoss(P_x), lambda y, target: jnp.mean((y - target) ** 2))
    plain = partial(plain_plate, given.size, TOLERANCE[given.dtype])
    ours, good = beside.train_both(network, plain, losses, (x[:-TESTED], u[:-TESTED]), local_blocks, given)

    every = nn.Sequential(*cnn)  # for batches of another size
    a = dj.jit(lambda params, x: positive(every(params, x)))(ours.params, beside.block(x[-TESTED:], P_x))
    a = dj.gather(a, dj.TensorSpec((TESTED, 1, given.size, given.size), P_x))
    if P_world.rank == 0:
        a, want = np.asarray(a), truth[-TESTED:]
        error = np.mean([np.linalg.norm(p - q) / np.linalg.norm(q) for p, q in zip(a, want, strict=True)])
        say(f"Relative error of the conductivity of {TESTED} plates that it has not seen: {error:.3f}")
        fields = {"picture": x, "temperature": u, "conductivity": truth, "as it was learned": a}
        beside.draw({name: field[-1, 0] for name, field in fields.items()}, ours.losses, given.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""A MeshGraphNet on a mesh of triangles that is split over the workers: it learns how heat spreads.

    mpirun -n 4 python -m distdl_jax examples/mesh_network.py
    mpirun -n 4 python -m distdl_jax examples/mesh_network.py --partition 2x2x1
    python examples/mesh_network.py --simulate 4

A plate with a round hole, in triangles of many shapes. Its outer border is insulated, and the hole is kept at 0. The
heat equation du/dt = div(grad u) is solved here by finite elements, one implicit step at a time. The network sees the
temperature at each node, and whether it is at the hole; and of each edge how it lies. It has to tell how the
temperature changes in one step. In the end it takes many steps by itself, each from its own result.

    nodes: temperature, at the hole?    on P_x, 1 x 4 x 1 for four workers    n_b x nodes x 2
    edges: x, y, length                 on P_x, too                           n_b x edges x 3
    two encoders                        MLPs of nodes, and of edges           n_b x ... x width
    blocks of message passing
    a decoder                           an MLP of nodes                       n_b x nodes x 1

The nodes are in an order in which every worker has a compact piece of the plate. So only rows of nodes along the
borders of pieces move.

Source: Pfaff et al. (2020), arXiv:2010.03409, the network.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import graphs, nn

import beside
import launch
from training import say

TESTED = 8  # fields
STEPS_ALONE = 20  # that the network takes from its own results
PARTITION = "of the nodes, as in 1x4x1: batch, nodes, features (1)"


class Mesh(NamedTuple):
    """A mesh of triangles, its nodes in their order, and its edges in both directions.

    - `positions`: nodes x 2. - `cells`: triangles x 3. - `at_hole`: for each node whether it is on the hole's border.
    - `senders`, `receivers`: the nodes of each edge. - `lies`: edges x 3, sender minus receiver, and the length.
    """

    positions: np.ndarray
    cells: np.ndarray
    at_hole: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    lies: np.ndarray


# --- The network ---------------------------------------------------------------------------------------------------


class MeshGraphNet:
    """Encoders, blocks of message passing, and a decoder, from temperatures to their changes."""

    def __init__(self, P_x: dj.Partition, mesh: Mesh, width: int, blocks: int) -> None:
        linear = partial(nn.DistributedPointwise, P_x, dim=-1)
        graph = (mesh.senders, mesh.receivers, len(mesh.positions))
        self.P_x = P_x
        self.lies = mesh.lies[slice(*dj.TensorSpec((1, *mesh.lies.shape), P_x).box[1])] if P_x.active else None
        self.layers = {
            "nodes": nn.Sequential(linear(2, width), jax.nn.relu, linear(width, width)),
            "edges": nn.Sequential(linear(3, width), jax.nn.relu, linear(width, width)),
            **{
                f"block{n}": nn.DistributedGraphNetBlock(P_x, width, *graph, hidden_layers=1, activation=jax.nn.relu)
                for n in range(blocks)
            },
            "decoder": nn.Sequential(linear(width, width), jax.nn.relu, linear(width, 1)),
        }

    def init(self, key: jax.Array, dtype: str) -> dict[str, Any]:
        keys = zip(self.layers.items(), jax.random.split(key, len(self.layers)), strict=True)
        return {name: layer.init(k, dtype) for (name, layer), k in keys}

    def init_state(self, dtype: str) -> tuple:
        return ()

    def param_specs(self) -> dict[str, Any]:
        return {name: layer.param_specs() for name, layer in self.layers.items()}

    def state_specs(self) -> tuple:
        return ()

    def __call__(self, params: dict, x: jax.Array, *, state: tuple = (), training: bool = True) -> tuple:
        """Return this worker's block of the changes; edges lie alike in all samples."""
        edges = x[:, :0] if self.lies is None else jnp.broadcast_to(self.lies, (len(x), *self.lies.shape))
        nodes, edges = (
            self.layers[name](params[name], z) for name, z in (("nodes", x), ("edges", edges.astype(x.dtype)))
        )
        for name, layer in self.layers.items():
            if name.startswith("block"):
                nodes, edges = layer(params[name], nodes, edges)
        return self.layers["decoder"](params["decoder"], nodes), state


def plain_network(mesh: Mesh, params: dict, state: tuple, x: jax.Array, training: bool) -> tuple[jax.Array, tuple]:
    """Compute the same network on one worker, in plain JAX."""

    def mlp(layers: tuple, x: jax.Array) -> jax.Array:
        linear = [layer for layer in layers if layer and layer["weight"].ndim == 2]
        for n, layer in enumerate(linear):
            x = (jax.nn.relu(x) if n else x) @ layer["weight"].T + layer["bias"]
        return x

    def normed(layers: tuple, x: jax.Array) -> jax.Array:
        x, norm = mlp(layers, x), layers[-1]
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * norm["weight"] + norm["bias"]

    edges = mlp(params["edges"], jnp.broadcast_to(mesh.lies, (len(x), *mesh.lies.shape)).astype(x.dtype))
    nodes = mlp(params["nodes"], x)
    for name in [name for name in params if name.startswith("block")]:
        ends = nodes[:, mesh.senders], nodes[:, mesh.receivers]
        messages = normed(params[name]["edge"], jnp.concatenate([edges, *ends], -1))
        received = jnp.zeros_like(nodes).at[:, mesh.receivers].add(messages)
        nodes = nodes + normed(params[name]["node"], jnp.concatenate([nodes, received], -1))
        edges = edges + messages
    return mlp(params["decoder"], nodes), state


# --- The mesh and the data -----------------------------------------------------------------------------------------


def make_mesh(size: int, parts: int) -> Mesh:
    """Make a plate with a hole: a grid of size x size squares with moved corners, each cut along either diagonal.

    The nodes are in the order of compact pieces for so many workers.
    """
    rng = np.random.default_rng(0)
    i, j = np.meshgrid(*[np.arange(size + 1)] * 2, indexing="ij")
    inside = ((i % size > 0) & (j % size > 0))[..., None]
    positions = (np.stack([i, j], -1) + inside * rng.uniform(-0.3, 0.3, (*i.shape, 2))).reshape(-1, 2) / size
    number = i * (size + 1) + j
    a, b, c, d = (x.ravel() for x in (number[:-1, :-1], number[1:, :-1], number[1:, 1:], number[:-1, 1:]))
    turn = rng.integers(0, 2, len(a)).astype(bool)
    a, b, c, d = (np.where(turn, x, y) for x, y in ((a, b), (b, c), (c, d), (d, a)))
    cells = np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)])
    cells = cells[np.linalg.norm(positions[cells].mean(1) - [0.4, 0.55], axis=1) > 0.2]
    used = np.unique(cells)
    positions, cells = positions[used], np.searchsorted(used, cells)
    order = graphs.order_nodes(positions, parts)
    positions, cells = positions[order], np.argsort(order)[cells]
    senders, receivers = graphs.edges_of_cells(cells)
    # The edges of a border belong to one triangle.
    sides, of = np.unique(np.sort(cells[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), 1), axis=0, return_counts=True)
    border = np.isin(np.arange(len(positions)), sides[of == 1])
    at_hole = border & (np.abs(positions - 0.5).max(1) < 0.49)
    apart = positions[senders] - positions[receivers]
    lies = size * np.concatenate([apart, np.linalg.norm(apart, axis=1, keepdims=True)], 1)
    return Mesh(positions, cells, at_hole, senders, receivers, lies)


def step_of(mesh: Mesh, time: float) -> np.ndarray:
    """Return the matrix of one implicit step of so much time, by linear finite elements with lumped masses."""
    corners = mesh.positions[mesh.cells]
    sides = corners[:, [2, 0, 1]] - corners[:, [1, 2, 0]]  # the side across each corner
    areas = 0.5 * np.abs(sides[:, 0, 0] * sides[:, 1, 1] - sides[:, 0, 1] * sides[:, 1, 0])
    stiffness, mass = np.zeros((len(mesh.positions),) * 2), np.zeros(len(mesh.positions))
    for m in range(3):
        np.add.at(mass, mesh.cells[:, m], areas / 3)
        for n in range(3):
            np.add.at(stiffness, (mesh.cells[:, m], mesh.cells[:, n]), (sides[:, m] * sides[:, n]).sum(1) / (4 * areas))
    inner = ~mesh.at_hole
    step = np.linalg.solve(np.diag(mass) + time * stiffness * np.outer(inner, inner), np.diag(mass))
    return step * np.outer(inner, inner)


def make_data(mesh: Mesh, step: np.ndarray, samples: int, dtype: str) -> beside.Arrays:
    """Make inputs, n_b x nodes x 2, and targets, n_b x nodes x 1: the change in a step, in units of its deviation.

    Each field is a few waves, smoothed by so many steps, and is as large as the others.
    """
    rng = np.random.default_rng(1)
    fields = []
    for n in range(samples):
        waves, phases = rng.normal(scale=7.0, size=(6, 2)), rng.uniform(0, 2 * np.pi, 6)
        field = np.where(mesh.at_hole, 0, np.sin(mesh.positions @ waves.T + phases).sum(1))
        field = np.linalg.matrix_power(step, 1 + n % 4) @ field
        fields.append(field / field.std())
    u = np.stack(fields)
    change = u @ step.T - u
    x = np.stack([u, np.broadcast_to(mesh.at_hole, u.shape)], -1)
    return x.astype(dtype), (change / change.std())[..., None].astype(dtype)


# --- The run -------------------------------------------------------------------------------------------------------


def main() -> int:
    launch.simulate_if_asked()
    parser = beside.options(
        "Learn how heat spreads on a mesh.", "mesh_network", PARTITION, steps=800, batch_size=8, learning_rate=3e-3
    )
    parser.add_argument("--size", type=int, default=20, help="squares along each side of the plate")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="features of a node, and of an edge")
    parser.add_argument("--samples", type=int, default=128, help=f"to train on; {TESTED} more are to test on")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.dtype == "float64")
    P_world = dj.Partition()
    P_x = beside.partition(P_world, given.partition or (1, P_world.size, 1), 3)
    mesh = make_mesh(given.size, P_x.shape[1])
    step = step_of(mesh, 0.5 / given.size**2)
    owner = owners(mesh, P_x)
    say(
        f"{len(mesh.positions)} nodes, {len(mesh.cells)} triangles, {len(mesh.senders)} edges, of which "
        f"{np.sum(owner[mesh.senders] != owner[mesh.receivers])} between workers."
    )
    x, change = make_data(mesh, step, given.samples + TESTED, given.dtype)
    network = MeshGraphNet(P_x, mesh, given.width, given.blocks)

    def local_blocks(batch: beside.Arrays) -> tuple[jax.Array, jax.Array]:
        return beside.block(batch[0], P_x), beside.block(batch[1], P_x)

    losses = (nn.DistributedMSELoss(P_x), lambda y, target: jnp.mean((y - target) ** 2))
    plain = partial(plain_network, mesh)
    ours, good = beside.train_both(network, plain, losses, (x[:-TESTED], change[:-TESTED]), local_blocks, given)

    # In units of the temperature: u + unit * y is the network's next field.
    unit = np.std(x[..., 0] @ step.T - x[..., 0])
    y, alone = evaluated(network, ours.params, x[-TESTED:], unit)
    if P_world.rank == 0:
        errors = np.linalg.norm((y - change[-TESTED:])[..., 0], axis=1) / np.linalg.norm(change[-TESTED:, :, 0], axis=1)
        say(f"Relative error of the change in a step, in {TESTED} fields that it has not seen: {errors.mean():.3f}")
        late = x[-TESTED:, :, 0] @ np.linalg.matrix_power(step, STEPS_ALONE).T
        apart = np.linalg.norm(alone[..., 0] - late, axis=1) / np.linalg.norm(late, axis=1)
        say(f"Relative error of the temperature after {STEPS_ALONE} steps of its own: {apart.mean():.3f}")
        fields = {
            "at first": x[-1, :, 0],
            f"after {STEPS_ALONE} steps": late[-1],
            "what the network says": alone[-1, :, 0],
        }
        draw(mesh, owner, fields, ours.losses, given.out)
    return 0 if good else 1


def owners(mesh: Mesh, P_x: dj.Partition) -> np.ndarray:
    """Return, for each node, the index along the nodes of the workers that own it."""
    blocks = np.array_split(np.arange(len(mesh.positions)), P_x.shape[1])
    return np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])


def evaluated(network: MeshGraphNet, params: dict, x: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the changes in a step, and the fields after many steps of the network alone; whole on worker 0."""
    spec = dj.TensorSpec((*x.shape[:2], 1), network.P_x)

    def steps(params: dict, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        u, at_hole = seen[..., :1], seen[..., 1:]

        def next_field(u: jax.Array, _: None) -> tuple[jax.Array, None]:
            y, _ = network(params, jnp.concatenate([u, at_hole], -1))
            return (u + unit * y) * (1 - at_hole), None

        return network(params, seen)[0], jax.lax.scan(next_field, u, length=STEPS_ALONE)[0]

    blocks = dj.jit(steps)(params, beside.block(x, network.P_x))
    return tuple(np.asarray(whole) for whole in dj.gather(blocks, (spec, spec)))


def draw(mesh: Mesh, owner: np.ndarray, fields: dict[str, np.ndarray], losses: list[float], out: Path) -> None:
    """Draw the mesh by worker, the edges between workers in black; the fields, their difference, and the losses."""
    import matplotlib

    matplotlib.use("Agg")  # no screen
    from matplotlib import pyplot
    from matplotlib.collections import LineCollection

    first, want, got = fields.values()
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 7.4), layout="constrained")
    x, y = mesh.positions.T
    colours = pyplot.get_cmap("tab10")(owner % 10)
    between = owner[mesh.senders] != owner[mesh.receivers]
    ends = np.stack([mesh.positions[mesh.senders], mesh.positions[mesh.receivers]], 1)
    panel = axes[0, 0]
    panel.add_collection(LineCollection(ends[~between], colors=colours[mesh.senders[~between]], linewidths=0.6))
    panel.add_collection(LineCollection(ends[between], colors="black", linewidths=0.9))
    panel.scatter(x, y, s=7, c=colours)
    panel.set(title="workers, and edges between them")
    span = float(np.abs(first).max())
    for panel, (name, field), limit in zip(
        (axes[0, 1], axes[0, 2], axes[1, 0], axes[1, 1]),
        {**fields, "difference": got - want}.items(),
        (span, *[float(np.abs(want).max())] * 2, float(np.abs(got - want).max())),
        strict=True,
    ):
        drawn = panel.tripcolor(x, y, mesh.cells, field, shading="gouraud", cmap="RdBu_r", vmin=-limit, vmax=limit)
        panel.set(title=name)
        figure.colorbar(drawn, ax=panel, shrink=0.8)
    for panel in axes.flat[:5]:
        panel.set(aspect="equal", xticks=[], yticks=[])
    axes[1, 2].semilogy(losses)
    axes[1, 2].set(title="loss", xlabel="step")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    say(f"Picture: {out}")


if __name__ == "__main__":
    sys.exit(main())

"""Draws the pictures of the documentation, by the library itself: python docs/pictures/draw.py [docs/pictures]

Each function is named like its file. Nothing runs but the check of a training step on four threads.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.text import Drawing
from distdl_jax.tools.cost.layers import Counter, forward_movements
from distdl_jax.tools.draw.grids import Blocks, DrawnBlock, lay_out, spec_as_blocks
from distdl_jax.tools.draw.halos_and_arrows import draw_halos
from distdl_jax.tools.draw.layers import steps_of
from distdl_jax.tools.draw.svg import GREY, Part, below, beside, document, heading, rect, text, width_of, words

P = dj.planning_world(4)


def grid() -> Drawing:
    return dj.draw(P.grid([2, 2]))


def blocks() -> Drawing:
    return dj.draw(dj.TensorSpec((2, 3, 64, 64), P.grid([1, 1, 2, 2])))


def volume() -> Drawing:
    return dj.draw(dj.TensorSpec((1, 1, 64, 64, 64), dj.planning_world(8).grid([1, 1, 2, 2, 2])))


def repartition() -> Drawing:
    layer = nn.Repartition(P.grid([2, 2]), P.grid([4, 1]))
    return dj.draw(layer, dj.TensorSpec((8, 8), layer.P_x))


def halo_exchange() -> Drawing:
    P_x = P.grid([2, 2])
    return dj.draw(nn.HaloExchange(P_x, ((1, 1), (1, 1))), dj.TensorSpec((8, 8), P_x))


def broadcast() -> Drawing:
    layer = nn.Broadcast(P.grid([1, 2]), P.grid([2, 2]))
    return dj.draw(layer, dj.TensorSpec((4, 6), layer.P_x))


def sum_reduce() -> Drawing:
    layer = nn.SumReduce(P.grid([2, 2]), P.grid([1, 2]))
    return dj.draw(layer, dj.TensorSpec((8, 6), layer.P_x))


def convolution() -> Drawing:
    P_x = P.grid([1, 1, 2, 2])
    layer = nn.DistributedConv2d(P_x, in_channels=1, out_channels=4, kernel_size=3, padding=1)
    return dj.draw(layer, dj.TensorSpec((1, 1, 8, 8), P_x))


def messages() -> Drawing:
    def program() -> Drawing:
        P_x = dj.Partition().grid([1, 1, 2, 2])
        conv = nn.DistributedConv2d(P_x, in_channels=1, out_channels=1, kernel_size=3, padding=1)
        x = dj.TensorSpec((1, 1, 8, 8), P_x).block(jnp.ones((1, 1, 8, 8), jnp.float32))

        def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            return jnp.sum(conv(params, x) ** 2)

        params = conv.init(jax.random.key(0), jnp.float32)
        return dj.draw(dj.check(dj.value_and_grad(loss), params, x))

    drawing: Drawing = dj.simulate(4, program)[0]
    return drawing


def plan() -> Drawing:
    """Return what moves in a gradient of a small network in plain JAX, of one convolution, a pool and a norm."""

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean(y / (1 + jnp.max(jnp.abs(y), axis=(1, 2), keepdims=True)))

    def program() -> Drawing:
        spec = dj.TensorSpec((2, 66, 64, 1), dj.Partition().grid([1, 2, 2, 1]))
        f = dj.distribute(jax.value_and_grad(loss), (None, spec))
        kernel, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 3, 1, 8), spec.local_shape))
        return dj.draw(f.plan(kernel, x))

    drawing: Drawing = dj.simulate(4, program)[0]
    return drawing


# --- Tensors of one layer beside each other, for docs/partitions.md --------------------------------------------------


def cut_samples() -> Drawing:
    return product("The samples are cut", nn.DistributedLinear(P.grid([4, 1]), in_features=6, out_features=5))


def cut_space() -> Drawing:
    conv = nn.DistributedConv2d(P.grid([1, 1, 2, 2]), in_channels=1, out_channels=1, kernel_size=3, padding=1)
    x = dj.TensorSpec((1, 1, 8, 8), conv.P_x)
    weight, y = conv.param_specs()["weight"], conv.output_spec(x)
    tensors = [("x: rows, columns", x), ("kernel", weight), ("y", y)]
    return in_a_row("Rows and columns are cut", [spec_as_blocks(spec, name) for name, spec in tensors], "*=")


def cut_features() -> Drawing:
    layer = nn.DistributedLinear(P.grid([1, 4]), in_features=6, out_features=8, split="out_features")
    return product("The features are cut", layer)


def cut_weight() -> Drawing:
    P_W = P.grid([1, 2, 2])
    P_x, P_y = P_W.slice(1, keepdims=False), P_W.slice(2, keepdims=False)
    layer = nn.DistributedLinear(P_x, P_y, P_W, in_features=6, out_features=8)
    return product("The weight is cut on both sides", layer)


def teams() -> Drawing:
    first, second = (P.grid([2, 1, 2]).slice(0, index=stage, keepdims=False) for stage in (0, 1))
    one = nn.DistributedLinear(first, in_features=6, out_features=8)
    two = nn.DistributedLinear(second, in_features=8, out_features=4)
    tensors = [*of_product(one, "x", "h"), *of_product(two, "h, moved", "y")]
    return in_a_row("A team for each layer", tensors, TIMES + "=\N{RIGHTWARDS ARROW}" + TIMES + "=")


TIMES = "\N{MULTIPLICATION SIGN}"


def product(title: str, layer: nn.DistributedLinear) -> Drawing:
    return in_a_row(title, of_product(layer, "x: samples, features", "y"), TIMES + "=")


def of_product(layer: nn.DistributedLinear, x_name: str, y_name: str) -> list[Blocks]:
    """Return x, the weight, turned as it multiplies, and y of a linear layer."""
    x = dj.TensorSpec((8, layer.in_features), layer.P_x)
    w = spec_as_blocks(layer.param_specs()["weight"])
    turned = tuple(DrawnBlock(block.workers, block.box[::-1]) for block in w.blocks)
    weight = Blocks("W, turned", w.shape[::-1], w.grid[::-1], turned, workers=w.workers)
    return [spec_as_blocks(x, x_name), weight, spec_as_blocks(layer.output_spec(x), y_name)]


def in_a_row(title: str, tensors: list[Blocks], signs: str) -> Drawing:
    """Return tensors beside each other, with signs between; entries are as large in all of them."""
    longest = max(n for tensor in tensors for n in tensor.shape)
    parts: list[Part] = []
    for sign, tensor in zip(f" {signs}", tensors, strict=True):
        if sign != " ":
            parts.append(Part(16, 120, (text(8, 90, sign, 22, fill=GREY),)))
        drawn = lay_out(tensor, size=190 * max(tensor.shape[-2:]) / longest).part
        parts.append(below([heading(tensor.name, 12), drawn], 4))
    about = " ".join(f"{tensor.title}." for tensor in tensors)
    return Drawing(document(title, about, beside(parts, 14, 2000)), about)


# --- The picture of README -------------------------------------------------------------------------------------------


def overview() -> Drawing:
    """Return a volume in blocks, its halos, and the memory of a worker by the number of workers."""
    P_8 = dj.planning_world(8).grid([1, 1, 2, 2, 2])
    spec = dj.TensorSpec((1, 1, 64, 64, 64), P_8)
    layer = nn.DistributedConv3d(P_8, in_channels=1, out_channels=8, kernel_size=3, padding=1)
    x = {worker: dj.ShapeDtype(spec.shape_on(worker), np.dtype("float32")) for worker in P_8.ranks}
    before = spec_as_blocks(spec)
    chain = Counter(P_8.world, np.dtype("float32")).chain(layer, layer.plan(x), x)
    (exchange, *_) = steps_of(forward_movements(chain), P_8.ranks, before)
    halos = draw_halos(before, exchange.pieces)
    head = heading("A volume in eight blocks, one a worker; neighbours exchange halos", 14)
    memory = below([heading("Memory of the fullest worker, one training step", 14, 30), _bars()], 14)
    title = "A volume in blocks, halos between them, and the memory of a worker by the number of workers"
    about = "; ".join(f"{n} workers: {gb:.2f} GB" for n, gb in _memory())
    return Drawing(document(title, about, beside([below([head, halos], 8), memory], 40, 2000)), about)


GRIDS = {1: [1, 1, 1, 1, 1], 2: [1, 1, 2, 1, 1], 4: [1, 1, 2, 2, 1], 8: [1, 1, 2, 2, 2]}
SIDE = 128


def u_net(P_x: dj.CartesianPartition, channels: int = 16, levels: int = 3) -> nn.Sequential:
    """Return a U-Net in three dimensions, whose skips are sums."""

    def twice(n: int, m: int) -> list[object]:
        sizes = [(n, m), (m, m)]
        convs = [nn.DistributedConv3d(P_x, in_channels=a, out_channels=b, kernel_size=3, padding=1) for a, b in sizes]
        return [convs[0], jax.nn.relu, convs[1], jax.nn.relu]

    def level(n: int, left: int) -> list[object]:
        if not left:
            return twice(n, n)
        down = [nn.DistributedMaxPool3d(P_x, 2), *twice(n, 2 * n), *level(2 * n, left - 1)]
        up = nn.DistributedConvTranspose3d(P_x, in_channels=2 * n, out_channels=n, kernel_size=2, stride=2)
        return [nn.Residual(nn.Sequential(*down, up)), *twice(n, n)]

    last = nn.DistributedConv3d(P_x, in_channels=channels, out_channels=1, kernel_size=1)
    return nn.Sequential(*twice(1, channels), *level(channels, levels), last)


def _memory() -> Iterator[tuple[int, float]]:
    """Yield the bytes of the fullest worker, in GB, by the number of workers."""
    for n, shape in GRIDS.items():
        P_x = dj.planning_world(n).grid(shape)
        cost = dj.cost(u_net(P_x), dj.TensorSpec((1, 1, SIDE, SIDE, SIDE), P_x))
        yield n, cost.memory.max() / 1e9


def _bars() -> Part:
    found = list(_memory())
    most, body, height = max(gb for _, gb in found), [], 170.0
    for place, (n, gb) in enumerate(found):
        x, h = 62.0 * place, height * gb / most
        body.append(rect((x, 20 + height - h, 44, h), "#a6d5f2", about=f"{n} workers: {gb:.2f} GB"))
        body.append(text(x + 22, 15 + height - h, f"{gb:.2f} GB", 12))
        body.append(text(x + 22, 38 + height, n, 13))
    body.append(text(62 * 2 - 9, 58 + height, "workers", 12, fill=GREY))
    lines = [f"3-D U-Net on {SIDE} x {SIDE} x {SIDE} voxels, float32, Adam;", "predicted by dj.cost"]
    width = max(62.0 * len(found), *(width_of(each, 11) for each in lines))
    return below([Part(width, 64 + height, tuple(body)), words(lines, 11)], 6)


def gallery_rows() -> Drawing:
    return dj.draw(dj.TensorSpec((10, 4), P.grid([4, 1])))


def gallery_halves() -> Drawing:
    return dj.draw(dj.TensorSpec((1, 1, 28, 28), dj.planning_world(2).grid([1, 1, 1, 2])))


def gallery_advice() -> Drawing:
    return dj.draw(dj.TensorSpec((2, 8, 64, 64, 64), dj.planning_world(8).grid([2, 1, 2, 2, 1])))


def gallery_plate() -> Drawing:
    return dj.draw(dj.TensorSpec((24, 24), P.grid([2, 2])))


PICTURES: dict[str, Callable[[], Drawing]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        *(grid, blocks, volume, repartition, halo_exchange, broadcast, sum_reduce, convolution, messages, plan),
        *(
            cut_samples,
            cut_space,
            cut_features,
            cut_weight,
            teams,
            overview,
            gallery_rows,
            gallery_halves,
            gallery_plate,
        ),
    )
}


def main() -> None:
    """Draw each picture to a file of its name."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    for name, picture in PICTURES.items():
        picture().save(folder / f"{name}.svg")
        print(f"wrote {folder / name}.svg")


if __name__ == "__main__":
    main()

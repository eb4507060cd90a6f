"""Draws who holds what for docs/partitions.md: python tools/draw_partitions.py [docs/partitions]

Blocks and workers are those that the library's own layers and specs say, planned for four workers.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # no screen
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

import distdl_jax as dj
from distdl_jax import nn

COLORS = ("#9ecae9", "#ffbf79", "#88d27a", "#d6a5c9")  # of the workers; black text reads well on all of them
GREY = "#7d8590"  # of the text: it reads well on white and on black
WORKERS = len(COLORS)
UNIT = 0.3  # of length of a tensor, in the picture


class Drawn(NamedTuple):
    """A tensor: its name, who holds what, the two dimensions that are drawn, and what stands in front of it."""

    name: str
    spec: dj.TensorSpec
    dims: tuple[int, int]
    before: str = ""


def batch(P: dj.Partition) -> list[Drawn]:
    return product(nn.DistributedLinear(P.grid([4, 1]), in_features=6, out_features=5))


def space(P: dj.Partition) -> list[Drawn]:
    conv = nn.DistributedConv2d(P.grid([1, 1, 2, 2]), in_channels=1, out_channels=1, kernel_size=3, padding=1)
    x = dj.TensorSpec((1, 1, 8, 8), conv.P_x)
    weight, y = conv.param_specs()["weight"], conv.output_spec(x)
    return [Drawn("x: rows, columns", x, (2, 3)), Drawn("kernel", weight, (2, 3), "*"), Drawn("y", y, (2, 3), "=")]


def features(P: dj.Partition) -> list[Drawn]:
    return product(nn.DistributedLinear(P.grid([1, 4]), in_features=6, out_features=8, split="out_features"))


def weights(P: dj.Partition) -> list[Drawn]:
    P_W = P.grid([1, 2, 2])
    P_x, P_y = P_W.slice(1, keepdims=False), P_W.slice(2, keepdims=False)
    return product(nn.DistributedLinear(P_x, P_y, P_W, in_features=6, out_features=8))


def pipeline(P: dj.Partition) -> list[Drawn]:
    first, second = (P.grid([2, 1, 2]).slice(0, index=stage, keepdims=False) for stage in (0, 1))
    one = nn.DistributedLinear(first, in_features=6, out_features=8)
    two = nn.DistributedLinear(second, in_features=8, out_features=4)
    (x, weight, h), (moved, *rest) = product(one), product(two)
    return [x, weight, h._replace(name="h"), moved._replace(name="h, moved", before="→"), *rest]


def product(layer: nn.DistributedLinear) -> list[Drawn]:
    """Return x, the weight, turned as it multiplies, and y of a linear layer."""
    x = dj.TensorSpec((8, layer.in_features), layer.P_x)
    weight, y = layer.param_specs()["weight"], layer.output_spec(x)
    times = "\N{MULTIPLICATION SIGN}"
    return [Drawn("x: samples, features", x, (0, 1)), Drawn("Wᵀ", weight, (1, 0), times), Drawn("y", y, (0, 1), "=")]


def draw(axes: Axes, picture: Callable[[dj.Partition], list[Drawn]]) -> tuple[float, float]:
    """Draw tensors beside each other, and return the width and the height of it all."""
    seen = [picture(dj.planning_world(WORKERS, worker)) for worker in range(WORKERS)]
    tallest = max(tensor.spec.global_shape[tensor.dims[0]] for tensor in seen[0]) * UNIT
    left = 0.0
    text = {"ha": "center", "va": "center", "fontsize": 9}
    for of_workers in zip(*seen, strict=True):
        tensor = of_workers[0]
        rows, columns = (tensor.spec.global_shape[d] * UNIT for d in tensor.dims)
        width = max(columns, 0.09 * len(tensor.name))
        if tensor.before:
            axes.text(left + 0.25, tallest / 2, tensor.before, color=GREY, **(text | {"fontsize": 14}))
            left += 0.5
        start, top = left + (width - columns) / 2, (tallest - rows) / 2
        for worker, own in enumerate(of_workers):
            if own.spec.box is not None:
                (a, b), (c, d) = (tuple(bound * UNIT for bound in own.spec.box[axis]) for axis in own.dims)
                place = (start + c, top + a)
                axes.add_patch(Rectangle(place, d - c, b - a, facecolor=COLORS[worker], edgecolor="black"))
                axes.text(start + (c + d) / 2, top + (a + b) / 2, f"{worker}", color="black", **text)
        axes.text(left + width / 2, tallest + 0.2, tensor.name, color=GREY, **text)
        left += width
    return left, tallest + 0.4


def main() -> None:
    """Draw each picture to a file of its name."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/partitions")
    folder.mkdir(parents=True, exist_ok=True)
    pyplot.rcParams["svg.hashsalt"] = "partitions"  # so that the files change with the pictures alone
    for picture in (batch, space, features, weights, pipeline):
        figure = pyplot.figure()
        axes = figure.add_axes((0, 0, 1, 1))
        width, height = draw(axes, picture)
        axes.set(xlim=(-0.1, width + 0.1), ylim=(height, -0.1))
        axes.set_axis_off()
        figure.set_size_inches(width + 0.2, height + 0.1)
        file = folder / f"{picture.__name__}.svg"
        figure.savefig(file, transparent=True, metadata={"Date": None})
        print(f"wrote {file}")


if __name__ == "__main__":
    main()

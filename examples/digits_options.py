"""The command line of digits_mlp.py: above all, in how many blocks each layer's weight is cut."""

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

Shape = tuple[int, int]

# From a number of workers and of layers to the layers' P_fo x P_fi: workers along the outputs, along the inputs.
LAYOUTS: dict[str, Callable[[int, int], list[Shape]]] = {
    "mixed": lambda n, layers: [_near_square(n)] + [(n if n < 3 else n - 1, 1)] * (layers - 2) + [(1, n)],
    "inputs": lambda n, layers: [(1, n)] * layers,
    "outputs": lambda n, layers: [(n, 1)] * (layers - 1) + [(1, 1)],
    "whole": lambda n, layers: [(1, 1)] * layers,
}
PARTITION_HELP = """
how the weights are cut, P_fo x P_fi: workers along a weight's outputs, workers along its inputs. 'mixed' (default):
each layer in another way, on 4 workers 2x2,3x1,1x4; 'inputs': all 1xN; 'outputs': all Nx1 but the last; 'whole': none
is cut, all 1x1. Or a shape for all layers, as in 2x2 (1x2 in the last layer), or one for each, as in 1x4,3x1,1x2.
"""


def parse(workers: int, rank: int, layers: int, dtypes: list[str]) -> argparse.Namespace:
    """Parse the command line's options; `partition` becomes one shape for each layer."""
    parser = _Parser(rank, description="Train a model-parallel network on handwritten digits.")
    shapes = partial(weight_shapes, workers=workers, layers=layers)
    parser.add_argument("--partition", type=shapes, default="mixed", help=PARTITION_HELP, metavar="SHAPES")
    parser.add_argument("--dtype", default=dtypes[0], choices=dtypes)
    parser.add_argument("--epochs", type=_positive, default=20)
    parser.add_argument(
        "--batch-size", type=_positive, default=128, help="images a step; the last of an epoch has fewer"
    )
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--out", type=Path, default=Path("out/digits_mlp.png"), help="where the training curve goes")
    return parser.parse_args()


class _Parser(argparse.ArgumentParser):
    """Every worker reads the same command line, so one of them is enough to complain about it."""

    def __init__(self, rank: int, **settings: str) -> None:
        super().__init__(**settings)
        self.rank = rank

    def _print_message(self, *message) -> None:
        if self.rank == 0:
            super()._print_message(*message)


def weight_shapes(text: str, workers: int, layers: int) -> list[Shape]:
    """Return the shape of each layer's weight partition; refuse what the workers, or the network, don't allow."""
    if text in LAYOUTS:
        return LAYOUTS[text](workers, layers)
    shapes = [_shape(part) for part in text.split(",")]
    if len(shapes) == 1:
        shapes = shapes * (layers - 1) + [(1, shapes[0][1])]
    if len(shapes) != layers:
        raise argparse.ArgumentTypeError(
            f"{text} has {len(shapes)} shapes; give one, or one for each of {layers} layers."
        )
    for number, (P_fo, P_fi) in enumerate(shapes, start=1):
        if P_fo * P_fi > workers:
            raise argparse.ArgumentTypeError(
                f"layer {number} on {P_fo}x{P_fi} takes {P_fo * P_fi} workers, but there are {workers}: start it with "
                f"mpirun -n {P_fo * P_fi} or more, or give a smaller shape."
            )
    if shapes[-1][0] != 1:
        raise argparse.ArgumentTypeError(
            f"the last layer on {shapes[-1][0]}x{shapes[-1][1]} splits the classes, but the softmax takes "
            "all classes of an image on one worker: its shape must be 1 x something."
        )
    return shapes


def _shape(text: str) -> Shape:
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither {', '.join(LAYOUTS)} nor a shape P_fo x P_fi such as 2x2."
        )
    return int(sizes[0]), int(sizes[1])


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer, 1 or more.")
    return int(text)


def _near_square(n: int) -> Shape:
    rows = max(rows for rows in range(1, math.isqrt(n) + 1) if n % rows == 0)
    return rows, n // rows

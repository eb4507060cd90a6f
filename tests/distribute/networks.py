"""Networks written without the library, on blocks, beside one process.

`python -m distribute.networks [NAMES]` runs all whose packages are installed: the loss, its gradients with the
derivative inside and outside, and three steps of Adam.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from distribute import others_networks, own_networks  # noqa: F401  they register networks
from distribute.beside_one_process import NETWORKS, problem


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

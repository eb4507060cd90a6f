"""LeNet-5 on partitioned images, as in the paper that DistDL comes from, beside the same network on one worker.

    mpirun -n 4 python -m distdl_jax examples/lenet5.py
    mpirun -n 4 python -m distdl_jax examples/lenet5.py --mnist FOLDER_WITH_THE_IDX_FILES
    python examples/lenet5.py --simulate 4
    srun --mpi=pmi2 --kill-on-bad-exit=1 python -m distdl_jax examples/lenet5.py    # on a cluster

Images are cut along height and width (2 x 2 on four workers), and so are the linear layers' weights along outputs and
inputs. In between, the tensor changes from blocks of pixels to blocks of channels.

    images          on the first worker                       n x 1 x 28 x 28
    conv, pool      on P_f, 1 x 1 x 2 x 2                      n x 6 x 14 x 14, with neighbours' rows and columns
    conv, pool      on P_f                                    n x 16 x 5 x 5
    flatten         on P_x, 1 x 2, by way of the channels      n x 400
    three linear    weights on 2 x 2, 2 x 2 and 1 x 2          n x 120, n x 84, n x 10

Source: Hewett and Grady (2020), arXiv:2006.03108, the experiment; LeCun et al. (1998), the network.
"""

import argparse
import gzip
import math
import os
import sys
from functools import partial
from pathlib import Path

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
import optax
from distdl_jax import nn
from jax import lax

import launch
from training import DIFFERENCE, Data, say, train_both

ACCURACY = 0.98
CLASSES = 10

Params = tuple[dict[str, jax.Array], ...]


def lenet5(P_world: dj.Partition) -> nn.Sequential:
    """Build the network on all workers: images and weights on grids that are as square as can be.

    From the images on the first worker to the logits, n x 10, there; elsewhere both are n x 0.
    """
    rows = max(rows for rows in range(1, math.isqrt(P_world.size) + 1) if P_world.size % rows == 0)
    columns = P_world.size // rows
    P_f = P_world.grid([1, 1, rows, columns])
    P_x = P_world.grid([1, columns])
    P_y = P_world.grid([1, rows])
    P_W = P_world.grid([rows, columns])
    return nn.Sequential(
        nn.Repartition(P_world.grid([1, 1, 1, 1]), P_f),
        nn.DistributedConv2d(P_f, in_channels=1, out_channels=6, kernel_size=5, padding=2),
        jax.nn.relu,
        nn.DistributedMaxPool2d(P_f, 2),
        nn.DistributedConv2d(P_f, in_channels=6, out_channels=16, kernel_size=5),
        jax.nn.relu,
        nn.DistributedMaxPool2d(P_f, 2),
        nn.Repartition(P_f, P_world.grid([1, columns, 1, 1])),
        flattened,
        nn.Repartition(P_x, P_x),  # whole channels may be uneven blocks of the 400 features
        nn.DistributedLinear(P_x, P_y, P_W, 400, 120),
        jax.nn.relu,
        nn.Repartition(P_y, P_x),
        nn.DistributedLinear(P_x, P_y, P_W, 120, 84),
        jax.nn.relu,
        nn.Repartition(P_y, P_x),
        nn.DistributedLinear(P_x, P_world.grid([1, 1]), P_world.grid([1, columns]), 84, CLASSES),
    )


def flattened(x: jax.Array) -> jax.Array:
    """Flatten each image's channels, rows and columns into one dimension."""
    return x.reshape(len(x), -1)


def sequential_lenet5(params: Params, images: jax.Array) -> jax.Array:
    """Compute the same network on one worker, in plain JAX."""
    x, layers = images, [layer for layer in params if layer]
    for i, layer in enumerate(layers[:2]):
        x = lax.conv_general_dilated(x, layer["weight"], (1, 1), [(2, 2), (2, 2)] if i == 0 else "VALID")
        x = jax.nn.relu(x + layer["bias"][:, None, None])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = flattened(x)
    for i, layer in enumerate(layers[2:]):
        x = x @ layer["weight"].T + layer["bias"]
        x = jax.nn.relu(x) if i < 2 else x
    return x


def read_digits(dtype: str) -> tuple[Data, Data]:
    """scikit-learn's 1,797 digits, brought from 8 x 8 to 28 x 28; every fifth one is to test on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = jax.image.resize(jnp.asarray(digits.images / 16), (len(digits.images), 28, 28), "linear")
    images = np.asarray(images, dtype)[:, None]
    labels = np.eye(CLASSES, dtype=dtype)[digits.target]
    test = np.arange(len(images)) % 5 == 0
    return Data(images[~test], labels[~test]), Data(images[test], labels[test])


def read_mnist(folder: Path, dtype: str) -> tuple[Data, Data]:
    """MNIST from its four IDX files, zipped or not."""

    def read(name: str) -> np.ndarray:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.exists():
                content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                shape = np.frombuffer(content, ">u4", content[3], offset=4)
                return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)
        raise SystemExit(f"--mnist: {folder} holds neither {name} nor {name}.gz.")

    def data(part: str) -> Data:
        images = read(f"{part}-images-idx3-ubyte").astype(dtype)[:, None] / 255
        return Data(images, np.eye(CLASSES, dtype=dtype)[read(f"{part}-labels-idx1-ubyte")])

    return data("train"), data("t10k")


def local_blocks(network: nn.Sequential, data: Data) -> Data:
    """Return this worker's block of `data`: images where the network takes them, labels where its output is."""
    nothing = data.labels[:, :0]
    return Data(
        images=data.images if network[0].P_x.active else nothing,
        labels=data.labels if network[-1].P_y.active else nothing,
    )


def main() -> int:
    launch.simulate_if_asked()
    parser = argparse.ArgumentParser(description="Train LeNet-5 on partitioned images.")
    parser.add_argument("--mnist", type=Path, metavar="FOLDER", help="train on MNIST's IDX files instead of the digits")
    parser.add_argument("--dtype", default="float64", choices=list(DIFFERENCE))
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images a step; the last of an epoch has fewer")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at the start; it falls to 0 along a cosine")
    parser.add_argument("--out", type=Path, default=Path("out/lenet5.png"), help="where the training curve goes")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.dtype == "float64")

    P_world = dj.Partition()
    read = partial(read_mnist, options.mnist) if options.mnist else read_digits
    data = P_world.broadcast_data(read(options.dtype) if P_world.rank == 0 else None)
    network = lenet5(P_world)
    training, tested = len(data[0].images), len(data[1].images)
    steps = options.epochs * math.ceil(training / options.batch_size)
    options.learning_rate = optax.cosine_decay_schedule(options.learning_rate, steps)
    say(f"{P_world.size} workers, {options.dtype}, {training} images to train on, {tested} to test on")
    say(network.table(options.dtype))

    good = train_both(
        network,
        sequential_lenet5,
        network.param_specs(),
        network.init(jax.random.key(0), options.dtype),
        data,
        partial(local_blocks, network),
        options,
        ACCURACY,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

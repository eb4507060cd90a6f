"""scikit-learn's handwritten digits, enlarged, for the examples that classify images."""

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
import optax
from distdl_jax import nn

import beside
from training import say

CLASSES = 10


def read(size: int, dtype: str) -> tuple[beside.Arrays, beside.Arrays]:
    """Images, n_b x 1 x size x size, and labels, n_b x 10, one-hot; every fifth image is to test on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = jax.image.resize(jnp.asarray(digits.images / 16), (len(digits.images), size, size), "linear")
    images = np.asarray(images, dtype)[:, None]
    labels = np.eye(CLASSES, dtype=dtype)[digits.target]
    test = np.arange(len(images)) % 5 == 0
    return (images[~test], labels[~test]), (images[test], labels[test])


def losses(P_y: dj.Partition) -> tuple:
    """Return this worker's part of the mean cross entropy of logits on `P_y` and one-hot labels, and the whole loss."""
    return nn.DistributedCrossEntropyLoss(P_y), lambda y, target: optax.softmax_cross_entropy(y, target).mean()


def report(logits: jax.Array, tested: beside.Arrays, losses: list[float], out: beside.Path) -> None:
    """Say how many of the images are read, and draw some of them, on the worker that has the logits."""
    said = np.asarray(logits).argmax(axis=1)
    right = np.mean(said == tested[1].argmax(axis=1))
    say(f"Test accuracy: {right:.4f}")
    panels = {f"image {n + 1}, read as {said[n]}": tested[0][n, 0] for n in range(3)}
    beside.draw(panels, losses, out)

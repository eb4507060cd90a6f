"""Which partition each layer of a 3-D residual U-Net should have, asked of `dj.advise`.

    python -m distdl_jax advise examples/advise_unet3d.py --workers 64 --memory 40GiB
    python examples/advise_unet3d.py

The network is described without partitions: convolutions with residuals at each level, on the way down and up. As a
program, this file prints the estimate for 8 workers, and what data parallelism alone would cost. In a job, ask with
`workers=dj.Partition()`: then the plans are measured.
"""

import os

os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
from distdl_jax import nn


def level(channels: int) -> list:
    """Return a convolution, and a residual of another one."""
    conv = nn.conv3d(out_channels=channels, kernel_size=3, padding="same")
    return [conv, nn.batch_norm(), jax.nn.relu, nn.skip(conv, nn.batch_norm(), jax.nn.relu)]


x_shape = (2, 1, 64, 64, 64)
network = [
    *level(8),
    nn.max_pool3d(kernel_size=2),
    *level(16),
    nn.conv_transpose3d(out_channels=8, kernel_size=2, stride=2),
    *level(8),
    nn.conv3d(out_channels=1, kernel_size=1),
]

if __name__ == "__main__":
    advice = dj.advise(network, x_shape, workers=8)
    print(advice)
    print(advice.network)
    forced = advice.why(0, (2, 1, 1, 1, 1))
    counted = f"{forced.memory / 1e6:.0f} MB, {forced.messages} messages"
    print("The first convolution on two workers, one sample each:", counted)

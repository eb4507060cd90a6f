"""Show that an installed distdl_jax works: a split layer equals the same one in plain JAX, and no file is missing.

python smoke.py                                # four workers on threads, without MPI
mpiexec -n 2 python -m distdl_jax smoke.py     # over MPI
"""

from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from distdl_jax import nn

SHAPE = (2, 3, 15, 8)


def train() -> None:
    """Compare the loss and the gradients of a split convolution with those of the same one in plain JAX."""
    P_x = dj.Partition()
    P_x = P_x.grid([1, 1, P_x.size, 1])  # rows are split, unevenly
    spec = dj.TensorSpec(SHAPE, P_x)
    layer = nn.DistributedConv2d(P_x, in_channels=3, out_channels=4, kernel_size=3, padding=1)
    params = layer.init(jax.random.key(0))
    whole = jax.random.normal(jax.random.key(1), SHAPE)

    def plain_loss(weight: jax.Array, bias: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(whole, weight, (1, 1), "SAME") + bias.reshape(1, -1, 1, 1)
        return (jnp.tanh(y) ** 2).sum()

    step = dj.jit(dj.value_and_grad(lambda params, x: (jnp.tanh(layer(params, x)) ** 2).sum()))
    value, gradient = step(params, spec.block(whole))
    if P_x.rank:  # the weights are worker 0's
        return
    expected, wanted = jax.value_and_grad(plain_loss, argnums=(0, 1))(params["weight"], params["bias"])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, gradient_in_jax in zip(("weight", "bias"), wanted, strict=True):
        np.testing.assert_allclose(gradient[name].ravel(), gradient_in_jax.ravel(), rtol=1e-4, atol=1e-4)


def main() -> None:
    """Run the step on all workers of the job, or on four threads where there is no job."""
    package = files("distdl_jax")
    for name in ("py.typed", "kernels/onednn.cc"):
        assert package.joinpath(name).is_file(), f"{name} is missing in {package}"
    job = dj.Partition()
    if job.size == 1:
        dj.simulate(4, train)
    else:
        train()
    if job.rank == 0:
        workers = f"{job.size} processes" if job.size > 1 else "four threads"
        print(f"distdl_jax {dj.__version__}, jax {jax.__version__}: {workers} agree with plain JAX")


if __name__ == "__main__":
    main()

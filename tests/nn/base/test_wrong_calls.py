"""What strangers have got wrong is refused in a sentence, on every worker that can know of it."""

import jax.numpy as jnp
import pytest

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional import halo_exchange

pytestmark = [pytest.mark.world(3), pytest.mark.simulated(3)]


@pytest.mark.parametrize("derivative", [dj.value_and_grad, dj.grad, lambda fun: dj.jit(dj.grad(fun))])
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda x: 2 * x, r"an array of shape \(3,\): return its sum divided by the size of the whole tensor"),
        (lambda x: None, "NoneType"),
        (lambda x: {"loss": jnp.sum(x)}, "dict"),
    ],
)
def test_a_loss_that_is_no_scalar(derivative, loss, words):
    with pytest.raises(dj.InvalidTypeError, match=f"must return a scalar loss, but returned {words}"):
        derivative(loss)(jnp.ones(3))
    value, gradient = dj.value_and_grad(lambda x: 2.0)(jnp.ones(3))  # a number of Python's is one
    assert value == 6.0 and gradient.tolist() == [0, 0, 0]


@pytest.mark.parametrize("halo", ["anything", 3, None, 1.5, ((1,),), ((1, 1), (1, 1)), (("a", "b"),)], ids=str)
def test_a_halo_that_is_none(halo):
    """When the layer is made, on all workers."""
    with pytest.raises(dj.InvalidArgumentError, match="must be 1 pairs"):
        nn.HaloExchange(dj.Partition().grid([3]), halo)


def test_widths_of_another_partition_are_refused_on_all_workers():
    """Also on those that are not in it, if they give any."""
    P = dj.Partition().grid([2])
    x = jnp.ones((2, 3)) if P.active else dj.zero_volume_tensor()
    with pytest.raises(dj.InvalidArgumentError, match="must be 1 pairs"):
        halo_exchange(x, P, ((1, 1), (1, 1)))
    y = halo_exchange(jnp.ones(3) if P.active else x, P, ((0, 0),) if P.active else ())
    assert y.shape == ((3,) if P.active else (0,))


@pytest.mark.parametrize("fun", [3, "step", (len,)])
def test_what_is_no_function_is_not_compiled(fun):
    with pytest.raises(dj.InvalidTypeError, match="must be a function"):
        dj.jit(fun)

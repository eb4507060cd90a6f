"""The linear layer gives, block for block, what the sequential layer gives: y = x W^T + b and all its gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.examples import LONG
from linear_cases import LinearCase, check_together

import distdl_jax as dj
from distdl_jax import nn

CASES = {
    1: [
        LinearCase((0,), (0,), (0,), (1, 1), 5, 3),
        LinearCase((0,), (0,), (0,), (1, 1), 1, 1, bias=False),
        LinearCase((0,), (0,), (0,), (1, 1), 4, 3, lead=(2, 1, 3)),
    ],
    2: [
        LinearCase((0, 1), (0,), (0, 1), (1, 2), 5, 3),
        LinearCase((1,), (0, 1), (0, 1), (2, 1), 4, 3),
        LinearCase((0,), (1,), (1,), (1, 1), 4, 3),  # all of it elsewhere than the input
        LinearCase((1, 0), (1,), (0, 1), (1, 2), 1, 3),  # a worker with an empty block of one feature
        LinearCase((0, 1), (0, 1), (0, 1), (2, 1, 1), 4, 3),  # the batch split alone: data parallelism
        LinearCase((1, 0), (0, 1), (1, 0), (2, 1, 1), 4, 3, lead=(3, 2), bias=False),
        LinearCase((0, 1), (1, 0), (1, 0), (2, 1, 1), 4, 1, sharded=True),  # one worker has no share of the parameters
    ],
    4: [
        LinearCase((0, 1), (0, 1), (0, 1, 2, 3), (2, 2), 7, 5),  # overlapping
        LinearCase((3, 1), (0, 2), (2, 0, 3, 1), (2, 2), 6, 4, lead=(2, 3)),  # permuted
        LinearCase((0,), (1, 2), (3, 2), (2, 1), 3, 4),  # the input's worker has no weight
        LinearCase((0, 1), (2,), (1, 3), (1, 2), 7, 3, bias=False),
        LinearCase((0, 1, 2), (3,), (1, 2, 3), (1, 3), 7, 2),  # 7 features over 3 workers
        LinearCase((3,), (0, 1, 2), (0, 1, 2), (3, 1), 3, 2),  # 2 over 3: an empty block of the output
        LinearCase((3, 0, 1), (2,), (0, 1, 2), (1, 3), 2, 3),  # 2 over 3: an empty block of the input
        LinearCase((2,), (2,), (2,), (1, 1), 3, 3, lead=(1,)),  # three workers have nothing to do
        LinearCase((1, 2), (2, 1), (0, 3, 1, 2), (2, 2), 5, 7, lead=(0,)),  # no samples
        LinearCase((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (4, 1, 1), 3, 2),  # 3 samples over 4 workers
        LinearCase((3, 0, 2, 1), (1, 2), (2, 3, 1, 0), (2, 1, 2), 5, 3, lead=(3, 2)),  # with the input's features
        LinearCase((0, 3), (2, 0, 1, 3), (1, 2, 3, 0), (2, 2, 1), 4, 3, lead=(5,)),  # with the output's features
        LinearCase((0, 1), (1, 2), (2, 3), (2, 1, 1), 3, 4),  # teams that overlap in part
        LinearCase((0, 1), (1, 0), (2, 3), (2, 1, 1), 3, 4, bias=False),  # disjoint from the weight's
        LinearCase((0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 2, 3), (4, 1, 1), 2, 3, lead=(6,), batches=(0, 4, 2, 0)),
        LinearCase((0, 1), (2, 3), (3, 1), (2, 1, 1), 2, 3, lead=(4, 1, 2), batches=(1, 3)),
        LinearCase((3, 1), (0, 2), (1, 0, 3, 2), (1, 2, 2), 7, 5),  # three dimensions, and the batch whole
        LinearCase((3, 0, 2, 1), (1, 2), (2, 3, 1, 0), (2, 1, 2), 5, 3, sharded=True),
        LinearCase((0, 3), (2, 0, 1, 3), (1, 2, 3, 0), (2, 2, 1), 4, 6, lead=(5,), bias=False, sharded=True),
    ],
    12: [
        LinearCase((0, 1, 2, 3), (4, 5, 6), tuple(range(12)), (3, 4), 16, 12, lead=(1,)),  # the documentation's
        LinearCase((11, 3, 5), (0, 11, 2, 4), (*range(11, 5, -1), *range(6)), (4, 3), 10, 9),
        LinearCase((4, 5, 6, 7), (11, 0, 1, 2, 3, 9), tuple(range(12)), (2, 3, 2), 7, 5),
        LinearCase(tuple(range(12)), (*range(6, 12), *range(6)), (*range(11, -1, -1),), (12, 1, 1), 3, 4, lead=(11,)),
        LinearCase((4, 5, 6), (11, 0, 1, 2, 3, 9, 4, 5, 6), (*range(1, 10),), (3, 3, 1), 2, 8, sharded=True),
    ],
}


# What each case gives by itself, in turns: the output, without a gradient, or one gradient. All of it in a long run.
ALONE = [["bias"], ["y"], ["x"], ["weight"]] if LONG == 1 else [["bias", "y", "x", "weight"]]


@pytest.mark.world(1, 2, 4)
@pytest.mark.simulated(12)
def test_forward_and_every_gradient_under_jit(world_size):
    """x, W and b differentiated together, and one of them alone: to 1e-12 in float64, in one compiled program."""
    check_together(CASES[world_size], ALONE if world_size < 12 or LONG > 1 else ((),))


@pytest.mark.world(4)
def test_bias_alone_and_everything_eagerly():
    """Without jit each operation runs as it comes: differentiating one argument alone must not leave others waiting."""
    case = LinearCase((0, 1), (2,), (3, 1), (1, 2), 3, 2)
    params, x, c = case.local()
    bias = jax.grad(lambda bias: case.loss({**params, "bias": bias}, x, c)[0])(params["bias"])
    assert bias.size == (2 if dj.Partition().rank == 3 else 0)
    case.check({"y": case.layer(params, x), "alone": {"bias": bias}, "together": {}})
    case.check(case.program(params, x, c))


def random_case(seed: int, world: int) -> LinearCase:
    """Any shape of P_W that fits into the world, any teams, any sizes: empty blocks and empty batches too."""
    draw = np.random.default_rng(seed)
    upto = range(1, world + 1)
    shapes = [(n, rows, columns) for n in upto for rows in upto for columns in upto if n * rows * columns <= world]
    n, rows, columns = shapes[draw.integers(len(shapes))]
    ranks = [tuple(map(int, draw.permutation(world)[: n * each])) for each in (columns, rows, rows * columns)]
    lead = tuple(map(int, draw.integers(0 if draw.random() < 0.1 else 1, 4, size=draw.integers(1, 4))))
    n_in, n_out = map(int, draw.integers(1, 9, size=2))
    batches = None if n == 1 or draw.random() < 0.5 else tuple(map(int, draw.multinomial(lead[0], np.full(n, 1 / n))))
    shape = (rows, columns) if n == 1 and draw.random() < 0.7 else (n, rows, columns)
    bias, sharded = (bool(its) for its in draw.random(2) < (0.7, 0.4))
    return LinearCase(*ranks, shape, n_in, n_out, lead, bias, batches, sharded)


@pytest.mark.simulated(4)
@pytest.mark.parametrize("batch", range(20 if LONG > 1 else 1))
def test_random_partitions_and_sizes(batch):
    """Ten random layers in a program: forward and all gradients together."""
    check_together([random_case(10 * batch + i, 4) for i in range(10)])


@pytest.mark.simulated(4)
def test_every_dtype():
    """float32 within a few roundings of each sum; half, complex and mixed precision as sequentially."""
    case = LinearCase((0, 1), (3, 2), (0, 1, 2, 3), (2, 2), 7, 5)
    (params, x, _), held = case.local(), case.partitions
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        result = jax.jit(lambda p, x, c: case.program(p, x, c))(*case.local(dtype))
        # A few roundings of terms that are larger than their sum; the input and the weights are rounded too.
        case.check(result, rtol=8 * float(jnp.finfo(dtype).eps), dtype=dtype)
    mixed = jax.jit(case.layer)(params, x.astype(jnp.float32))
    assert mixed.dtype == float
    if held[1].active:
        np.testing.assert_allclose(mixed, case.cut(case.expected)["y"], rtol=0, atol=1e-5)

    turn = np.exp(1j * np.arange(7))
    whole = {**case.data, "x": case.data["x"] * turn, "weight": case.data["weight"] * turn}

    def sequential(weight, bias, x):
        return jnp.sum(jnp.abs(x @ weight.T + bias) ** 2)

    names = ("weight", "bias", "x")
    expected = jax.grad(sequential, argnums=(0, 1, 2))(
        *(jax.device_put(np.asarray(whole[name], complex)) for name in names)
    )
    mine = case.cut(whole, jnp.complex64)
    gradients = jax.jit(
        jax.grad(lambda w, b, x: jnp.sum(jnp.abs(case.layer({"weight": w, "bias": b}, x)) ** 2), argnums=(0, 1, 2))
    )(*(mine[name] for name in names))
    blocks = case.cut({name: np.asarray(g) for name, g in zip(names, expected, strict=True)}, complex)
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.dtype == jnp.complex64
        np.testing.assert_allclose(gradient, blocks[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.world(4)
def test_wrong_blocks_raise_on_every_worker_of_the_layer():
    """One worker holds the wrong block; all say so, and go on together afterwards."""
    case = LinearCase((0, 1), (3, 2), (0, 1, 2, 3), (2, 2), 7, 5)
    rank, (params, x, _) = dj.Partition().rank, case.local()
    wrong = {
        "`x` has shape (3, 4), but block 1 must be ... x 3: 7 features, balanced over 2 workers": (
            params,
            jnp.ones((3, 4)) if rank == 1 else x,
        ),
        "`x` has shape (4,), but block 0 must be ... x 4": (params, jnp.ones(4) if rank == 0 else x),
        '`params["weight"]` has shape (5, 7), but this worker\'s block of 5 x 7 on 2 x 2 workers is (2, 3)': (
            {**params, "weight": jnp.ones((5, 7)) if rank == 3 else params["weight"]},
            x,
        ),
        '`params["bias"]` has shape (1,), but this worker\'s block of 5 on 2 workers is (3,)': (
            {**params, "bias": jnp.ones(1) if rank == 0 else params["bias"]},
            x,
        ),
        "`params` must hold \"bias\" on every worker, but holds ['weight']": (
            {"weight": params["weight"]} if rank == 2 else params,
            x,
        ),
    }
    for sentence, (given, block) in wrong.items():
        with pytest.raises(dj.PlanError) as caught:
            jax.jit(case.layer)(given, block)
        assert sentence in str(caught.value)
    case.check({"y": case.layer(params, x), "alone": {}, "together": {}})


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"in_features": 0}, dj.InvalidArgumentError, "`in_features` (=0) must be 1 or more"),
        ({"out_features": -3}, dj.InvalidArgumentError, "`out_features` (=-3) must be 1 or more"),
        ({"in_features": 2.5}, dj.InvalidTypeError, "`in_features` (=2.5) must be an integer"),
        ({"P_W": "here"}, dj.InvalidTypeError, "`P_W` (='here') must be a partition"),
        ({"P_x": "here"}, dj.InvalidTypeError, "`P_x` (='here') must be a partition"),
        ({"P_W": [1]}, dj.InvalidArgumentError, "`P_W` (1) must have two dimensions"),
        ({"P_W": [1] * 4}, dj.InvalidArgumentError, "or three, P_n x P_fo x P_fi, with those along the batch"),
        ({"P_x": [1]}, dj.InvalidArgumentError, "`P_x` (1) must have shape 1 x 1, P_n x P_fi, where `P_W` is 1 x 1"),
        ({"P_y": []}, dj.InvalidArgumentError, "`P_y` (()) must have shape 1 x 1, P_n x P_fo, where `P_W` is 1 x 1"),
    ],
    ids=str,
)
def test_wrong_arguments_of_the_layer_are_named(change, kind, sentence):
    P = dj.Partition()
    change = {name: P.grid(value, [0]) if isinstance(value, list) else value for name, value in change.items()}
    one = P.grid([1, 1])
    with pytest.raises(kind) as caught:
        nn.DistributedLinear(**{"P_x": one, "P_y": one, "P_W": one, "in_features": 2, "out_features": 2, **change})
    assert sentence in str(caught.value)


@pytest.mark.world(4)
def test_partitions_that_do_not_fit_are_refused_by_every_worker():
    P = dj.Partition()
    P_W, two, three = P.grid([2, 2]), P.grid([1, 2]), P.grid([1, 3])
    for P_x, P_y, name in ((three, two, "P_x"), (two, three, "P_y"), (P.grid([2, 1]), two, "P_x")):
        with pytest.raises(dj.InvalidArgumentError, match=rf"`{name}` \(.*\) must have shape 1 x 2") as caught:
            nn.DistributedLinear(P_x, P_y, P_W, 4, 4)
        assert len(set(P.allgather_data(str(caught.value)))) == 1


@pytest.mark.world(4)
def test_a_split_batch_is_refused_where_it_does_not_fit_the_weight():
    """P_x and P_y have in front what P_W has in front of P_fo x P_fi; blocks at one place of the batch are alike."""
    P = dj.Partition()
    batch, features, four = P.grid([2, 1]), P.grid([1, 2]), P.grid([2, 2])
    for P_x, P_y, W, name, wanted in (
        (batch, batch, [1, 1], "P_x", "1 x 1, P_n x P_fi, where `P_W` is 1 x 1, P_fo x P_fi; or 1 x 1 x 1 on"),
        (batch, features, [2, 1, 1], "P_y", "2 x 1, P_n x P_fo, where `P_W` is 2 x 1 x 1, P_n x P_fo x P_fi"),
        (features, batch, [2, 1, 1], "P_x", "2 x 1, P_n x P_fi"),
        (four, batch, [2, 2, 1], "P_y", "2 x 2, P_n x P_fo"),  # of P_x the features are gathered
        (P.grid([2, 2], [0, 1, 3, 2]), four, [2, 2, 1], "P_x", "2 x 1, P_n x P_fi"),
    ):
        with pytest.raises(dj.InvalidArgumentError) as caught:
            nn.DistributedLinear(P_x, P_y, P.grid(W), 4, 4)
        assert f"`{name}`" in str(caught.value) and f"must have shape {wanted}" in str(caught.value)
        assert len(set(P.allgather_data(str(caught.value)))) == 1

    layer = nn.DistributedLinear(four, batch, P.grid([2, 1, 2]), 4, 4)
    params = layer.init(jax.random.key(0))
    for rows, features, sentence in (
        ((3, 2, 2, 2), (2, 2, 2, 2), "must have the same shape"),
        ((3, 3, 2, 2), (2, 2, 2, 4), "`x` has shape (2, 4), but block 1 must be ... x 2: 4 features, balanced over 2"),
    ):
        with pytest.raises(dj.PlanError) as caught:
            jax.jit(layer)(params, jnp.ones((rows[P.rank], features[P.rank])))
        assert sentence in str(caught.value)


@pytest.mark.world(4)
def test_initial_weights_are_the_same_however_the_batch_is_split():
    """They live on P_W's first slice, and gather and scatter take them there and back.

    To rounding: as these tests are compiled, blocks of other lengths are rounded in another way. That they are the same
    bit for bit as users compile them is test_initialization's.
    """
    P, key = dj.Partition(), jax.random.key(3)
    one = nn.DistributedLinear(*(P.grid([1, 1]),) * 3, 5, 3)
    split = nn.DistributedLinear(P.grid([2, 1]), P.grid([2, 2]), P.grid([2, 2, 1]), 5, 3)
    specs, params = split.param_specs(), split.init(key)
    assert specs["weight"].partition == P.grid([2, 1]) and specs["bias"].partition == P.grid([2])
    assert params["weight"].shape == {0: (2, 5), 1: (1, 5)}.get(P.rank, (0,))
    whole, expected = dj.gather(params, specs), one.init(key)
    back = dj.scatter(whole, specs)
    for name in ("weight", "bias"):
        np.testing.assert_allclose(whole[name], expected[name], rtol=0, atol=1e-7)
        np.testing.assert_array_equal(back[name], params[name])
    assert repr(split) == "DistributedLinear(5 -> 3, bias=True, P_x 2 x 1, P_y 2 x 2, P_W 2 x 2 x 1)"


@pytest.mark.world(1)
def test_layers_are_values():
    """Equal layers are equal, hash alike and serve as static arguments; a repr says sizes and partitions."""
    one = dj.Partition().grid([1, 1])
    a, b = (nn.DistributedLinear(one, one, one, 3, 2) for _ in range(2))
    assert a == b and hash(a) == hash(b) and a != nn.DistributedLinear(one, one, one, 3, 2, bias=False)
    assert repr(a) == "DistributedLinear(3 -> 2, bias=True, P_x 1 x 1, P_y 1 x 1, P_W 1 x 1)"
    assert set(a.param_specs()) == {"weight", "bias"} and a.param_specs()["bias"].global_shape == (2,)
    x, params = jnp.ones((4, 3)), a.init(jax.random.key(1))
    run = jax.jit(lambda layer, params, x: layer.apply(params, x), static_argnums=0)
    np.testing.assert_array_equal(run(a, params, x), run(b, params, x))
    assert run._cache_size() == 1

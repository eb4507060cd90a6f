"""Initial weights: the blocks are those of jax's own initializer on the global shape, in memory of the block alone."""

import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import initializers

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.partitions.initialization import UniformFanIn, _row_major_numbers, initialize_block
from distdl_jax.plans.decomposition import balanced_ranges

as_users_compile = pytest.mark.world(1)

AXES = {"in_axis": -1, "out_axis": -2}
INITIALIZERS = {
    "default": UniformFanIn(12),
    "zeros": initializers.zeros,
    "constant": initializers.constant(0.3),
    "uniform": initializers.uniform(0.2),
    "normal": initializers.normal(0.5),
    "truncated normal": initializers.truncated_normal(0.5, lower=-1.0, upper=3.0),
    "he normal": initializers.he_normal(**AXES),
    "glorot normal": initializers.glorot_normal(**AXES),
    "glorot uniform": initializers.glorot_uniform(**AXES),
}


def boxes(shape, workers):
    """The balanced boxes of all workers, row-major."""
    return list(itertools.product(*(balanced_ranges(n, p) for n, p in zip(shape, workers, strict=True))))


def assembled(initializer, key, shape, workers, dtype):
    """The global tensor, put together from the blocks that the workers make on their own."""
    whole = np.full(shape, 77, dtype)
    for box in boxes(shape, workers):
        block = initialize_block(initializer, key, shape, box, np.dtype(dtype))
        assert block.dtype == dtype
        whole[tuple(slice(*bounds) for bounds in box)] = block
    return whole


@as_users_compile
@pytest.mark.parametrize(
    ("shape", "workers", "dtype"),
    [
        ((7, 5), (2, 2), jnp.float32),
        ((2,), (3,), jnp.float32),
        ((3, 2, 2, 1), (2, 1, 1, 1), jnp.float32),
        ((1, 1), (1, 2), jnp.float32),
        ((7, 5), (3, 1), jnp.float64),
        ((7, 5), (1, 2), jnp.bfloat16),
        ((7, 5), (1, 2), jnp.float16),
        ((7, 5), (2, 1), jnp.complex128),
    ],
    ids=str,
)
def test_default_blocks_are_bit_for_bit_those_of_the_whole(shape, workers, dtype):
    initializer, key = UniformFanIn(5), jax.random.key(3)
    np.testing.assert_array_equal(
        assembled(initializer, key, shape, workers, dtype), initializer(key, shape, dtype), strict=True
    )


def compare(made, shape, some, dtype, key, limit, size=0.0):
    """Some blocks of the tensors of many initializers, in one program, with the whole tensors.

    To `limit` roundings of each number, or of `size`.
    """
    kind = complex if jnp.issubdtype(dtype, jnp.complexfloating) else float
    blocks = jax.jit(
        lambda key: [[initialize_block(f, key, shape, box, np.dtype(dtype)) for box in some] for f in made]
    )
    wholes = jax.jit(lambda key: [f(key, shape, dtype) for f in made])
    for parts, whole in zip(blocks(key), map(np.asarray, wholes(key)), strict=True):
        for box, part in zip(some, parts, strict=True):
            expected = whole[tuple(slice(*bounds) for bounds in box)]
            assert part.shape == expected.shape and part.dtype == expected.dtype == dtype
            tolerance = limit * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(part.astype(kind), expected.astype(kind), rtol=tolerance, atol=tolerance * size)


BY_DTYPE = {
    jnp.float32: tuple(INITIALIZERS),
    jnp.float64: ("default", "truncated normal"),
    jnp.bfloat16: ("he normal", "glorot uniform"),
    jnp.complex64: ("zeros", "normal", "he normal"),
}


@pytest.mark.parametrize("dtype", BY_DTYPE, ids=lambda d: d.__name__)
def test_every_initializer_of_jax_gives_the_blocks_of_the_whole(dtype):
    """To the last bits: XLA fuses the arithmetic after the random bits differently in programs of other shapes."""
    made = [INITIALIZERS[name] for name in BY_DTYPE[dtype]]
    compare(made, (6, 5), boxes((6, 5), (2, 3))[4:5], dtype, jax.random.key(9), limit=4)
    if dtype == jnp.float32:  # of four dimensions, one of them of length 1; the last block is empty
        some = boxes((3, 2, 1, 2), (2, 1, 1, 3))
        compare(made[:5], (3, 2, 1, 2), [some[1], some[3], some[-1]], dtype, jax.random.key(9), limit=4)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_either_kind_and_of_other_generators(impl):
    """Typed keys and the legacy arrays of uint32 give the same; for other generators the whole is made and cut."""
    legacy, typed = jax.random.PRNGKey(5, impl=impl), jax.random.key(5, impl=impl)
    whole = UniformFanIn(4)(typed, (5, 4), jnp.float32)
    np.testing.assert_array_equal(assembled(UniformFanIn(4), typed, (5, 4), (1, 2), jnp.float32), whole)
    if impl == "threefry2x32":
        np.testing.assert_array_equal(assembled(UniformFanIn(4), legacy, (5, 4), (1, 2), jnp.float32), whole)


def shuffled(key, shape, dtype):
    """Not elementwise: where a number goes depends on all of them."""
    return jax.random.permutation(key, jnp.arange(np.prod(shape), dtype=dtype)).reshape(shape)


def ramp(key, shape, dtype):
    """Random bits together with a tensor of the global shape that is not random."""
    return jax.random.uniform(key, shape, dtype) + jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)


def of_loops(key, shape, dtype):
    """Halved three times, in a loop."""
    return jax.lax.fori_loop(0, 3, lambda _, x: x / 2, jax.random.normal(key, shape, dtype))


def of_several_keys(key, shape, dtype):
    """The sum of three random tensors."""
    keys = jax.random.split(key, 3)
    return jnp.sum(jax.vmap(lambda key: jax.random.normal(key, shape, dtype))(keys), 0)


def test_what_is_not_elementwise_is_made_whole_and_cut():
    made = (initializers.orthogonal(), shuffled, ramp, of_loops, of_several_keys)
    compare(made, (5, 4), boxes((5, 4), (2, 2)), jnp.float32, jax.random.key(2), 16, size=1)


@as_users_compile
@pytest.mark.parametrize("name", ["default", "he normal", "truncated normal", "zeros"])
def test_memory_is_that_of_the_block(name):
    """A 1/256 block of a 16384 x 16384 tensor (1 GiB): temporaries and result stay below ten blocks."""
    n, box = 1024, ((2048, 3072), (5120, 6144))
    lowered = initialize_block.lower(INITIALIZERS[name], jax.random.key(0), (16 * n, 16 * n), box, np.dtype(np.float32))
    used = lowered.compile().memory_analysis()
    assert used.output_size_in_bytes == 4 * n**2
    assert used.temp_size_in_bytes + used.output_size_in_bytes < 10 * 4 * n**2


def test_elements_are_numbered_beyond_32_bits():
    """The numbers that the random bits are made from, against Python's integers, where the halves carry over."""
    for shape in [(2**20, 2**20), (3, 2**33 + 1), (2**16, 2**17, 5), (2**40,)]:
        for place in (0, 0.37, 1):
            starts = [int((n - min(n, 3)) * place) for n in shape]
            box = tuple((start, start + min(n, 3)) for start, n in zip(starts, shape, strict=True))
            high, low = (np.asarray(half).astype(object) for half in _row_major_numbers(shape, box))
            for k, cell in enumerate(itertools.product(*(range(*side) for side in box))):
                number = 0
                for n, i in zip(shape, cell, strict=True):
                    number = number * n + i
                assert int(high[k]) * 2**32 + int(low[k]) == number % 2**64


def test_default_is_uniform_within_one_over_the_root_of_the_fan_in():
    """Bounds, mean, deviation and deciles of 200,000 weights."""
    for fan_in in (1, 25):
        bound = fan_in**-0.5
        values = np.asarray(UniformFanIn(fan_in)(jax.random.key(fan_in), (500, 400), jnp.float32))
        assert -bound <= values.min() < -0.999 * bound and 0.999 * bound < values.max() <= bound
        assert abs(values.mean()) < 0.005 * bound and abs(values.std() / bound - 3**-0.5) < 0.003
        counts, _ = np.histogram(values, 10, (-bound, bound))
        np.testing.assert_allclose(counts, values.size / 10, rtol=0.03)


def test_the_defaults_of_layers():
    """Uniform up to what their pages say, which for layers of PyTorch's is what those begin with."""
    P = dj.planning_world(1)
    image, sequence = (P.grid([1] * dims) for dims in (4, 3))
    channels = {"in_channels": 8, "out_channels": 4, "bias": False, "groups": 2, "kernel_size": 3}
    for layer, low, high in (
        (nn.DistributedConv2d(image, **channels), -(36**-0.5), 36**-0.5),
        (nn.DistributedConvTranspose2d(image, **channels), -(18**-0.5), 18**-0.5),
        (nn.DistributedMultiHeadAttention(sequence, 16, 2, bias=False), -0.25, 0.25),
        (nn.DistributedSpectralConv1d(sequence, 4, 8, modes=5), 0, 1 / 32),
    ):
        for weight in layer.init(jax.random.key(0)).values():
            ends = float(weight.min()), float(weight.max())
            assert low <= ends[0] and ends[1] <= high and ends[1] - ends[0] > 0.9 * (high - low), (layer, ends)


# By the workers of P_W, and its shape, the dtype that is tried there.
PARTITIONS = [
    ([0], [1, 1], jnp.float64), ([3, 1], [1, 2], jnp.bfloat16), ([2, 0, 1], [3, 1], jnp.float32),
    ([1, 0, 3, 2], [2, 2], jnp.float32),
]  # fmt: skip


def layer_on(ranks, shape, n_in, n_out, **options):
    rows, columns = shape
    P = dj.Partition()
    P_x, P_y = P.grid([1, columns], ranks[:columns]), P.grid([1, rows], ranks[:rows])
    return nn.DistributedLinear(P_x, P_y, P.grid(shape, ranks), n_in, n_out, **options)


@pytest.mark.simulated(4)
@pytest.mark.parametrize(("ranks", "shape", "dtype"), PARTITIONS, ids=str)
def test_the_layer_starts_the_same_whatever_its_partition(ranks, shape, dtype):
    """Gathered parameters: bit for bit jax's initializer on the global shape, for every P_W; zero-volume elsewhere."""
    key, rank = jax.random.key(11), dj.Partition().rank
    keys = dict(zip(("weight", "bias"), jax.random.split(key), strict=True))
    shapes = {"weight": (5, 7), "bias": (5,)}
    layer = layer_on(ranks, shape, 7, 5)
    params = layer.init(key, dtype)
    assert {name: leaf.dtype for name, leaf in params.items()} == dict.fromkeys(shapes, dtype)
    assert (params["weight"].size > 0) == (rank in ranks)
    assert (params["bias"].size > 0) == (rank in ranks[:: shape[1]])
    for name, tensor in dj.gather(params, layer.param_specs(), root=2).items():
        expected = UniformFanIn(7)(keys[name], shapes[name], dtype) if rank == 2 else np.zeros(0, dtype)
        np.testing.assert_array_equal(tensor, expected, strict=True)
    bare = layer_on(ranks, shape, 7, 5, bias=False).init(key, dtype)
    assert set(bare) == {"weight"}
    np.testing.assert_array_equal(bare["weight"], params["weight"])


@pytest.mark.simulated(4)
def test_sharded_layers_start_as_others():
    """Each worker has a balanced share of the same parameters."""
    P, sizes = dj.Partition(), {"in_channels": 3, "out_channels": 5, "kernel_size": 2}
    rows, images = P.grid([2, 1], [3, 0]), P.grid([2, 1, 2], [1, 3, 0, 2])
    for make in (
        partial(nn.DistributedEmbedding, rows, P.grid([2, 1, 1]), P.grid([2, 2, 1], [2, 0, 3, 1]), 5, 3),
        partial(nn.DistributedConv1d, images, **sizes),
        partial(nn.DistributedConvTranspose1d, images, **sizes),
    ):
        layers = make(sharded=True), make()
        init, other = (dj.gather(its.init(jax.random.key(3), float), its.param_specs()) for its in layers)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-12), init, other)
        shares, copies = (its.param_specs()["weight"].partition.size for its in layers)
        assert shares > copies


@pytest.mark.simulated(2)
def test_initializers_on_request():
    """`weight_init` sees the global shape, so that fans are those of the whole layer; `bias_init` is separate."""
    layer, seen = layer_on([0, 1], [1, 2], 6, 4), []
    glorot = INITIALIZERS["glorot normal"]

    def watched(key, shape, dtype):
        seen.append(tuple(shape))
        return glorot(key, shape, dtype)

    params = layer.init(jax.random.key(1), float, weight_init=watched, bias_init=initializers.zeros)
    assert seen and set(seen) == {(4, 6)}
    whole = glorot(jax.random.split(jax.random.key(1))[0], (4, 6), float)
    np.testing.assert_allclose(params["weight"], np.split(np.asarray(whole), 2, axis=1)[layer.P_W.rank], rtol=1e-14)
    assert params["bias"].shape == ((4,) if layer.P_W.rank == 0 else (0,)) and not params["bias"].any()


@pytest.mark.simulated(2)
def test_a_tree_of_own_parameters():
    """Each leaf is the block of its initializer on the global shape, by the key of its place in JAX's order."""
    P = dj.Partition()
    split, normal = P.grid([2, 1]), initializers.normal()
    last = dj.TensorSpec((4,), P.grid([1], [1]))
    specs = {"b": [dj.TensorSpec((3, 2), split), None, last], "a": dj.TensorSpec((5, 1), split)}
    key, shapes = jax.random.key(4), [(5, 1), (3, 2), (4,)]
    wholes = [normal(k, shape, jnp.float32) for k, shape in zip(jax.random.split(key, 3), shapes, strict=True)]
    mine = [np.array_split(np.asarray(whole), 2)[P.rank] for whole in wholes[:2]]
    expected = {"a": mine[0], "b": [mine[1], None, wholes[2] if P.rank == 1 else np.zeros(0)]}
    params = dj.init(normal, specs, key)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), params, expected)
    mixed = dj.init({"a": initializers.zeros, "b": normal}, specs, key, jnp.float16)
    assert not mixed["a"].any() and mixed["b"][0].any() and mixed["a"].dtype == jnp.float16
    jitted = jax.jit(partial(dj.init, normal, specs))(key)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), jitted, params)


@pytest.mark.simulated(1)
def test_initializers_that_do_not_fit_are_refused():
    P, key = dj.Partition().grid([1]), jax.random.key(0)
    specs = {"a": dj.TensorSpec((2,), P), "b": [dj.TensorSpec((3,), P)]}
    for wrong in ({"a": initializers.zeros}, {"a": initializers.zeros, "b": {"c": initializers.ones}}):
        with pytest.raises(dj.InvalidArgumentError, match=r"`initializers` must be an initializer, or a pytree"):
            dj.init(wrong, specs, key)
    with pytest.raises(dj.InvalidTypeError, match=r"`initializers\['a'\]` \(=3\) must be a function"):
        dj.init({"a": 3, "b": initializers.zeros}, specs, key)
    with pytest.raises(dj.InvalidArgumentError, match=r"`initializer` .* the requested shape, \(2,\), but"):
        dj.init_block(lambda key, shape, dtype: jnp.ones((3, *shape), dtype), key, specs["a"])


@pytest.mark.simulated(2)
@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_that_a_trace_closes_over(key: Callable[[int], jax.Array]) -> None:
    P = dj.Partition().grid([1, 1, 2])
    layer, its = nn.DistributedConv1d(P, in_channels=2, out_channels=3, kernel_size=3), key(0)
    wanted = layer.init(its)
    for jit in (jax.jit, dj.jit):
        jax.tree.map(np.testing.assert_array_equal, jit(lambda: layer.init(its))(), wanted)
    shapes = jax.eval_shape(lambda: layer.init(its))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, wanted)

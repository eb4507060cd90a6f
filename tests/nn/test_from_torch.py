"""PyTorch's parameters in split layers give the blocks of what PyTorch gave, which is recorded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jobs import ROOT
from matrix.partitions import On, on
from sequential import close, cut

import distdl_jax as dj
from distdl_jax import nn

RESULTS = dict(np.load(ROOT / "tests/torch_results/results.npz"))  # read whole: threads can't share a zip file


def state_dict(name: str) -> dict[str, np.ndarray]:
    start = f"{name}/state/"
    return {key.removeprefix(start): RESULTS[key] for key in RESULTS if key.startswith(start)}


def split(d: int) -> On:
    return on(1, 1, 2, *(1,) * (d - 1))


def network(P: dj.Partition) -> nn.Sequential:
    rows, one, flat = (its.partition(P) for its in (on(1, 1, 2, 1), on(1, 1), on(1, 2)))
    return nn.Sequential(
        nn.DistributedConv2d(rows, in_channels=1, out_channels=2, kernel_size=3),
        nn.DistributedBatchNorm(rows, 2),
        jax.nn.relu,
        nn.DistributedMaxPool2d(rows, 2),
        nn.Remat(nn.Sequential(nn.Flatten(rows, flat), nn.DistributedLinear(flat, one, flat, 8, 3))),
    )


MASK = {"key_padding_mask": np.array([[False, False, True], [False, True, True]])}
HEADS, SEQUENCE = on(1, 1, 2), on(1, 2, 1)
MEMORY, ADDED, PADDED = (RESULTS[f"cross/{name}"] for name in ("memory", "attn_mask", "key_padding_mask"))

# By name: the layer on two workers, where its input and its output are, what it is called with: arrays, or pairs of the
# whole and of the partition on which it is.
CASES: dict[str, tuple[Callable[[dj.Partition], Any], On, On, dict[str, Any]]] = {
    "linear": (
        lambda P: nn.DistributedLinear(*(its.partition(P) for its in (on(1, 2), on(1, 1), on(1, 2))), 5, 3),
        on(1, 2), on(1, 1), {},
    ),
    "linear pointwise": (
        lambda P: nn.DistributedPointwise(on(2, 1).partition(P), 5, 3), on(2, 1), on(2, 1), {},
    ),
    **{
        f"conv{d}": (
            lambda P, d=d: getattr(nn, f"DistributedConv{d}d")(
                split(d).partition(P), in_channels=2, out_channels=4, kernel_size=3, padding=1, groups=2
            ),
            split(d), split(d), {},
        )
        for d in (1, 2, 3)
    },
    **{
        f"conv_transpose{d}": (
            lambda P, d=d: getattr(nn, f"DistributedConvTranspose{d}d")(
                split(d).partition(P), in_channels=2, out_channels=4, kernel_size=3, stride=2, groups=2
            ),
            split(d), split(d), {},
        )
        for d in (1, 2, 3)
    },
    "batch_norm": (
        lambda P: nn.DistributedBatchNorm(on(1, 2, 1, 1).partition(P), 3), on(1, 2, 1, 1), on(1, 2, 1, 1), {},
    ),
    "layer_norm": (lambda P: nn.DistributedLayerNorm(on(1, 2).partition(P), 5), on(1, 2), on(1, 2), {}),
    "rms_norm": (lambda P: nn.DistributedRMSNorm(on(1, 2).partition(P), 5), on(1, 2), on(1, 2), {}),
    "group_norm": (lambda P: nn.DistributedGroupNorm(HEADS.partition(P), 2, 4), HEADS, HEADS, {}),
    "instance_norm": (lambda P: nn.DistributedInstanceNorm(HEADS.partition(P), 2, affine=True), HEADS, HEADS, {}),
    "embedding": (
        lambda P: nn.DistributedEmbedding(*(its.partition(P) for its in (on(1, 1), on(1, 1, 1), on(2, 1))), 7, 3),
        on(1, 1), on(1, 1, 1), {},
    ),
    "attention": (
        lambda P: nn.DistributedMultiHeadAttention(HEADS.partition(P), 8, 4, causal=True), HEADS, HEADS, MASK,
    ),
    "attention fused": (
        lambda P: nn.DistributedMultiHeadAttention(HEADS.partition(P), 8, 4, causal=True, fused=True),
        HEADS, HEADS, MASK,
    ),
    "grouped": (
        lambda P: nn.DistributedMultiHeadAttention(
            on(1, 2, 1).partition(P), 8, 4, num_key_heads=2, causal=True, bias=False, fused=True
        ),
        on(1, 2, 1), on(1, 2, 1), {},
    ),
    **{
        f"cross {grid} {exchange} {what}": (
            lambda P, grid=grid, exchange=exchange, fused=what == "fused": nn.DistributedMultiHeadAttention(
                grid.partition(P), 8, 4, exchange=exchange, fused=fused
            ),
            grid, grid, told | {"memory": (MEMORY, grid)},
        )
        for grid, exchange, what, told in (
            (HEADS, "ring", "", {"attn_mask": ADDED, "key_padding_mask": PADDED}),
            (HEADS, "ring", "fused", {"attn_mask": ADDED, "key_padding_mask": PADDED}),
            (SEQUENCE, "ring", "", {"attn_mask": (ADDED, on(2, 1)), "key_padding_mask": (PADDED, on(1, 2))}),
            (SEQUENCE, "heads", "", {"attn_mask": ADDED, "key_padding_mask": (PADDED, on(1, 2))}),
            (SEQUENCE, "gather", "", {"attn_mask": ADDED, "key_padding_mask": PADDED}),
        )
    },
    "network": (network, on(1, 1, 2, 1), on(1, 1), {}),
}  # fmt: skip


@pytest.mark.simulated(2)
def test_what_pytorch_gave() -> None:
    """In evaluation, every layer split over two workers; with the running statistics that PyTorch had."""
    P = dj.Partition()
    layers = {name: case[0](P) for name, case in CASES.items()}
    loaded = {name: dj.from_torch(state_dict(name.split()[0]), its, state=True) for name, its in layers.items()}
    for name, layer in layers.items():
        specs = layer.param_specs()
        jax.tree.map(lambda spec, x: pytest.fail() if x.shape != spec.local_shape else None, specs, loaded[name][0])

    def held(name: str) -> Any:
        whole = RESULTS[f"{name.split()[0]}/x"]
        mine = cut(whole, CASES[name][1], P.rank)
        return np.zeros((len(whole), 0), whole.dtype) if mine is None else mine

    def outputs(loaded: Any, xs: Any) -> Any:
        found = {}
        for name, (params, state) in loaded.items():
            given = CASES[name][3].items()
            options = {key: cut(*its, P.rank) if isinstance(its, tuple) else its for key, its in given}
            options |= {"state": state, "training": False} if jax.tree.leaves(state) else {}
            y = layers[name](params, xs[name], **options)
            found[name] = y[0] if isinstance(y, tuple) else y
        return found

    found = dj.jit(outputs)(loaded, {name: held(name) for name in CASES})
    for name, (_, _, P_y, _) in CASES.items():
        mine = cut(RESULTS[f"{name.split()[0]}/y"], P_y, P.rank)
        if mine is not None:
            close(found[name], mine, 1e-12, name)


@pytest.mark.simulated(1)
def test_names() -> None:
    """A dictionary of layers takes what is below its names; what is missing, too many or of another shape is named."""
    P = dj.Partition()
    one = on(1, 1).partition(P)
    linear = nn.DistributedLinear(one, one, one, 3, 2)
    no_bias = nn.DistributedLinear(one, one, one, 3, 2, bias=False)
    arrays = {"weight": np.ones((2, 3)), "bias": np.zeros(2)}
    nested = {f"{name}.{key}": x for name in ("first", "firsts.layer") for key, x in arrays.items()}
    params = dj.from_torch(nested, {"first": linear, "firsts": nn.Sequential(jnp.tanh, linear)})
    assert params["firsts"][0] == {} and params["firsts"][1]["bias"].shape == (2,)
    running = {"running_mean": np.ones(2), "running_var": np.full(2, 3.0), "num_batches_tracked": np.int32(5)}
    pointwise, kernel = nn.DistributedPointwise(one, 3, 2), {"weight": arrays["weight"][:, :, None, None]}
    assert dj.from_torch(arrays | kernel, pointwise)["weight"].shape == (2, 3)  # of a convolution with a kernel of 1
    squeeze = nn.DistributedSqueezeExcitation(on(1, 1, 1).partition(P), 3, 2)
    both = {"fc1.weight": np.ones((2, 3, 1, 1)), "fc1.bias": np.ones(2)}
    both |= {"fc2.weight": np.zeros((3, 2, 1, 1)), "fc2.bias": np.zeros(3)}
    (params,) = dj.from_torch({f"0.{name}": x for name, x in both.items()}, nn.Sequential(squeeze))
    assert float(params["fc1"]["weight"].sum()) == 6 and params["fc2"]["weight"].shape == (3, 2)
    params, state = dj.from_torch(running, nn.DistributedBatchNorm(one, 2, affine=False), state=True)
    assert params == {} and state["running_var"].tolist() == [3, 3] and int(state["num_batches_tracked"]) == 5
    for sentence, given, layer in (
        ("`state_dict` must hold 'bias', for DistributedLinear(3 -> 2", {"weight": arrays["weight"]}, linear),
        ("`state_dict` holds 'bias', for which `layer` has no place.", arrays, no_bias),
        ("`state_dict` holds '1.weight', for which `layer` has no place.", arrays | {"1.weight": np.ones(2)}, linear),
        ("`state_dict['weight']` must be 2 x 3, for DistributedLinear", arrays | {"weight": np.ones((3, 2))}, linear),
        ("`state_dict['weight']` must be 2 x 3, for DistributedPo", {"weight": np.ones((2, 3, 2))}, pointwise),
        ("`state_dict` holds 'weight_hr_l0', which is not a parameter", {"weight_hr_l0": np.ones(2)}, linear),
        ("`state_dict` must hold 'a.b.1.bias', for", {"a.b.1.weight": arrays["weight"]}, {"a": {"b": linear}}),
        ("`state_dict` must hold 'weight' of a module, for DistributedLinear(3", {}, nn.Sequential(linear)),
        (
            "`state_dict` must hold 'weight' of a module after '0', for DistributedLinear(3 -> 2",
            {"0.weight": arrays["weight"]},
            nn.Sequential(no_bias, nn.Residual(no_bias)),
        ),
        (
            "`state_dict` must hold 'weight' of a module after 'a.0', for",
            {"a.0.weight": arrays["weight"]},
            {"a": nn.Sequential(no_bias, linear)},
        ),
        (
            "`state_dict` must hold 'weight' of a module at 'b.c', or below it, for",
            {"a.weight": arrays["weight"]},
            {"a": no_bias, "b": {"c": linear}},
        ),
        ("`state_dict['a.weight']` must be 2 x 3, for", {"a.weight": np.ones((3, 2))}, {"a": no_bias}),
        ("`state_dict` holds 'a..weight_hr_l0', which is not a", {"a..weight_hr_l0": np.ones(2)}, {"a": linear}),
        (
            "`state_dict` holds 'third.bias', for which",
            {"first.weight": arrays["weight"], "third.bias": np.ones(1)},
            {"first": no_bias},
        ),
        ("`layer` (=3) must be a layer, or a dictionary of layers.", arrays, 3),
    ):
        with pytest.raises((dj.InvalidArgumentError, dj.InvalidTypeError)) as error:
            dj.from_torch(given, layer)
        assert sentence in str(error.value), str(error.value)


def numbered(prefix: str = "") -> dict[str, np.ndarray]:
    """The state_dict of PyTorch's Sequential of 11 equal linear layers, the number of each in its weights."""
    return {
        f"{prefix}{n}.{name}": np.full(shape, float(n))
        for n in range(11)
        for name, shape in (("weight", (2, 2)), ("bias", (2,)))
    }


def test_modules_with_numbers_come_in_their_order() -> None:
    """Also from a file whose names are sorted as text, as those in safetensors files are; nested ones too."""
    one = on(1, 1).partition(dj.planning_world(1))
    eleven = nn.Sequential(*[nn.DistributedLinear(one, one, one, 2, 2)] * 11)
    for given, layer in (
        (numbered(), eleven),
        (numbered("body."), eleven),
        (numbered("0.10.") | numbered("0.9."), nn.Sequential(nn.Sequential(eleven, eleven))),
        (numbered("b.") | numbered("a."), {"a": eleven, "b": eleven}),
    ):
        from_file = dict(sorted(given.items()))
        assert [*from_file] != [*given]
        for read in (given, from_file):
            its = dj.from_torch(read, layer)
            firsts = [float(x.reshape(-1)[0]) for x in jax.tree.leaves(its)]
            assert firsts == [float(n) for n in range(11) for _ in range(2)] * (len(firsts) // 22)


def test_modules_with_names_keep_their_order() -> None:
    one = on(1, 1).partition(dj.planning_world(1))
    network = nn.Sequential(*[nn.DistributedLinear(one, one, one, 2, 2, bias=False)] * 3)
    names = ("stem", "2", "10")  # not all of them are numbers
    for order in (names, names[::-1]):
        params = dj.from_torch({f"{name}.weight": np.full((2, 2), n) for n, name in enumerate(order)}, network)
        assert [int(its["weight"][0, 0]) for its in params] == [0, 1, 2]


def test_what_is_no_state_dict() -> None:
    one = on(1, 1).partition(dj.planning_world(1))
    linear = nn.DistributedLinear(one, one, one, 2, 2, bias=False)
    for sentence, given in (
        ("`state_dict` (=None) must be a dictionary of arrays by name", None),
        ("`state_dict` (={3: ", {3: np.ones(2)}),
        (
            "`state_dict['weight']` must be an array of numbers, but has the dtype <U1.",
            {"weight": np.full((2, 2), "a")},
        ),
        ("`state_dict['weight']` must be an array of numbers", {"weight": [[1.0], [1.0, 2.0]]}),
    ):
        for layer, these in ((linear, given), ({"a": linear}, given)):
            if layer is not linear and these and "weight" in these:
                these = {"a.weight": these["weight"]}
            with pytest.raises(dj.InvalidTypeError) as error:
                dj.from_torch(these, layer)  # type: ignore[arg-type]
            assert sentence in str(error.value).replace("'a.weight", "'weight"), str(error.value)


def test_an_attention_with_too_much() -> None:
    """What PyTorch calls it, and not what it is here."""
    P = on(1, 1, 1).partition(dj.planning_world(1))
    square, packed, out = np.ones((4, 4)), {"in_proj_weight": np.ones((12, 4))}, {"out_proj.weight": np.ones((4, 4))}
    three = {f"{letter}_proj_weight": square for letter in "qkv"}
    layer = nn.DistributedMultiHeadAttention(P, 4, 2, bias=False)
    for name, given in (
        ("q_proj_weight", packed | three | out),
        ("k_proj_weight", three | out | {"k_proj.weight": square}),
        ("o_proj.weight", packed | out | {"o_proj.weight": square}),
        ("in_proj_bias", packed | out | {"in_proj_bias": np.ones(12)}),
        ("weight", packed | out | {"weight": np.ones(12)}),
    ):
        with pytest.raises(dj.InvalidArgumentError, match=rf"holds 'its\.{name}', for which `layer` has no place"):
            dj.from_torch({f"its.{its}": x for its, x in given.items()}, {"its": layer})


def test_attention_in_one_matrix_or_in_three() -> None:
    """Packed, or under either of the names of three; also where keys and values have fewer heads than queries."""
    P = on(1, 1, 1).partition(dj.planning_world(1))
    layer = nn.DistributedMultiHeadAttention(P, 8, 4, num_key_heads=2, bias=False)
    q, k, v, out = (np.random.default_rng(n).normal(size=(rows, 8)) for n, rows in enumerate((8, 4, 4, 8)))
    want = {"query": q, "key": k, "value": v}
    for given in (
        {"in_proj_weight": np.concatenate([q, k, v]), "out_proj.weight": out},
        {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v, "out_proj.weight": out},
        {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "o_proj.weight": out},
    ):
        params = dj.from_torch({f"its.{name}": x for name, x in given.items()}, {"its": layer})["its"]
        for name, rows in want.items():
            np.testing.assert_array_equal(np.asarray(params[name]).reshape(rows.shape), rows)
        np.testing.assert_array_equal(np.asarray(params["out"]).reshape(out.shape), out)

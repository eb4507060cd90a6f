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


ONE = on(1, 1).partition(dj.planning_world(1))
LINEAR, NO_BIAS = (nn.DistributedLinear(ONE, ONE, ONE, 3, 2, bias=bias) for bias in (True, False))
POINTWISE, ARRAYS = nn.DistributedPointwise(ONE, 3, 2), {"weight": np.ones((2, 3)), "bias": np.zeros(2)}
W = ARRAYS["weight"]


def a_conv(kind: str, d: int, **options: Any) -> Any:
    """The features split over two workers."""
    its = on(1, 1, 2, *(1,) * (d - 1))
    layer, sizes = getattr(nn, f"Distributed{kind}{d}d"), {"in_channels": 2, "out_channels": 4, "kernel_size": 3}
    return lambda P: layer(its.partition(P), **sizes, groups=2, **options), its, its, {}


def same(kind: str, its: On, *args: Any, **options: Any) -> Any:
    """A layer that leaves its output where it is."""
    return lambda P: getattr(nn, f"Distributed{kind}")(its.partition(P), *args, **options), its, its, {}


def attention(its: On, told: Any, *args: Any, **options: Any) -> Any:
    return *same("MultiHeadAttention", its, 8, 4, *args, **options)[:3], told


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
    "linear pointwise": same("Pointwise", on(2, 1), 5, 3),
    **{f"conv{d}": a_conv("Conv", d, padding=1) for d in (1, 2, 3)},
    **{f"conv_transpose{d}": a_conv("ConvTranspose", d, stride=2) for d in (1, 2, 3)},
    "batch_norm": same("BatchNorm", on(1, 2, 1, 1), 3),
    "layer_norm": same("LayerNorm", on(1, 2), 5),
    "rms_norm": same("RMSNorm", on(1, 2), 5),
    "group_norm": same("GroupNorm", HEADS, 2, 4),
    "instance_norm": same("InstanceNorm", HEADS, 2, affine=True),
    "embedding": (
        lambda P: nn.DistributedEmbedding(*(its.partition(P) for its in (on(1, 1), on(1, 1, 1), on(2, 1))), 7, 3),
        on(1, 1), on(1, 1, 1), {},
    ),
    "attention": attention(HEADS, MASK, causal=True),
    "attention fused": attention(HEADS, MASK, causal=True, fused=True),
    "grouped": attention(SEQUENCE, {}, num_key_heads=2, causal=True, bias=False, fused=True),
    **{
        f"cross {its} {how} {fused}": attention(
            its, {"attn_mask": added, "key_padding_mask": padded, "memory": (MEMORY, its)}, exchange=how, fused=fused
        )
        for its, how, fused, added, padded in (
            (HEADS, "ring", False, ADDED, PADDED),
            (HEADS, "ring", True, ADDED, PADDED),
            (SEQUENCE, "ring", False, (ADDED, on(2, 1)), (PADDED, on(1, 2))),
            (SEQUENCE, "heads", False, ADDED, (PADDED, on(1, 2))),
            (SEQUENCE, "gather", False, ADDED, PADDED),
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


def test_names() -> None:
    """A dictionary of layers takes what is below its names; what is missing, too many or of another shape is named."""
    nested = {f"{name}.{key}": x for name in ("first", "firsts.layer") for key, x in ARRAYS.items()}
    params = dj.from_torch(nested, {"first": LINEAR, "firsts": nn.Sequential(jnp.tanh, LINEAR)})
    assert params["firsts"][0] == {} and params["firsts"][1]["bias"].shape == (2,)
    running = {"running_mean": np.ones(2), "running_var": np.full(2, 3.0), "num_batches_tracked": np.int32(5)}
    kernel = {"weight": ARRAYS["weight"][:, :, None, None]}  # of a convolution with a kernel of 1
    assert dj.from_torch(ARRAYS | kernel, POINTWISE)["weight"].shape == (2, 3)
    squeeze = nn.DistributedSqueezeExcitation(on(1, 1, 1).partition(dj.planning_world(1)), 3, 2)
    both = {"0.fc1.weight": np.ones((2, 3, 1, 1)), "0.fc1.bias": np.ones(2)}
    both |= {"0.fc2.weight": np.zeros((3, 2, 1, 1)), "0.fc2.bias": np.zeros(3)}
    (params,) = dj.from_torch(both, nn.Sequential(squeeze))
    assert float(params["fc1"]["weight"].sum()) == 6 and params["fc2"]["weight"].shape == (3, 2)
    params, state = dj.from_torch(running, nn.DistributedBatchNorm(ONE, 2, affine=False), state=True)
    assert params == {} and state["running_var"].tolist() == [3, 3] and int(state["num_batches_tracked"]) == 5


REFUSED: tuple[tuple[str, dict[str, Any], Any], ...] = (
    ("must hold 'bias', for DistributedLinear(3 -> 2", {"weight": W}, LINEAR),
    ("holds 'bias', for which `layer` has no place.", ARRAYS, NO_BIAS),
    ("holds '1.weight', for which `layer` has no place.", ARRAYS | {"1.weight": np.ones(2)}, LINEAR),
    ("['weight']` must be 2 x 3, for DistributedLinear", ARRAYS | {"weight": np.ones((3, 2))}, LINEAR),
    ("['weight']` must be 2 x 3, for DistributedPo", {"weight": np.ones((2, 3, 2))}, POINTWISE),
    ("holds 'weight_hr_l0', which is not a parameter", {"weight_hr_l0": np.ones(2)}, LINEAR),
    ("must hold 'a.b.1.bias', for", {"a.b.1.weight": W}, {"a": {"b": LINEAR}}),
    ("must hold 'weight' of a module, for DistributedLinear(3", {}, nn.Sequential(LINEAR)),
    ("must hold 'weight' of a module after '0', for DistributedLinear(3 -> 2", {"0.weight": W},
     nn.Sequential(NO_BIAS, nn.Residual(NO_BIAS))),
    ("must hold 'weight' of a module after 'a.0', for", {"a.0.weight": W}, {"a": nn.Sequential(NO_BIAS, LINEAR)}),
    ("must hold 'weight' of a module at 'b.c', or below it, for", {"a.weight": W}, {"a": NO_BIAS, "b": {"c": LINEAR}}),
    ("['a.weight']` must be 2 x 3, for", {"a.weight": np.ones((3, 2))}, {"a": NO_BIAS}),
    ("holds 'a..weight_hr_l0', which is no", {"a..weight_hr_l0": np.ones(2)}, {"a": LINEAR}),
    ("holds 'third.bias', for which", {"first.weight": W, "third.bias": np.ones(1)}, {"first": NO_BIAS}),
)  # fmt: skip


@pytest.mark.parametrize(("sentence", "given", "layer"), REFUSED)
def test_what_does_not_fit_is_named(sentence: str, given: dict[str, Any], layer: Any) -> None:
    with pytest.raises(dj.InvalidArgumentError) as error:
        dj.from_torch(given, layer)
    assert str(error.value).startswith("`state_dict") and sentence in str(error.value)


def numbered(prefix: str = "") -> dict[str, np.ndarray]:
    """The state_dict of PyTorch's Sequential of 11 equal linear layers, the number of each in its weights."""
    return {
        f"{prefix}{n}.{name}": np.full(shape, float(n))
        for n in range(11)
        for name, shape in (("weight", (2, 2)), ("bias", (2,)))
    }


def test_modules_with_numbers_come_in_their_order() -> None:
    """Also from a file whose names are sorted as text, as those in safetensors files are; nested ones too."""
    eleven = nn.Sequential(*[nn.DistributedLinear(ONE, ONE, ONE, 2, 2)] * 11)
    for given, layer in (
        (numbered(), eleven),
        (numbered("body."), eleven),
        (numbered("0.10.") | numbered("0.9."), nn.Sequential(nn.Sequential(eleven, eleven))),
        (numbered("b.") | numbered("a."), {"a": eleven, "b": eleven}),
    ):
        from_file = dict(sorted(given.items()))
        assert [*from_file] != [*given]
        for read in (given, from_file):
            firsts = [float(x.reshape(-1)[0]) for x in jax.tree.leaves(dj.from_torch(read, layer))]
            assert firsts == [float(n) for n in range(11) for _ in range(2)] * (len(firsts) // 22)


def test_modules_with_names_keep_their_order() -> None:
    network = nn.Sequential(*[NO_BIAS] * 3)
    names = ("stem", "2", "10")  # not all of them are numbers
    for order in (names, names[::-1]):
        params = dj.from_torch({f"{name}.weight": np.full((2, 3), n) for n, name in enumerate(order)}, network)
        assert [int(its["weight"][0, 0]) for its in params] == [0, 1, 2]


def test_what_is_no_state_dict() -> None:
    array = "`state_dict['{}weight']` must be an array of numbers"
    for sentence, given in (
        ("`state_dict` (=None) must be a dictionary of arrays by name", None),
        ("`state_dict` (={3: ", {3: np.ones(2)}),
        (array + ", but has the dtype <U1.", {"weight": np.full((2, 3), "a")}),
        (array, {"weight": [[1.0], [1.0, 2.0]]}),
    ):
        for name, layer in (("", NO_BIAS), ("a.", {"a": NO_BIAS})):
            these = {f"{name}weight": given["weight"]} if given and "weight" in given else given
            with pytest.raises(dj.InvalidTypeError) as error:
                dj.from_torch(these, layer)  # type: ignore[arg-type]
            assert sentence.replace("{}", name) in str(error.value)
    with pytest.raises(dj.InvalidTypeError) as error:
        dj.from_torch(ARRAYS, 3)  # type: ignore[arg-type]
    assert "`layer` (=3) must be a layer, or a dictionary of layers." in str(error.value)


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

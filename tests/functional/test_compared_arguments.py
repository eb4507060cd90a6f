"""Plain arguments that differ between workers are refused on all of them, or are said to be a worker's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import functional as F

X = np.arange(64.0).reshape(4, 4, 4)
IMAGE = np.arange(256.0).reshape(4, 4, 4, 4)
IDS = [2, 0, 1, 2]

# What each function is called with, and for each plain argument another value, which another worker gives.
AXES = {"axes": (0, (1,))}
REDUCTION = {"axes": (None, 1), "keepdims": (True, False)}
AXES_OF_GRID = {"axes_reduce": ((0, 1), 0), "axes_keep": (None, None)}
SEGMENTS = {"segment_ids": (IDS, IDS[::-1]), "num_segments": (3, 4), "axis": (0, 1)}
SCAN = {"axis": (0, 1), "reverse": (False, True)}
FOURIER = {"axes": (-1, 1), "norm": (None, "ortho")}
COPIES = {"transpose_src": (False, True), "transpose_dest": (False, True), "preserve_batch": (True, False)}

ARGUMENTS: dict[str, dict[str, tuple[Any, Any]]] = {
    "affine_grid": {"size": ((2, 1, 4, 4), (2, 1, 4, 6)), "align_corners": (False, True)},
    "all_gather": AXES,
    "all_max": AXES_OF_GRID,
    "all_reduce": {"op": ("sum", "max"), **AXES_OF_GRID},
    "all_sum_reduce": AXES_OF_GRID,
    "all_to_all": {"split_axis": (0, 1), "concat_axis": (2, 1)},
    "argmax": {"axis": (1, 0)},
    "associative_scan": SCAN,
    "broadcast": COPIES,
    "cummax": SCAN,
    "cummin": SCAN,
    "cumprod": SCAN,
    "cumsum": SCAN,
    "depth_to_space": {"block_size": (2, 1), "axes": (None, (1,)), "channel_axis": (-1, 1)},
    "fft": {**FOURIER, "axis": (None, 1), "n": (None, 6)},
    "fftn": {**FOURIER, "s": (None, (6,))},
    "grid_sample": {
        "mode": ("bilinear", "nearest"),
        "padding_mode": ("zeros", "border"),
        "align_corners": (False, True),
        "max_displacement": (None, 1.0),
    },
    "halo_exchange": {"halo": (((1, 1), (0, 0), (0, 0)), ((0, 1), (0, 0), (0, 0))), "periodic": ((), (True,) * 3)},
    "ifft": {**FOURIER, "axis": (None, 1), "n": (None, 6)},
    "ifftn": {**FOURIER, "s": (None, (6,))},
    "irfft": {**FOURIER, "axis": (None, 1), "n": (None, 8)},
    "irfftn": {**FOURIER, "n": (None, 8), "s": (None, (8,))},
    "max": REDUCTION,
    "mean": REDUCTION,
    "min": REDUCTION,
    "pixel_shuffle": {"upscale_factor": (2, 1), "axes": (None, (2,)), "channel_axis": (1, 0)},
    "pixel_unshuffle": {"downscale_factor": (2, 1), "axes": (None, (2,)), "channel_axis": (1, 0)},
    "reduce_scatter": AXES,
    "repartition": {"preserve_batch": (True, False)},
    "reshape": {"shape": ((4, 16, 1), (4, 1, 16))},
    "rfft": {**FOURIER, "axis": (None, 1), "n": (None, 6)},
    "rfftn": {**FOURIER, "s": (None, (6,))},
    "roll": {"shift": (1, 2), "axis": (0, 1)},
    "segment_max": SEGMENTS,
    "segment_mean": SEGMENTS,
    "segment_min": SEGMENTS,
    "segment_softmax": SEGMENTS,
    "segment_sum": SEGMENTS,
    "space_to_depth": {"block_size": (2, 1), "axes": (None, (1,)), "channel_axis": (-1, 1)},
    "std": {**REDUCTION, "ddof": (0, 1)},
    "sum": REDUCTION,
    "sum_reduce": COPIES,
    "take": {"indices": (IDS, IDS[::-1]), "axis": (0, 1)},
    "top_k": {"k": (2, 3), "axis": (-1, 0)},
    "var": {**REDUCTION, "ddof": (0, 1)},
    "window_mask": {"window_size": (2, 4), "shift": (1, 0), "axes": (None, (1,))},
    "window_partition": {"window_size": (2, 4), "axes": (None, (1,))},
    "window_reverse": {"axes": ((1,), (2,))},
}

OPERANDS = ("x", "grid", "theta", "f", "P_x", "P_y")

OWN = {
    ("affine_grid", "size"): "nothing moves, and nobody is asked",
    ("affine_grid", "align_corners"): "nothing moves, and nobody is asked",
    ("halo_exchange", "halo"): "each worker says how much it needs",
}
"""Arguments that may differ, as their docstrings say, and why."""

ON_IMAGES = ("affine_grid", "depth_to_space", "grid_sample", "pixel_shuffle", "pixel_unshuffle", "space_to_depth",
             "window_mask", "window_partition")  # fmt: skip


def cases() -> Iterator[Any]:
    for name, arguments in ARGUMENTS.items():
        for argument, (one, other) in arguments.items():
            if one != other:
                yield pytest.param(name, argument, id=f"{name}-{argument}")


def test_all_plain_arguments_are_tried() -> None:
    for name in F.__all__:
        plain = [each for each in inspect.signature(getattr(F, name)).parameters if each not in OPERANDS]
        assert list(ARGUMENTS[name]) == plain, name


@pytest.mark.parametrize(("name", "argument"), cases())
@pytest.mark.parametrize("split", [0, 1])
def test_another_value_on_one_worker_is_refused_on_both(name: str, argument: str, split: int) -> None:
    def program() -> None:
        P = dj.Partition()
        operands = operands_of(name, P, split)
        given = {each: one for each, (one, _) in ARGUMENTS[name].items() if one is not None}
        getattr(F, name)(**operands, **given)
        if P.rank == 1:
            given[argument] = ARGUMENTS[name][argument][1]
        getattr(F, name)(**operands, **given)
        P.allgather_data(None)  # where nothing moves along a dimension that is not split, on either worker

    if (name, argument) in OWN:
        dj.simulate(2, program)
        return
    with pytest.raises(dj.DistDLError) as raised:
        dj.simulate(2, program)
    assert type(raised.value) is not dj.InvalidTypeError


def operands_of(name: str, P: dj.Partition, split: int) -> dict[str, Any]:
    """Return the blocks and partitions that a function gets on a worker; dimension `split` is split."""
    whole = IMAGE if name in ON_IMAGES else X
    P_x = P.grid([2 if d == split else 1 for d in range(whole.ndim)])
    x = jnp.asarray(dj.TensorSpec(whole.shape, P_x).block(whole))
    more: dict[str, Any] = {}
    match name:
        case "window_reverse":
            x = F.window_partition(x, P_x, 2, axes=1)
        case "affine_grid":
            return {"theta": jnp.tile(jnp.eye(2, 3), (1 if split == 0 else 2, 1, 1)), "P_x": P_x}
        case "grid_sample":
            more["grid"] = jnp.zeros((*x.shape[:1], *x.shape[2:], 2))
        case "associative_scan":
            more["f"] = jnp.add
        case "repartition" | "reshape":
            more["P_y"] = P_x
        case "broadcast" | "sum_reduce":
            P_one = P.grid([1, 1, 1])
            if name == "broadcast":
                return {"x": x if P_one.active else dj.zero_volume_tensor(), "P_x": P_one, "P_y": P_x}
            more["P_y"] = P_one
    return {"x": x, "P_x": P_x, **more}


def test_the_sentence_names_the_argument_and_its_values() -> None:
    def program() -> str:
        P = dj.Partition()
        with pytest.raises(dj.PlanError) as raised:
            F.std(jnp.ones(2), P.grid([2]), ddof=P.rank)
        return str(raised.value)

    (sentence,) = set(dj.simulate(2, program))
    label = "std along (0,), keepdims True, ddof {}, on 2 (0, 1) (test_compared_arguments.py:"
    assert sentence.startswith(f"The workers' programs differ: worker 0 is about to run {label.format(0)}")
    assert f"but worker 1 is about to run {label.format(1)}" in sentence


def test_numbers_that_mean_the_same_are_accepted() -> None:
    """Python's on one worker and numpy's on the other, and one dimension in three spellings."""

    def program() -> float:
        P = dj.Partition()
        axes, ddof, keep = (((0,), 1, True), ([np.int64(0)], np.int8(1), np.bool_(True)))[P.rank]
        return float(F.var(jnp.arange(2.0) + 2 * P.rank, P.grid([2]), axes, keep, ddof)[0])

    np.testing.assert_allclose(dj.simulate(2, program), np.var(np.arange(4.0), ddof=1))


@pytest.mark.parametrize("name", F.__all__)
def test_an_argument_that_a_function_does_not_have(name: str) -> None:
    """The sentence names the function, the argument, and the one with nearly that name; so do calls that lack one."""
    function = getattr(F, name)
    *_, last = inspect.signature(function).parameters
    near = rf"^{name} has no argument `{last}_`\. Did you mean `{last}`\? It takes `"
    with pytest.raises(dj.InvalidTypeError, match=near):
        function(**{f"{last}_": 1})
    with pytest.raises(dj.InvalidTypeError, match=rf"^{name} takes `.*: missing a required argument: '\w+'\.$"):
        function(X)
    with pytest.raises(dj.InvalidTypeError, match=rf"^{name} takes `.*: too many positional arguments\.$"):
        function(*[X] * 9)


def test_the_usual_names_of_dimensions() -> None:
    """NumPy's and PyTorch's, for reductions, whose own is `axes`."""
    for name in ("axis", "dim"):
        with pytest.raises(dj.InvalidTypeError, match=f"^mean has no argument `{name}`.*takes `x`, `P_x`, `axes` and"):
            F.mean(X, dj.planning_world(1), **{name: 2})

"""Window arithmetic against enumerating what each window reads, and whole convolutions cut into blocks."""

import numpy as np
import pytest
from launcher.examples import LONG
from plans.blocks_of_grids import random_blocks
from simulator import simulate

from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.windows import WindowedAxis, same_padding


def reads(windows):
    """Return for each output the inputs that it reads, counted one by one along the padded input."""
    low, high = windows.padding
    found, first = [], -low
    while first + windows.dilation * (windows.kernel - 1) < windows.size + high:
        found.append([first + windows.dilation * k for k in range(windows.kernel)])
        first += windows.stride
    return found


def convolve(x, weights, windows):
    """Compute the convolution without padding of `x`, by its definition."""
    span = windows.dilation * (windows.kernel - 1) + 1
    return [int(x[j : j + span : windows.dilation] @ weights) for j in range(0, len(x) - span + 1, windows.stride)]


def all_windows(rng, count):
    """Draw arguments, without those that give no output."""
    while count:
        size, kernel, stride, dilation, low, high = (int(rng.integers(a, b)) for a, b in LIMITS)
        if dilation * (kernel - 1) + 1 <= size + low + high:
            count -= 1
            yield WindowedAxis(size, kernel, stride, dilation, (low, high), periodic=bool(size and rng.random() < 0.3))


LIMITS = ((0, 20), (1, 7), (1, 6), (1, 4), (0, 6), (0, 6))


def test_ranges_are_what_the_windows_read():
    rng = np.random.default_rng(4)
    for windows in all_windows(rng, 4000 * LONG):
        read = reads(windows)
        assert windows.outputs == len(read), windows
        p = int(rng.integers(1, 9))
        assert tuple(windows.output_range(p, i) for i in range(p)) == balanced_ranges(len(read), p)
        for i, wanted in enumerate(windows.input_ranges(p)):
            mine = [k for window in read[slice(*windows.output_range(p, i))] for k in window]
            (start, stop), (low, high) = windows.clipped(wanted)
            if not mine:
                assert wanted[0] == wanted[1] == start == stop and (low, high) == (0, 0), windows
                assert 0 <= start <= windows.size
                continue
            assert wanted == (min(mine), max(mine) + 1), windows
            if windows.periodic:
                assert (start, stop) == wanted and (low, high) == (0, 0)
                continue
            inside = [k for k in range(*wanted) if 0 <= k < windows.size]
            assert list(range(start, stop)) == inside and 0 <= start <= stop <= windows.size, windows
            below = [k for k in range(*wanted) if k < 0]
            above = [k for k in range(*wanted) if k >= windows.size]
            assert (low, high) == (len(below), len(above)), windows


def distributed(x, weights, windows, owned):
    """Compute the convolution with `x` in blocks: halo exchange, local padding, local convolution without padding."""
    p = len(owned)
    wanted = [windows.clipped(window) for window in windows.input_ranges(p)]
    halos = Halos(ProductGrid(tuple(range(p)), (owned,)), (tuple(need for need, _ in wanted),), (windows.periodic,))
    blocks = simulate({r: halos.plans(r) for r in range(p)}, {r: x[slice(*owned[r])] for r in range(p)})
    outputs = [convolve(np.pad(blocks[r], wanted[r][1]), weights, windows) for r in range(p)]
    for r, out in enumerate(outputs):
        start, stop = windows.output_range(p, r)
        assert len(out) == stop - start, f"worker {r} has {len(out)} outputs, not {stop - start}"
    return [value for out in outputs for value in out]


def check_convolution(windows, owned):
    rng = np.random.default_rng(5)
    x, weights = rng.integers(-9, 10, windows.size), rng.integers(-9, 10, windows.kernel)
    padded = np.pad(x, windows.padding, mode="wrap" if windows.periodic else "constant")
    assert distributed(x, weights, windows, owned) == convolve(padded, weights, windows), (windows, owned)


KNOWN_FAILURES = {  # of the original DistDL: workers, then the arguments of WindowedAxis
    "19 outputs, not 18: padding beyond the kernel (P=3 n=16 k=1 p=1)": (3, WindowedAxis(16, 1, padding=(1, 1))),
    "block smaller than the kernel's reach (P=4 n=6 k=3)": (4, WindowedAxis(6, 3)),
    "block smaller than the kernel's reach, even kernel (P=4 n=8 k=4)": (4, WindowedAxis(8, 4)),
    "block smaller than the dilated kernel's reach (P=3 n=7 k=3 d=2)": (3, WindowedAxis(7, 3, dilation=2)),
    "halo from the second neighbour (P=4 n=10 k=7 p=3)": (4, WindowedAxis(10, 7, padding=(3, 3))),
    "worker without output (P=2 n=2 k=2)": (2, WindowedAxis(2, 2)),
    "input that nobody reads (P=4 n=4 k=1 s=2)": (4, WindowedAxis(4, 1, stride=2)),
}


@pytest.mark.parametrize("name", KNOWN_FAILURES)
def test_what_the_original_gets_wrong(name):
    p, windows = KNOWN_FAILURES[name]
    check_convolution(windows, balanced_ranges(windows.size, p))


def test_convolutions_in_balanced_and_unbalanced_blocks():
    """1,000 convolutions against the sequential one: strides that skip data, even kernels, empty blocks, periodic."""
    rng = np.random.default_rng(6)
    for windows in all_windows(rng, 1000 * LONG):
        p = int(rng.integers(1, 9))
        check_convolution(windows, random_blocks(rng, windows.size, p))


@pytest.mark.parametrize("kernel", range(1, 7))
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_same_padding_keeps_the_size_and_its_left_side_is_the_shorter(kernel, dilation):
    low, high = same_padding(kernel, dilation)
    assert WindowedAxis(11, kernel, dilation=dilation, padding=(low, high)).outputs == 11
    assert high - low == (dilation * (kernel - 1)) % 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 3, "kernel": 4}, r"`kernel` \(=4\) with dilation 1 spans 4 inputs, .* at most the padded input's 3"),
        (
            {"size": 4, "kernel": 3, "dilation": 3, "padding": (1, 1)},
            r"spans 7 inputs, .* at most the padded input's 6",
        ),
        ({"size": 0, "kernel": 1}, r"`kernel` \(=1\)"),
        ({"size": -1, "kernel": 1}, r"`size` \(=-1\) must be 0 or more"),
        ({"size": 3, "kernel": 0}, r"`kernel` \(=0\) must be 1 or more"),
        ({"size": 3, "kernel": 1, "stride": 0}, r"`stride` \(=0\) must be 1 or more"),
        ({"size": 3, "kernel": 1, "dilation": -2}, r"`dilation` \(=-2\) must be 1 or more"),
        ({"size": 3, "kernel": 1, "padding": (0, -1)}, r"`padding` \(=\(0, -1\)\)"),
        ({"size": 0, "kernel": 1, "padding": (1, 0), "periodic": True}, r"`size` \(=0\) must be 1 or more in a peri"),
    ],
)
def test_impossible_windows_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WindowedAxis(**arguments)

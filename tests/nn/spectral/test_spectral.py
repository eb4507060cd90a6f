"""Fourier transforms, and layers on their frequencies, beside numpy and plain JAX, however the tensor is split."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from launcher.examples import LONG
from matrix.partitions import On, on
from sequential import Beside, check_beside, cut

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.fourier.fft import plan_fourier
from distdl_jax.plans.pencils import pencils
from distdl_jax.plans.shape_dtype import ShapeDtype

TOLERANCE = 1e-12


class Case(NamedTuple):
    """A transform: which, of what, where, along which dimensions; `n` is the length of what irfft gives."""

    kind: str
    sizes: Any
    P_x: On
    axes: tuple[int, ...]
    norm: str | None = None
    dtype: Any = float
    n: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n if isinstance(n, int) else sum(n) for n in self.sizes)

    def draw(self, shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
        parts = np.random.default_rng(seed).integers(-9, 10, (2, *shape)) / 8
        whole = parts[0] + 1j * parts[1] if np.issubdtype(dtype, np.complexfloating) else parts[0]
        return (np.round(whole) if np.issubdtype(dtype, np.integer) else whole).astype(dtype)

    @property
    def x(self) -> np.ndarray:
        return self.draw(self.shape, self.dtype, 1)

    @property
    def lengths(self) -> list[int]:
        """Of what irfft gives."""
        lengths = [self.shape[a] for a in self.axes]
        lengths[-1] = self.n or 2 * (lengths[-1] - 1)
        return lengths

    def whole(self, x: np.ndarray) -> np.ndarray:
        if self.kind == "irfft":
            return np.fft.irfftn(x, self.lengths, self.axes, self.norm)
        result: np.ndarray = getattr(np.fft, self.kind + "n")(x, axes=self.axes, norm=self.norm)
        return result

    def transpose(self, dy: np.ndarray) -> np.ndarray:
        """JAX's cotangent: that of the matrix, which is symmetric but for what is left out."""
        last, n = self.axes[-1], self.shape[self.axes[-1]]
        if self.kind == "rfft":
            widths = [(0, n - dy.shape[d] if d == last % dy.ndim else 0) for d in range(dy.ndim)]
            return np.fft.fftn(np.pad(dy, widths), axes=self.axes, norm=self.norm).real
        if self.kind == "irfft":
            times, highest = np.full(n, 2.0), self.lengths[-1] // 2
            times[highest + 1 :] = 0
            if self.lengths[-1] % 2 == 0:
                times[highest : highest + 1] = 1
            times[0] = 1  # it may be the highest one
            full = np.moveaxis(np.fft.ifftn(dy, axes=self.axes, norm=self.norm), last, -1)
            full = np.pad(full, [(0, 0)] * (full.ndim - 1) + [(0, max(n - full.shape[-1], 0))])
            return np.moveaxis(full[..., :n] * times, -1, last)
        result: np.ndarray = getattr(np.fft, self.kind + "n")(dy, axes=self.axes, norm=self.norm)
        return result.real if not np.issubdtype(self.dtype, np.complexfloating) else result


CASES = (
    Case("fft", (6, 5, 7), on(2, 2, 1), (0, 1, 2), dtype=complex),
    Case("ifft", (2, 5, 7), on(1, 2, 2), (1, 2), "ortho", complex),
    Case("rfft", (6, 5, 7), on(1, 2, 2, ranks=(3, 1, 0, 2)), (1, 2), "forward"),
    Case("rfft", (3, 4, 5, 3), on(1, 2, 1, 2), (0, 3, 1)),
    Case("rfft", (2, 4, 3, 2, 5), on(1, 2, 1, 1, 2), (1, 2, 3, 4)),
    Case("irfft", (2, 4, 3), on(1, 2, 2), (1, 2), None, complex, 5),
    Case("irfft", (2, 5, 4), on(1, 2, 2), (1, 2), None, complex, 3),
    Case("irfft", (2, 3, 4), on(1, 1, 4), (2, 1), "ortho", complex),
    Case("fft", ([3, 0, 2],), on(3, ranks=(2, 0, 3)), (0,)),
    Case("rfft", (4, 2), on(2, 2), (0,), dtype=np.int32),
    Case("fft", (3, 8, 5), on(2, 2, 1, ranks=(3, 1, 0, 2)), (2, 1), "forward", complex),
    Case("ifft", (4, 2, 3), on(2, 1, 1, ranks=(2, 0)), (0, 1, 2), "ortho", complex),
    Case("fft", (2, 4, 3), on(1, 2, 2), (1,), None, complex),
    Case("ifft", (4, 3), on(2, 1), (0, 1)),
    Case("rfft", (2, 4, 3), on(1, 2, 1), (1, 2), "ortho"),
    Case("irfft", (4, 3), on(2, 1), (0, 1), None, complex),
    Case("irfft", (3, 4), on(1, 2), (1, 0), None, complex, 5),
    Case("rfft", (2, 2, 3, 2), on(1, 1, 1, 1), (0, 1, 2, 3)),
    Case("irfft", (2, 2, 3, 2), on(1, 1, 1, 1), (0, 1, 2, 3), None, complex),
)
MORE = (
    Case("fft", ([0, 4], [1, 2], 5), on(2, 2, 1), (1,), "forward", complex),
    Case("ifft", (2, 3, 2, 3, 4), on(1, 2, 1, 2, 1), (0, 1, 2, 3, 4), dtype=complex),
    Case("rfft", (2, 3, 2, 3, 4), on(1, 2, 1, 2, 1), (0, 4, 2, 1, 3)),
    Case("irfft", (2, 3, 2, 3, 4), on(1, 2, 1, 2, 1), (0, 4, 2, 1, 3), None, complex),
    Case("irfft", (4, 6), on(2, 2), (1, 0), "forward", complex, 7),
    Case("irfft", (2, 4, 3), on(1, 2, 2), (1, 2), "ortho", complex, 9),
    Case("irfft", (2, 3, 2, 3, 4), on(1, 2, 1, 2, 1), (0, 4, 2, 1, 3), None, complex, 2),
    Case("irfft", (4, 6), on(2, 2), (0, 1), None, complex, 16),
    Case("irfft", (4, 6), on(2, 2), (1,), None, complex, 1),
    Case("irfft", (3, 1), on(1, 3), (1,), None, complex, 1),
    Case("rfft", (1, 9), on(1, 4), (1,)),
    Case("fft", (3, 8), on(4, 1, ranks=(3, 1, 0, 2)), (0, 1)),
    Case("ifft", (2, 2, 12, 1), on(2, 1, 2, 1), (1, 2, 3), "forward", complex),
    Case("fft", ([3, 1], 5), on(2, 1), (0, 1), None, complex),
    Case("fft", (4, [0, 2], 5), on(1, 2, 1), (1, 2), None, complex),
    Case("fft", (0, 4, 5), on(1, 2, 1), (1, 2), None, complex),
    Case("fft", (6, 5), on(2, 1), (0, 1), "ortho", complex),
    Case("rfft", (3, 8, 2, 4), on(2, 2, 1, 1), (2, 1, 3)),
    Case("rfft", (2, 4, 2), on(2, 2, 1), (1, 2), None, np.int32),
    Case("irfft", (2, 8, 5), on(2, 2, 1), (1, 2), "forward", complex, 3),
    Case("irfft", (4, 2, 3), on(2, 1, 1), (0, 1, 2), "ortho", complex, 7),
    Case("irfft", (4, 5), on(2, 1), (1, 0), None, complex),
)


@pytest.mark.simulated(4)
def test_transforms_beside_numpy() -> None:
    """Forward and cotangents: all kinds and norms; dimensions, in any order, that are uneven, empty, on any workers."""
    check(CASES if LONG == 1 else CASES + MORE)


@pytest.mark.world(4)
def test_transforms_over_mpi() -> None:
    check(CASES[:1] if LONG == 1 else CASES)


def check(cases: tuple[Case, ...]) -> None:
    P, xs, dys, wants = dj.Partition(), [], [], []
    for case in cases:
        y = case.whole(case.x)
        dy = case.draw(y.shape, y.dtype, 2)
        sizes = [n for n in case.sizes]
        last = case.axes[-1] if case.kind in ("rfft", "irfft") else None
        y_sizes = [m if d == last else n for d, (n, m) in enumerate(zip(sizes, y.shape, strict=True))]
        dx = case.transpose(dy) if not np.issubdtype(case.dtype, np.integer) else None
        mine = cut(case.x, case.P_x, P.rank, sizes)
        xs.append(np.zeros(0, case.dtype) if mine is None else mine)
        dys.append(np.zeros(0, case.dtype) if mine is None else cut(dy, case.P_x, P.rank, y_sizes))
        wants.append(
            (np.zeros(0), np.zeros(0))
            if mine is None
            else (
                cut(y, case.P_x, P.rank, y_sizes),
                None if dx is None else cut(dx, case.P_x, P.rank, sizes),
            )
        )

    @dj.jit
    def program(xs: Any, dys: Any) -> Any:
        found = []
        for case, x, dy in zip(cases, xs, dys, strict=True):
            options = {"n": case.n} if case.kind == "irfft" else {}

            def transform(x: Any, case: Case = case, options: Any = options) -> Any:
                transform = getattr(dj.functional, case.kind)
                return transform(x, case.P_x.partition(P), case.axes, case.norm, **options)

            y, pullback = jax.vjp(transform, x)
            found.append((y, pullback(dy.astype(y.dtype))[0]))
        return found

    for case, got, want in zip(cases, program(xs, dys), wants, strict=True):
        for mine, its in zip(got, want, strict=True):
            if its is not None:
                assert mine.shape == its.shape, case
                np.testing.assert_allclose(mine, its, rtol=0, atol=TOLERANCE * 10, err_msg=str(case))


RESIZED = (
    ("fft", (2, 5, 6), on(1, 2, 2, ranks=(3, 1, 0, 2)), complex, {"axis": -1, "n": 9, "norm": "ortho"}),
    ("rfft", ([0, 5], 3), on(2, 1, ranks=(2, 0)), float, {"axis": 0, "n": 2}),
    ("fftn", (3, 4, 5), on(2, 2, 1), complex, {"s": (5, 3), "norm": "forward"}),
    ("ifftn", (3, 4), on(4, 1), complex, {"s": (1, 6), "axes": (1, 0)}),
    ("rfftn", (3, 4, 5), on(1, 2, 2), float, {"s": (6, 8), "axes": (2, 1), "norm": "ortho"}),
    ("irfftn", (3, 4, 5), on(1, 2, 2), complex, {"s": (2, 9), "axes": (1, 2)}),
)
"""Transforms of another length than the tensor's: name, sizes, partition, dtype, options as `jnp.fft` takes them."""


@pytest.mark.simulated(4)
def test_transforms_of_other_lengths_beside_plain_jax() -> None:
    P, values = dj.Partition(), np.random.default_rng(5)

    def both(transform: Any, x: Any) -> Any:
        y, pullback = jax.vjp(transform, x)
        return y, pullback(jnp.cos(y))[0]

    whole = []
    for _, sizes, _, dtype, _ in RESIZED:
        parts = values.standard_normal((2, *(np.sum(n) for n in sizes)))
        whole.append(parts[0] + 1j * parts[1] if dtype is complex else parts[0])

    def in_one_place(xs: Any) -> Any:
        return [
            both(lambda x, case=case: getattr(jnp.fft, case[0])(x, **case[4]), x)
            for case, x in zip(RESIZED, xs, strict=True)
        ]

    xs, wants = [], []
    plain = P.broadcast_data(jax.device_get(jax.jit(in_one_place)(whole)) if P.rank == 0 else None, root=0)
    for (_, sizes, P_x, dtype, _), x, (y, dx) in zip(RESIZED, whole, plain, strict=True):
        y_sizes = [n if m == np.sum(n) else m for n, m in zip(sizes, y.shape, strict=True)]
        parts = (cut(x, P_x, P.rank, sizes), cut(y, P_x, P.rank, y_sizes), cut(dx, P_x, P.rank, sizes))
        x, y, dx = (np.zeros(0, dtype) if part is None else part for part in parts)
        xs.append(x)
        wants.append((y, dx))

    @dj.jit
    def program(xs: Any) -> Any:
        return [
            both(lambda x, case=case: getattr(dj.functional, case[0])(x, case[2].partition(P), **case[4]), x)
            for case, x in zip(RESIZED, xs, strict=True)
        ]

    for case, got, want in zip(RESIZED, program(xs), wants, strict=True):
        for mine, its in zip(got, want, strict=True):
            assert mine.shape == its.shape, case
            np.testing.assert_allclose(mine, its, rtol=0, atol=TOLERANCE, err_msg=str(case))


def spectral(
    sizes: Any, P_x: On, modes: tuple[int, ...], P_W: On | None = None, out: int = 2, block: bool = False
) -> Beside:
    """Of the whole spectrum, a product with the weight where it has one."""
    dims = len(modes)

    def convolved(weight: Any, x: Any) -> Any:
        axes = tuple(range(2, x.ndim))
        spectrum = jnp.fft.rfftn(x, axes=axes)
        whole = jnp.zeros((*weight.shape[:2], *spectrum.shape[2:]), complex)
        places = [jnp.r_[0:m, n - m : n] for m, n in zip(modes[:-1], x.shape[2:-1], strict=True)]
        where = jnp.ix_(*(jnp.arange(n) for n in weight.shape[:2]), *places, jnp.arange(modes[-1]))
        whole = whole.at[where].set(weight[..., 0] + 1j * weight[..., 1])
        return jnp.fft.irfftn(jnp.einsum("bi...,io...->bo...", spectrum, whole), x.shape[2:], axes)

    def whole(params: Any, x: Any) -> Any:
        if not block:
            return convolved(params["weight"], x)
        linear = params["pointwise"]
        y = jnp.einsum("bi...,oi->bo...", x, linear["weight"].reshape(out, -1))
        y = y + linear["bias"].reshape(-1, *(1,) * dims)
        return jnp.tanh(convolved(params["spectral"]["weight"], x) + y)

    def layer(P: dj.Partition) -> Any:
        on_W = P_W.partition(P) if P_W else None
        if block:
            return nn.DistributedFNOBlock(P_x.partition(P), sizes[1], out, modes, jnp.tanh, on_W)
        return getattr(nn, f"DistributedSpectralConv{dims}d")(P_x.partition(P), sizes[1], out, modes, on_W)

    return Beside(
        f"spectral {sizes} {P_x} {modes} {P_W} {block}", sizes, layer, whole, P_x, None, (sizes[0], out, *sizes[2:])
    )


LAYERS = (
    spectral((2, 3, 6, 5), on(1, 1, 2, 2), (2, 3)),
    spectral((2, 3, 5), on(2, 2, 1, ranks=(3, 1, 0, 2)), (3,)),
    spectral((2, 2, 4, [0, 5]), on(1, 1, 1, 2), (2, 2), on(1, 1, 3, 1, ranks=(1, 3, 2)), 3),
    spectral((1, 2, 4, 5, 4), on(1, 1, 4, 1, 1), (1, 2, 2), None, 3, True),
    spectral((1, 2, [1, 3], 3), on(1, 1, 2, 1, ranks=(3, 2)), (2, 1)),  # as many frequencies as rows
    spectral((1, 2, 4, [3, 0], 2, 5), on(1, 1, 1, 2, 1, 2, ranks=(2, 0, 3, 1)), (2, 1, 1, 3)),
    spectral((2, 2, 2, 2, 3, 4), on(1, 1, 2, 1, 1, 2), (1, 1, 1, 2), on(1, 1, 1, 2, 1, 1, ranks=(3, 0)), 3, True),
)
MORE_LAYERS = (
    spectral((1, 2, 4, 4, 4), on(1, 1, 2, 1, 2), (2, 1, 3)),
    spectral((3, 2, 8), on(1, 1, 4), (4,)),
    spectral((4, 2, 7), on(4, 1, 1), (2,), on(1, 1, 2)),
    spectral((2, 2, 6, 6), on(1, 1, 4, 1), (1, 4), on(1, 1, 1, 4, ranks=(3, 2, 1, 0))),
    spectral((2, 2, 6, 6), on(2, 1, 2, 1), (2, 2), None, 2, True),
    spectral((2, 3, 9), on(1, 1, 3, ranks=(2, 0, 3)), (2,), None, 1, True),
    spectral((3, 2, 2, 3, 4, 4), on(2, 1, 1, 1, 2, 1), (1, 1, 2, 3), None, 1, True),
    spectral((1, 2, 4, 2, 2, 2), on(1, 2, 2, 1, 1, 1), (2, 1, 1, 1), on(1, 1, 3, 1, 1, 1, ranks=(1, 3, 2))),
)


@pytest.mark.simulated(4)
def test_layers_beside_plain_jax() -> None:
    """Output and gradients of spectral convolutions and blocks: everything split, blocks without modes, any teams."""
    check_beside(LAYERS if LONG == 1 else LAYERS + MORE_LAYERS)


@pytest.mark.simulated(2)
def test_what_dtypes_become() -> None:
    """Frequencies of single and half precisions, of integers and booleans; real numbers of those."""
    P_x = dj.Partition().grid([2])
    names = ("float16", "bfloat16", "float32", "float64", "complex64", "int8", "bool")
    xs = [np.ones(2, jax.numpy.dtype(name)) for name in names]
    ys = dj.jit(lambda xs: [dj.functional.fft(x, P_x) for x in xs])(xs)
    assert [str(y.dtype) for y in ys] == ["complex64"] * 3 + ["complex128"] + ["complex64"] * 3
    assert dj.functional.irfft(ys[0], P_x).dtype == np.float32
    gradient = jax.grad(lambda x: dj.functional.rfft(x, P_x, norm="ortho").real.sum())(xs[1])
    assert gradient.dtype == xs[1].dtype


def test_the_fewest_movements() -> None:
    """None, two, or one more for each dimension that can't wait; and slabs rather than idle workers."""

    def moves(extent: Any, shape: Any, axes: Any) -> int:
        return len(pencils(extent, shape, tuple((a, extent[a]) for a in axes), shape)) - 1

    assert moves((8, 8, 8), (2, 2, 1), (2,)) == 0
    assert moves((8, 8, 8), (2, 1, 1), (0, 1, 2)) == 2
    assert moves((2, 8, 8, 8), (1, 1, 2, 2), (1, 2, 3)) == 2
    assert moves((1, 8, 8, 8), (1, 2, 2, 2), (1, 2, 3)) == 3
    assert moves((64, 8, 8, 8), (1, 2, 2, 2), (1, 2, 3)) == 2
    assert pencils((8,), (4,), ((0, 8),), (4,))[1] == ((1,), (0,))


def test_refusals() -> None:
    """In one sentence on every worker."""

    def transform(kind: str, **options: Any) -> Any:
        def work(P: dj.Partition) -> Any:
            return getattr(dj.functional, kind)(np.zeros((2, 2)), on(1, 4).partition(P), **options)

        return work

    for sentence, work in {
        "`norm` (='unitary') must be None, 'backward', 'ortho' or 'forward'.": transform("fft", norm="unitary"),
        "`axes` (=(2,)) names dimension 2, but the partition": transform("ifft", axes=2),
        "`axes` (=()) must name a dimension or more.": transform("rfft", axes=()),
        "`n` (=0) must be 1 or more.": transform("irfft", n=0),
        "`axis` (=0) must not be given together with `axes` (=1): it is one of them.": transform("fft", axes=1, axis=0),
        "`s` (=(3,)) must have a length of 1 or more for each of the 2 dimensions": transform(
            "fftn", s=(3,), axes=(0, 1)
        ),
    }.items():
        assert sentence in refusal(4, work, dj.InvalidArgumentError), sentence
    sizes = {"in_channels": 2, "out_channels": 2}
    for sentence, work in {
        "`modes` (=(2, 2, 2)) must be an integer, 1 or more, or 1 of them.": lambda P: nn.DistributedSpectralConv1d(
            on(1, 1, 4).partition(P), **sizes, modes=(2, 2, 2)
        ),
        "`P_W` (1 x 2 x 2) must have shape 1 x 1 x ..., 3 dimensions": lambda P: nn.DistributedSpectralConv1d(
            on(1, 1, 4).partition(P), **sizes, modes=2, P_W=on(1, 2, 2).partition(P)
        ),
        "`P_x` (1 x 4) must have 4 dimensions: batch, channels, and 2 of": lambda P: nn.DistributedSpectralConv2d(
            on(1, 4).partition(P), **sizes, modes=2
        ),
        "`P_x` (1 x 2 x 2) must have 3 to 6 dimensions, batch, channels, and features, and one worker along": (
            lambda P: nn.DistributedFNOBlock(on(1, 2, 2).partition(P), **sizes, modes=2)
        ),
    }.items():
        assert sentence in refusal(4, work, dj.InvalidArgumentError), sentence

    def plan(kind: Any, dtype: str, shape: Any = (3, 2), **options: Any) -> Any:
        held = {worker: ShapeDtype(shape, np.dtype(dtype)) for worker in range(4)}
        return lambda P: plan_fourier(kind, held, on(1, 4).partition(P), **options)

    def layer(modes: Any, P_x: On, shape: Any, dtype: str = "float32", block: bool = False) -> Any:
        held = {worker: ShapeDtype(shape, np.dtype(dtype)) for worker in range(4)}
        kind = nn.DistributedFNOBlock if block else nn.DistributedSpectralConv2d
        return lambda P: kind(P_x.partition(P), **sizes, modes=modes).plan(held)

    for sentence, work in {
        "`modes` (=(4, 4)) must be at most (3, 5) for features of 6 x 8: half of a length": layer(
            4, on(1, 1, 2, 2), (2, 2, 3, 4)
        ),
        "`x` (of shape (2, 3, 6, 8)) must have 2 channels.": layer(2, on(1, 1, 2, 2), (2, 3, 3, 4)),
        "`x` must hold real floating-point numbers, not complex64.": layer(
            2, on(1, 1, 2, 2), (2, 2, 3, 4), "complex64"
        ),
        "`x` must hold real numbers for a transform that keeps half of the frequencies, not complex64.": plan(
            "rfft", "complex64"
        ),
        "`x` (of shape (0, 8)) must have an element along dimension 0.": plan("fft", "float32", (0, 2), axes=0),
    }.items():
        assert sentence in refusal(4, work, dj.PlanError), sentence

"""Fourier transforms, and layers on their frequencies, beside numpy and plain JAX, however the tensor is split."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from imaginary import refusal
from launcher.examples import LONG
from matrix.partitions import On, on
from sequential import cut

import distdl_jax as dj
from distdl_jax.plans.pencils import pencils

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
            times = np.full(n, 2.0)
            times[0], times[-1] = 1, 1 if self.lengths[-1] % 2 == 0 else times[-1]
            full = np.moveaxis(np.fft.ifftn(dy, axes=self.axes, norm=self.norm), last, -1)
            return np.moveaxis(full[..., :n] * times, -1, last)
        result: np.ndarray = getattr(np.fft, self.kind + "n")(dy, axes=self.axes, norm=self.norm)
        return result.real if not np.issubdtype(self.dtype, np.complexfloating) else result


CASES = (
    Case("fft", (6, 5, 7), on(2, 2, 1), (0, 1, 2), dtype=complex),
    Case("ifft", (2, 5, 7), on(1, 2, 2), (1, 2), "ortho", complex),
    Case("rfft", (6, 5, 7), on(1, 2, 2, ranks=(3, 1, 0, 2)), (1, 2), "forward"),
    Case("rfft", (3, 4, 5, 3), on(1, 2, 1, 2), (0, 3, 1)),
    Case("irfft", (2, 4, 3), on(1, 2, 2), (1, 2), None, complex, 5),
    Case("irfft", (2, 3, 4), on(1, 1, 4), (2, 1), "ortho", complex),
    Case("fft", ([3, 0, 2],), on(3, ranks=(2, 0, 3)), (0,)),
    Case("rfft", (4, 2), on(2, 2), (0,), dtype=np.int32),
)
MORE = (
    Case("fft", ([0, 4], [1, 2], 5), on(2, 2, 1), (1,), "forward", complex),
    Case("ifft", (2, 3, 2, 3, 4), on(1, 2, 1, 2, 1), (0, 1, 2, 3, 4), dtype=complex),
    Case("rfft", (2, 3, 2, 3, 4), on(1, 2, 1, 2, 1), (0, 4, 2, 1, 3)),
    Case("irfft", (2, 3, 2, 3, 4), on(1, 2, 1, 2, 1), (0, 4, 2, 1, 3), None, complex),
    Case("irfft", (4, 6), on(2, 2), (1, 0), "forward", complex, 7),
    Case("irfft", (3, 1), on(1, 3), (1,), None, complex, 1),
    Case("rfft", (1, 9), on(1, 4), (1,)),
    Case("fft", (3, 8), on(4, 1, ranks=(3, 1, 0, 2)), (0, 1)),
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


@pytest.mark.simulated(2)
def test_what_dtypes_become() -> None:
    """Frequencies of single and half precisions, of integers and booleans; real numbers of those."""
    P_x = dj.Partition().create_cartesian_topology_partition([2])
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
    }.items():
        assert sentence in refusal(4, work, dj.InvalidArgumentError), sentence
    from distdl_jax.plans.shape_dtype import ShapeDtype
    from distdl_jax.spectral.fourier import plan_fourier

    def plan(kind: Any, dtype: str, shape: Any = (3, 2), **options: Any) -> Any:
        held = {worker: ShapeDtype(shape, np.dtype(dtype)) for worker in range(4)}
        return lambda P: plan_fourier(kind, held, on(1, 4).partition(P), **options)

    for sentence, work in {
        "`x` must hold real numbers for a transform that keeps half of the frequencies, not complex64.": plan(
            "rfft", "complex64"
        ),
        "`n` (=13) must be 14 or 15, where `x` has 8 frequencies, from 0 on.": plan("irfft", "complex64", n=13),
        "`x` (of shape (0, 8)) must have an element along dimension 0.": plan("fft", "float32", (0, 2), axes=0),
    }.items():
        assert sentence in refusal(4, work, dj.PlanError), sentence

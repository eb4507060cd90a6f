"""Fourier transforms, and layers on their frequencies, beside plain JAX, however the tensor is split."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from matrix.partitions import On, on
from sequential import Beside, beside, check_beside, cut

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.fourier.fft import plan_fourier
from distdl_jax.plans.pencils import pencils
from distdl_jax.plans.shape_dtype import ShapeDtype

TOLERANCE = 1e-12


class Case(NamedTuple):
    """A transform: its name, of what, where, of which dtype, and options as `numpy.fft` takes them.

    Those of one dimension may have several `axes` instead; `n` is the length along the last of these.
    """

    name: str
    sizes: Any
    P_x: On
    options: dict[str, Any]
    dtype: Any = float

    @property
    def x(self) -> np.ndarray:
        parts = np.random.default_rng(5).standard_normal((2, *(int(np.sum(n)) for n in self.sizes)))
        whole = parts[0] + 1j * parts[1] if self.dtype is complex else parts[0]
        return (np.round(4 * whole) if self.dtype is np.int32 else whole).astype(self.dtype)

    def plain(self, x: Any) -> Any:
        name, options = self.name, dict(self.options)
        if "axes" in options and not name.endswith("n"):
            name += "n"
            if n := options.pop("n", None):
                options["s"] = (*(x.shape[axis] for axis in options["axes"][:-1]), n)
        return getattr(jnp.fft, name)(x, **options)


def both(transform: Any, x: Any) -> Any:
    """The result, and the gradient where the cotangent is its sine."""
    y, pullback = jax.vjp(transform, x)
    dy = jnp.sin(y.real) + 1j * jnp.sin(y.imag) if jnp.iscomplexobj(y) else jnp.sin(y)
    return y, pullback(dy)[0] if jnp.issubdtype(x.dtype, jnp.inexact) else x


CASES = (
    Case("fft", (6, 5, 7), on(2, 2, 1), {"axes": (0, 1, 2)}, complex),
    Case("ifft", (2, 5, 7), on(1, 2, 2), {"axes": (1, 2), "norm": "ortho"}, complex),
    Case("rfft", (6, 5, 7), on(1, 2, 2, ranks=(3, 1, 0, 2)), {"axes": (1, 2), "norm": "forward"}),
    Case("rfft", (2, 4, 3, 2, 5), on(1, 2, 1, 1, 2), {"axes": (1, 2, 3, 4)}),
    Case("irfft", (2, 4, 3), on(1, 2, 2), {"axes": (1, 2), "n": 5}, complex),
    Case("irfft", (2, 3, 4), on(1, 1, 4), {"axes": (2, 1), "norm": "ortho"}, complex),
    Case("fft", ([3, 0, 2],), on(3, ranks=(2, 0, 3)), {"axes": (0,)}),
    Case("rfft", (4, 2), on(2, 2), {"axes": (0,)}, np.int32),
    Case("ifft", (4, 2, 3), on(2, 1, 1, ranks=(2, 0)), {"axes": (0, 1, 2), "norm": "ortho"}, complex),
    Case("fft", (2, 4, 3), on(1, 2, 2), {"axes": (1,)}, complex),
    Case("irfft", (3, 4), on(1, 2), {"axes": (1, 0), "n": 5}, complex),
    Case("rfft", (2, 2, 3, 2), on(1, 1, 1, 1), {"axes": (0, 1, 2, 3)}),
    Case("irfft", (2, 2, 3, 2), on(1, 1, 1, 1), {"axes": (0, 1, 2, 3)}, complex),
    Case("fft", (2, 5, 6), on(1, 2, 2, ranks=(3, 1, 0, 2)), {"axis": -1, "n": 9, "norm": "ortho"}, complex),
    Case("rfft", ([0, 5], 3), on(2, 1, ranks=(2, 0)), {"axis": 0, "n": 2}),
    Case("fftn", (3, 4, 5), on(2, 2, 1), {"s": (5, 3), "norm": "forward"}, complex),
    Case("ifftn", (3, 4), on(4, 1), {"s": (1, 6), "axes": (1, 0)}, complex),
    Case("rfftn", (3, 4, 5), on(1, 2, 2), {"s": (6, 8), "axes": (2, 1), "norm": "ortho"}),
    Case("irfftn", (3, 4, 5), on(1, 2, 2), {"s": (2, 9), "axes": (1, 2)}, complex),
    Case("irfft", (3, 1), on(1, 3), {"axes": (1,), "n": 1}, complex),
    Case("fft", (0, 4, 5), on(1, 2, 1), {"axes": (1, 2)}, complex),
)


@pytest.mark.simulated(4)
@pytest.mark.parametrize("part", range(2))
def test_transforms_beside_plain_jax(part: int) -> None:
    """Forward and cotangents: all kinds, norms and lengths; dimensions, in any order, uneven, empty, on any workers."""
    P, cases = dj.Partition(), CASES[part::2]
    wholes = [case.x for case in cases]
    of_all = jax.jit(lambda xs: [both(case.plain, x) for case, x in zip(cases, xs, strict=True)])
    plain = P.broadcast_data(jax.device_get(of_all(wholes)) if P.rank == 0 else None, root=0)

    def mine(case: Case, whole: Any) -> Any:
        sizes = [n if m == np.sum(n) else m for n, m in zip(case.sizes, whole.shape, strict=True)]
        part = cut(whole, case.P_x, P.rank, sizes)
        return np.zeros(0, case.dtype) if part is None else part

    @dj.jit
    def program(xs: Any) -> Any:
        transforms = [partial(getattr(dj.functional, c.name), P_x=c.P_x.partition(P), **c.options) for c in cases]
        return [both(transform, x) for transform, x in zip(transforms, xs, strict=True)]

    got = program([mine(case, x) for case, x in zip(cases, wholes, strict=True)])
    for case, *pairs in zip(cases, got, plain, strict=True):
        for its, whole in zip(*pairs, strict=True):
            want = mine(case, whole)
            assert its.shape == want.shape, case
            np.testing.assert_allclose(its, want, rtol=0, atol=TOLERANCE * 10, err_msg=str(case))


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

    kind, more = ("FNOBlock", {"activation": jnp.tanh}) if block else (f"SpectralConv{dims}d", {})
    y_sizes = (sizes[0], out, *sizes[2:])
    return beside(kind, sizes, whole, P_x, sizes[1], out, modes, P_W=P_W, y_sizes=y_sizes, **more)


LAYERS = (
    spectral((2, 3, 6, 5), on(1, 1, 2, 2), (2, 3)),
    spectral((2, 3, 5), on(2, 2, 1, ranks=(3, 1, 0, 2)), (3,)),
    spectral((2, 2, 4, [0, 5]), on(1, 1, 1, 2), (2, 2), on(1, 1, 3, 1, ranks=(1, 3, 2)), 3),
    spectral((1, 2, 4, 5, 4), on(1, 1, 4, 1, 1), (1, 2, 2), None, 3, True),
    spectral((1, 2, [1, 3], 3), on(1, 1, 2, 1, ranks=(3, 2)), (2, 1)),  # as many frequencies as rows
    spectral((1, 2, 4, [3, 0], 2, 5), on(1, 1, 1, 2, 1, 2, ranks=(2, 0, 3, 1)), (2, 1, 1, 3)),
    spectral((2, 2, 2, 2, 3, 4), on(1, 1, 2, 1, 1, 2), (1, 1, 1, 2), on(1, 1, 1, 2, 1, 1, ranks=(3, 0)), 3, True),
)


@pytest.mark.simulated(4)
def test_layers_beside_plain_jax() -> None:
    """Output and gradients of spectral convolutions and blocks: everything split, blocks without modes, any teams."""
    check_beside(LAYERS)


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
    P_x, P_i = on(1, 4), on(1, 1, 2, 2)

    def transform(kind: str, **options: Any) -> Any:
        return lambda P: getattr(dj.functional, kind)(np.zeros((2, 2)), P_x.partition(P), **options)

    def held(shape: Any, dtype: str) -> Any:
        return {worker: ShapeDtype(shape, np.dtype(dtype)) for worker in range(4)}

    def plan(kind: Any, dtype: str, shape: Any = (3, 2), **options: Any) -> Any:
        return lambda P: plan_fourier(kind, held(shape, dtype), P_x.partition(P), **options)

    def layer(modes: Any, shape: Any, dtype: str = "float32") -> Any:
        return lambda P: nn.DistributedSpectralConv2d(P_i.partition(P), 2, 2, modes).plan(held(shape, dtype))

    for sentence, work in (
        ("`norm` (='unitary') must be None, 'backward', 'ortho' or 'forward'.", transform("fft", norm="unitary")),
        ("`axes` (=(2,)) names dimension 2, but the partition", transform("ifft", axes=2)),
        ("`axes` (=()) must have one dimension or more.", transform("rfft", axes=())),
        ("`n` (=0) must be 1 or more.", transform("irfft", n=0)),
        ("`axis` (=0) must not be given together with `axes` (=1).",
         transform("fft", axes=1, axis=0)),
        ("`s` (=(3,)) must have a length of 1 or more for each of the 2 transformed dimensions",
         transform("fftn", s=(3,), axes=(0, 1))),
    ):  # fmt: skip
        assert sentence in refusal(4, work, dj.InvalidArgumentError), sentence
    for sentence, work in (
        ("`modes` (=(4, 4)) must be at most (3, 5) for features of 6 x 8: half of the length", layer(4, (2, 2, 3, 4))),
        ("`x` (of shape (2, 3, 6, 8)) must have 2 channels.", layer(2, (2, 3, 3, 4))),
        ("`x` must hold real floating-point numbers, not complex64.", layer(2, (2, 2, 3, 4), "complex64")),
        ("`x` must hold real numbers for a transform that keeps half of the frequencies, not complex64.",
         plan("rfft", "complex64")),
        ("`x` (of shape (0, 8)) must have an element along dimension 0.", plan("fft", "float32", (0, 2), axes=0)),
    ):  # fmt: skip
        assert sentence in refusal(4, work, dj.PlanError), sentence

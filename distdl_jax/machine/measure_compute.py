"""What one worker computes to be timed: kernels, arrays, copies, matrix products and convolutions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.checked_jit import jit as checked_jit
from distdl_jax.kernels.convolution import convolution
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.pooling import max_pool
from distdl_jax.kernels.problem import Problem
from distdl_jax.machine.rates import shape_of
from distdl_jax.machine.samples import ARRAYS, Arithmetic, Copied, Overhead, Streamed
from distdl_jax.machine.timed_loops import Job, Seconds, loop, repeated
from distdl_jax.nn.norms.per_sample import DistributedGroupNorm
from distdl_jax.partition import Partition
from distdl_jax.plans.work import Work, optimiser_update

KERNELS = 32
"""So many depend on each other in the program that one of them is timed by."""

COPIED = 2**20

STREAMED = (2**15, 2**18, 2**20, 2**22, 2**24, 2**26)
"""The largest are in memory, whatever the caches."""

PRODUCTS = (
    (64, 64, 64), (256, 256, 256), (512, 512, 512), (16, 512, 512), (128, 512, 512), (4096, 64, 64), (1024, 256, 1024),
    (8, 1024, 1024), (256, 16, 256), (512, 512, 8), (64, 2048, 64),
)  # fmt: skip
"""Rows, inputs and outputs."""


class ConvolutionShape(NamedTuple):
    """A convolution with stride 1 whose output is as large as the input."""

    samples: int
    c_in: int
    c_out: int
    extent: int
    kernel: tuple[int, ...]

    def problem(self, dtype: str) -> Problem:
        """Return it as the kernels have it."""
        dims = len(self.kernel)
        window = Placement((1,) * dims, tuple(((k - 1) // 2, k // 2) for k in self.kernel), (1,) * dims)
        x = (self.samples, self.c_in, *(self.extent,) * dims)
        return Problem(x, (self.c_out, self.c_in, *self.kernel), window, 1, dtype)


CONVOLUTIONS = (
    ConvolutionShape(4, 1, 8, 64, (3, 3)),
    ConvolutionShape(4, 3, 16, 64, (3, 3)),
    ConvolutionShape(4, 8, 8, 64, (3, 3)),
    ConvolutionShape(4, 16, 16, 32, (3, 3)),
    ConvolutionShape(4, 32, 32, 32, (3, 3)),
    ConvolutionShape(4, 64, 64, 16, (3, 3)),
    ConvolutionShape(4, 128, 128, 8, (3, 3)),
    ConvolutionShape(16, 128, 128, 4, (3, 3)),
    ConvolutionShape(16, 128, 128, 2, (3, 3)),
    ConvolutionShape(4, 64, 64, 32, (1, 1)),
    ConvolutionShape(4, 6, 16, 14, (5, 5)),
    ConvolutionShape(1, 8, 8, 32, (3, 3, 3)),
    ConvolutionShape(1, 1, 8, 32, (3, 3, 3)),
    ConvolutionShape(1, 32, 32, 16, (3, 3, 3)),
    ConvolutionShape(1, 16, 16, 16, (3, 3, 3)),
    ConvolutionShape(1, 64, 64, 8, (3, 3, 3)),
)

POOLINGS = (((4, 16, 64, 64), (2, 2)), ((1, 16, 32, 32, 32), (2, 2, 2)), ((4, 16, 63, 63), (3, 3)))
"""Shapes of input and window."""

NORMALISATIONS = ((4, 16, 64, 64), (4, 64, 16, 16), (1, 16, 32, 32, 32))

OPTIMISED = ((512, 512), (64, 64, 3, 3), (32, 32, 5, 5), (16, 16, 3, 3, 3))
"""Parameters that Adam updates."""


def overhead_jobs() -> Iterator[Job]:
    """Yield a kernel, and calls of jitted functions of one array and of several."""
    small = jnp.zeros(1024, jnp.float32)
    yield Job(Overhead("kernel"), _each(loop(_kernels, small, small), KERNELS))
    yield Job(Overhead("call"), _called(small, 1))
    yield Job(Overhead("arrays"), _called(small, ARRAYS))


def _kernels(x: Array, y: Array) -> tuple[Array, ...]:
    for _ in range(KERNELS):
        x, y = lax.optimization_barrier((y, jnp.maximum(x, 0) + y))
    return x, y


def _each(seconds: Seconds, count: int) -> Seconds:
    return lambda times: seconds(times) / count


def _called(x: Array, count: int) -> Seconds:
    called = checked_jit(lambda xs: [x + 1 for x in xs])
    called([x] * count)

    def seconds(times: int) -> float:
        start, ys = time.perf_counter(), [x] * count
        for _ in range(times):
            ys = jax.block_until_ready(called(ys))  # as in a loop of steps that prints its loss
        return time.perf_counter() - start

    return seconds


def array_jobs(sizes: Sequence[int], rests: bool) -> Iterator[Job]:
    """Yield arrays that are read and written, and a copy.

    - `rests`: whether this worker rests while another one is measured alone.
    """
    for size in sizes:
        x = jnp.zeros(size // 8, jnp.float32)
        seconds = repeated(lambda x: jnp.maximum(x, 0) + 1, x)
        yield Job(Streamed(size), seconds)
        if size == max(sizes):
            yield Job(Streamed(size, alone=True), None if rests else seconds)
    rows = jnp.zeros((COPIED // 1024, 256), jnp.float32)
    yield Job(Copied(COPIED), repeated(lambda x: jnp.concatenate([x[:, 1:], x[:, :1]], axis=1), rows))


def product_jobs(shapes: Sequence[tuple[int, int, int]], dtype: str, rests: bool) -> Iterator[Job]:
    """Yield matrix products, as linear layers have them; the largest also on one worker alone."""
    largest = max(shapes, key=math.prod)
    for rows, n_in, n_out in shapes:
        shape = (rows, n_in, n_out)
        subject = Arithmetic("matrix product", dtype, "forward", shape, 2 * math.prod(shape))
        arrays = _filled(dtype, (rows, n_in), (n_out, n_in), (rows, n_out))
        yield from _in_all_directions(subject, _product, arrays)
        if shape == largest:
            yield _alone(subject, _product, arrays, rests)


def _product(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def convolution_jobs(shapes: Sequence[ConvolutionShape], dtype: str, rests: bool) -> Iterator[Job]:
    """Yield convolutions; every fourth also on one worker alone."""
    for number, each in enumerate(shapes):
        problem = each.problem(dtype)

        def convolve(x: Array, w: Array, problem: Problem = problem) -> Array:
            return convolution(problem, x, w)

        shape = shape_of(Work("convolution", shape=problem))
        subject = Arithmetic("convolution", dtype, "forward", shape, problem.flops)
        arrays = _filled(dtype, problem.x, problem.weight, problem.y)
        yield from _in_all_directions(subject, convolve, arrays)
        if number % 4 == 0:
            yield _alone(subject, convolve, arrays, rests)


def window_jobs(shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], dtype: str) -> Iterator[Job]:
    """Yield poolings of windows that lie side by side, from the shapes of input and window."""
    for shape, kernel in shapes:
        dims = len(kernel)
        window = Placement(kernel, ((0, 0),) * dims, (1,) * dims)

        def pool(x: Array, kernel: tuple[int, ...] = kernel, window: Placement = window) -> Array:
            return max_pool(x, kernel, window)

        (x,) = _filled(dtype, shape)
        subject = Arithmetic("pooling", dtype, "forward", (math.prod(kernel),), math.prod(shape))
        yield from _in_all_directions(subject, pool, (x, jax.eval_shape(pool, x)))


def normalisation_jobs(shapes: Sequence[tuple[int, ...]], P: Partition, dtype: str) -> Iterator[Job]:
    """Yield normalisations of samples x channels x features over groups of four channels, on this worker alone.

    - `P`: the partition of this worker.
    """
    for shape in shapes:
        norm = DistributedGroupNorm(P.grid((1,) * len(shape)), shape[1] // 4, shape[1])

        def normalise(x: Array, w: Array, norm: DistributedGroupNorm = norm) -> Array:
            y: Array = norm({"weight": w[0], "bias": w[1]}, x)
            return y

        entries = math.prod(shape)
        subject = Arithmetic("normalisation", dtype, "forward", (shape[1], entries // shape[1]), 4 * entries)
        yield from _in_all_directions(subject, normalise, _filled(dtype, shape, (2, shape[1]), shape), (4, 8, 2))


def optimiser_jobs(shapes: Sequence[tuple[int, ...]]) -> Iterator[Job]:
    """Yield the updates of parameters by Adam, all of whose results go into the next one."""
    for shape in shapes:
        work = optimiser_update(shape, 4, 2)
        subject = Arithmetic(work.kind, "float32", "forward", shape_of(work), work.flops)
        yield Job(subject, loop(_adam, *_filled("float32", *[shape] * 4)))


def _adam(p: Array, mean: Array, square: Array, gradient: Array) -> tuple[Array, ...]:
    mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
    return p - 1e-3 * (mean / 0.5) / (jnp.sqrt(square / 0.1) + 1e-8), mean, square, gradient


def _filled(dtype: str, *shapes: tuple[int, ...]) -> tuple[Array, ...]:
    return tuple(jnp.full(shape, 0.5, dtype) for shape in shapes)


def _in_all_directions(
    forward: Arithmetic,
    operation: Callable[..., Array],
    arrays: Sequence[Any],
    flops: tuple[int, int, int] = (1, 1, 1),
) -> Iterator[Job]:
    """Yield an operation and its gradients.

    - `arrays`: the input, the parameters if there are some, and something like the output.
    - `flops`: of the three directions, relative to each other.
    """
    *inputs, y = arrays
    yield Job(forward, repeated(operation, *inputs))
    dy = jnp.full(y.shape, 0.5, y.dtype)
    for number, direction in enumerate(("input gradient", "parameter gradient")[: len(inputs)]):

        def gradient(dy: Array, *inputs: Array, number: int = number) -> Array:
            def of_one(one: Array) -> Array:
                return operation(*inputs[:number], one, *inputs[number + 1 :])

            d_one: Array = jax.vjp(of_one, inputs[number])[1](dy)[0]
            return d_one

        count = forward.flops * flops[number + 1] // flops[0]
        yield Job(replace(forward, direction=direction, flops=count), repeated(gradient, dy, *inputs))


def _alone(forward: Arithmetic, operation: Callable[..., Array], arrays: Sequence[Array], rests: bool) -> Job:
    """Return the operation on one worker."""
    return Job(replace(forward, alone=True), None if rests else repeated(operation, *arrays[:-1]))

"""What one worker computes to be timed: kernels, arrays, copies, matrix products and convolutions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels.convolution import convolution
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.problem import Algorithms, Problem
from distdl_jax.machine.rates import shape_of
from distdl_jax.machine.samples import Arithmetic, Copied, Overhead, Streamed
from distdl_jax.machine.timed_loops import Job, Seconds, loop, repeated
from distdl_jax.plans.work import Work

KERNELS = 32
"""So many depend on each other in the program that one of them is timed by."""

COPIED = 2**20

STREAMED = (2**15, 2**18, 2**20, 2**22, 2**24, 2**26)
"""The largest are in memory, whatever the caches."""

PRODUCTS = (
    (64, 64, 64), (256, 256, 256), (768, 768, 768), (16, 512, 512), (128, 512, 512), (4096, 64, 64), (1024, 256, 1024),
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
    ConvolutionShape(4, 64, 64, 32, (1, 1)),
    ConvolutionShape(4, 6, 16, 14, (5, 5)),
    ConvolutionShape(1, 1, 8, 32, (3, 3, 3)),
    ConvolutionShape(1, 8, 8, 32, (3, 3, 3)),
    ConvolutionShape(1, 16, 16, 16, (3, 3, 3)),
    ConvolutionShape(1, 32, 32, 16, (3, 3, 3)),
    ConvolutionShape(1, 64, 64, 8, (3, 3, 3)),
)

Operation = Callable[[Array, Array], Array]


def overhead_jobs() -> Iterator[Job]:
    """Yield a call of a jitted function, and a kernel."""
    small = jnp.zeros(1024, jnp.float32)
    yield Job(Overhead("kernel"), _each(loop(_kernels, small, small), KERNELS))
    yield Job(Overhead("call"), _called(small))


def _kernels(x: Array, y: Array) -> tuple[Array, ...]:
    for _ in range(KERNELS):
        x, y = lax.optimization_barrier((y, jnp.maximum(x, 0) + y))
    return x, y


def _each(seconds: Seconds, count: int) -> Seconds:
    return lambda times: seconds(times) / count


def _called(x: Array) -> Seconds:
    compiled = jax.jit(lambda x: x + 1)

    def seconds(times: int) -> float:
        start, y = time.perf_counter(), x
        for _ in range(times):
            y = compiled(y)
        jax.block_until_ready(y)
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
    """Yield matrix products in all directions, as linear layers have them; the largest also on one worker alone."""
    largest = max(shapes, key=math.prod)
    for rows, n_in, n_out in shapes:
        x, w, dy = (jnp.full(shape, 0.5, dtype) for shape in ((rows, n_in), (n_out, n_in), (rows, n_out)))
        shape, flops = (rows, n_in, n_out), 2 * rows * n_in * n_out
        alone = ("forward",) if shape == largest else ()
        yield from _arithmetic("matrix product", shape, flops, _product, (x, w, dy), rests, alone)


def _product(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def convolution_jobs(
    shapes: Sequence[ConvolutionShape], dtype: str, rests: bool, choose: Callable[[Problem], Algorithms]
) -> Iterator[Job]:
    """Yield convolutions in all directions; every fourth also on one worker alone.

    - `choose`: returns the algorithms that all workers take.
    """
    for number, shape in enumerate(shapes):
        problem = shape.problem(dtype)
        algorithms = choose(problem)

        def convolve(x: Array, w: Array, problem: Problem = problem, algorithms: Algorithms = algorithms) -> Array:
            return convolution(problem, (x,), w, algorithms)

        arrays = tuple(jnp.full(each, 0.5, dtype) for each in (problem.x, problem.weight, problem.y))
        alone = ("forward",) if number % 4 == 0 else ()
        work = Work("convolution", shape=problem)
        yield from _arithmetic("convolution", shape_of(work), problem.flops, convolve, arrays, rests, alone)


def _arithmetic(
    kind: str,
    shape: tuple[int, ...],
    flops: int,
    operation: Operation,
    arrays: Sequence[Array],
    rests: bool,
    alone: Sequence[str],
) -> Iterator[Job]:
    """Yield an operation of two arrays in all directions.

    - `arrays`: x, the parameters, and the output's cotangent.
    """
    x, w, dy = arrays

    def gradient_of_x(dy: Array, w: Array) -> Array:
        return jax.vjp(lambda x: operation(x, w), jnp.zeros_like(x))[1](dy)[0]

    def gradient_of_w(dy: Array, x: Array) -> Array:
        return jax.vjp(lambda w: operation(x, w), jnp.zeros_like(w))[1](dy)[0]

    programs = {
        "forward": repeated(operation, x, w),
        "input gradient": repeated(gradient_of_x, dy, w),
        "parameter gradient": repeated(gradient_of_w, dy, x),
    }
    for direction, seconds in programs.items():
        subject = Arithmetic(kind, x.dtype.name, direction, shape, flops)
        yield Job(subject, seconds)
        if direction in alone:
            yield Job(replace(subject, alone=True), None if rests else seconds)

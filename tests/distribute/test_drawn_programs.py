"""Drawn programs: the loss and its gradients, with the derivative inside and outside, are those of one process."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from distribute.drawn_programs import Program

import distdl_jax as dj

FEW = range(0, 60, 15)


def problem(program: Program) -> str | None:
    """Return how a program differs from that of one process; None if it doesn't."""
    w, x = program.arrays()
    value, gradients = jax.jit(jax.value_and_grad(program.loss, (0, 1)))(w, x)

    def run() -> str | None:
        spec = dj.TensorSpec(x.shape, dj.Partition().grid(program.grid))
        block = spec.block(x)
        step = dj.distribute(jax.value_and_grad(program.loss, (0, 1)), (None, spec), (None, (None, spec)), gather=None)
        inside = jax.jit(step)(w, block)
        parts = dj.distribute(program.loss, (dj.VARIABLE, spec), dj.PARTS, gather=None)
        outside = jax.jit(dj.value_and_grad(parts, (0, 1)))(w, block)
        expected = value, (gradients[0], spec.block(gradients[1]))
        for way, found in (("inside", inside), ("outside", outside)):
            for what, a, b in zip(
                ("loss", "w's", "x's"), jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
            ):
                a, b = np.asarray(a), np.asarray(b)
                if a.shape != b.shape or not np.allclose(a, b, rtol=1e-11, atol=1e-11):
                    return f"{way}, {what}: {a} for {b}"
        return None

    try:
        return next((text for text in dj.simulate(int(np.prod(program.grid)), run) if text), None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("seeds", [range(first, first + 4) for first in FEW])
def test_drawn_programs(seeds: range) -> None:
    with jax.enable_x64(True):
        for seed in seeds:
            program = Program.drawn(seed)
            if problem(program):
                program = program.shrunk(lambda shorter: problem(shorter) is not None)
                raise AssertionError(f"{program}: {problem(program)}")

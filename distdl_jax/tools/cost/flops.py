"""The arithmetic of a traced program, in numbers, as XLA counts it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from distdl_jax.plans.work import Work
from distdl_jax.tracing.jaxprs import Branches, Scan, While, bodies, structure

_PASSED = {
    *("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "concatenate", "pad", "convert_element_type"),
    *("copy", "optimization_barrier", "dynamic_slice", "gather", "iota", "rev", "stop_gradient", "select_n"),
    *("dynamic_update_slice", "bitcast_convert_type", "split", "real", "imag", "complex", "copy_p"),
    *("tie", "passed_to_layer", "tangent_of_a_parameter"),
}
"""Operations that arrange numbers, and compute none."""


def arithmetic(jaxpr: Any) -> Work:
    """Return the flops of a program and the bytes that it reads and writes, each argument and result once.

    Loops count as often as they run, one of unknown length once; of branches the dearest counts.
    """
    read = sum(_bytes(var.aval) for var in jaxpr.invars)
    written = sum(_bytes(var.aval) for var in jaxpr.outvars)
    return Work("layer", _flops(jaxpr), read=read, written=written)


def _flops(jaxpr: Any) -> int:
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn: Any) -> int:
    match structure(eqn):
        case Scan(body, length):
            return length * _flops(body.jaxpr)
        case While(condition, body):
            return _flops(condition.jaxpr) + _flops(body.jaxpr)
        case Branches(branches):
            return max(_flops(branch.jaxpr) for branch in branches)
    name = eqn.primitive.name
    if name in _RULES:
        return _RULES[name](eqn)
    if inner := bodies(eqn):
        return _flops(inner[0])
    if name in _PASSED or not eqn.outvars or not hasattr(eqn.outvars[0].aval, "shape"):
        return 0
    if name.startswith(("reduce_", "arg", "cum")):
        return _size(eqn.invars[0].aval)
    return _size(eqn.outvars[0].aval)


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _bytes(aval: Any) -> int:
    return _size(aval) * int(getattr(aval.dtype, "itemsize", 0))


def _product(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(eqn.outvars[0].aval) * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)


def _convolution(eqn: Any) -> int:
    """Return twice the products, those with padding and with the zeros of a dilated input left out."""
    x, weight, y = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    lhs, rhs, out = eqn.params["dimension_numbers"]
    pairs = 1
    for d, (low, _) in enumerate(eqn.params["padding"]):
        outputs, taps = np.arange(y[out[d + 2]]), np.arange(weight[rhs[d + 2]])
        dilation = eqn.params["lhs_dilation"][d]
        at = outputs[:, None] * eqn.params["window_strides"][d] + taps * eqn.params["rhs_dilation"][d] - low
        inside = (at >= 0) & (at < (x[lhs[d + 2]] - 1) * dilation + 1) & (at % dilation == 0)
        pairs *= int(inside.sum())
    batch = x[lhs[0]] // eqn.params["batch_group_count"]
    return 2 * batch * weight[rhs[0]] * weight[rhs[1]] * pairs


def _fourier_transform(eqn: Any) -> int:
    n = math.prod(eqn.params["fft_lengths"])
    return int(5 * max(_size(eqn.invars[0].aval), _size(eqn.outvars[0].aval)) * math.log2(max(n, 2)))


_RULES: dict[str, Callable[[Any], int]] = {
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "fft": _fourier_transform,
    "simulated_operation": lambda eqn: 0,
    "ffi_call": lambda eqn: 0,
}

"""Whether products of float32 may be of bfloat16: JAX's own switches, `precision=` and its default."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from distdl_jax.errors import InvalidArgumentError

_FAST = {
    lax.Precision.DEFAULT: True,
    lax.Precision.HIGH: False,
    lax.Precision.HIGHEST: False,
    lax.DotAlgorithmPreset.BF16_BF16_F32: True,
    lax.DotAlgorithmPreset.F32_F32_F32: False,
}


def has_fast_products(precision: Any) -> bool:
    """Say whether products may be of bfloat16: with `DEFAULT` for both operands, or the preset BF16_BF16_F32.

    - `precision`: of an equation. None is off: without a switch float32 is computed in float32.

    **Raises:** `InvalidArgumentError` if the algorithm is one that is not supported.
    """
    each = precision if isinstance(precision, tuple) else (precision,)
    try:
        return precision is not None and all(_FAST[one] for one in each)
    except (KeyError, TypeError):
        accepted = "None, 'default', 'high', 'highest', or the algorithm BF16_BF16_F32 or F32_F32_F32"
        raise InvalidArgumentError(f"`precision` (={precision}) of a convolution on CPUs must be {accepted}.") from None


def default_has_fast_products() -> bool:
    """Say whether products may be of bfloat16 by `jax.default_matmul_precision`."""
    name = jax.config.jax_default_matmul_precision
    if name is None:
        return False
    if name in lax.DotAlgorithmPreset.__members__:
        return has_fast_products(lax.DotAlgorithmPreset[name])
    return has_fast_products(lax.Precision(name))

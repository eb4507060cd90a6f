"""The rule of Fourier transforms: dimension by dimension, each where it is whole (pencils)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.distribute.interpreter import Site, rule
from distdl_jax.distribute.layouts import Cut, axes_in, trimmed
from distdl_jax.distribute.rules.reductions import claimed_elsewhere
from distdl_jax.distribute.tensors import Tensor

_OF_OTHERS = {lax.FftType.RFFT: lax.FftType.FFT, lax.FftType.IRFFT: lax.FftType.IFFT}
"""The transform along all dimensions but the last, by that along the last."""


@rule("fft")
def fft(site: Site, x: Tensor) -> Tensor:
    """Move all cuts to other dimensions by one exchange, if there is room; otherwise transform along what is whole, and
    move a cut to what is done, by one exchange for each."""
    kind, lengths = site.params["fft_type"], site.params["fft_lengths"]
    first = len(x.shape) - len(lengths)
    last, todo = len(x.shape) - 1, list(range(first, len(x.shape)))
    together = x.whole_along(todo)
    if axes_in(together) == axes_in(x.natural()):
        return site.value(site.bind(x.at(together)), together)
    while todo:
        # Real numbers become complex along the last dimension, before all others; and real again after them.
        allowed = {lax.FftType.RFFT: [last], lax.FftType.IRFFT: [d for d in todo if d != last]}.get(kind, todo)
        allowed = [d for d in allowed if d in todo] or todo
        here = [d for d in allowed if not x.readable()[d]]
        cut = x.readable() if here else _moved(site, x, allowed[0], todo)
        block, shape = x.at(cut), list(x.shape)
        for d in here or allowed[:1]:
            along = kind if d == last else _OF_OTHERS.get(kind, kind)
            block = _along(block, d, along, int(lengths[d - first]))
            shape[d] = site.shape[d]
            todo.remove(d)
        x = Tensor(site.movements, shape, block.dtype, trimmed(cut, shape), block)
    return x


def _moved(site: Site, x: Tensor, d: int, todo: list[int]) -> Cut:
    """Return the cut with `d` whole: its axes move to what isn't to be transformed later, if they can."""
    cut = x.whole_along([d, *(e for e in todo if not x.readable()[e])])
    return cut if axes_in(cut) == axes_in(x.natural()) else claimed_elsewhere(site, x, [d])


def _along(block: Array, d: int, kind: lax.FftType, length: int) -> Array:
    return jnp.moveaxis(lax.fft(jnp.moveaxis(block, d, -1), kind, (length,)), -1, d)

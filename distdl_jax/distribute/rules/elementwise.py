"""Rules of what works element by element, and of lazy values: constants of the program, random bits, broadcasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from distdl_jax.distribute.interpreter import LINEAR, Site, rule
from distdl_jax.distribute.layouts import Cut, trimmed, uncut
from distdl_jax.distribute.programs import ELEMENTWISE
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.distribute.views import rearranged
from distdl_jax.partitions.initialization import NotElementwiseError, random_bits_of_box

_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi
name ne neg nextafter not one_minus_square or polygamma population_count pow random_gamma_grad real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
ELEMENTWISE.update(_NAMES.split())


def _every(site: Site) -> Sequence[int]:
    return range(len(site.eqn.invars))


def _first(_: Site) -> Sequence[int]:
    return (0,)


def _unless_larger(site: Site) -> Sequence[int]:
    """A sum settles before it is enlarged: a norm's mean is two numbers, its broadcast the volume."""
    return (0,) if math.prod(site.shape) <= site.eqn.invars[0].aval.size else ()


def _unless_narrower(site: Site) -> Sequence[int]:
    """A sum settles before a cast that would round its terms."""
    before, after = site.eqn.invars[0].aval.dtype, site.outs[0].dtype
    both = jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)
    return (0,) if both and before.itemsize <= after.itemsize else ()


LINEAR |= dict.fromkeys(("neg", "real", "imag", "conj", "copy", "copy_p", "name", "add", "sub", "add_any"), _every)
LINEAR |= dict.fromkeys(("reduce_sum", "transpose", "squeeze", "rev"), _first)
LINEAR |= dict.fromkeys(("mul", "dot_general", "conv_general_dilated"), lambda site: None)
LINEAR |= {
    "div": _first,
    "select_n": lambda site: range(1, len(site.eqn.invars)),
    "concatenate": _every,
    "broadcast_in_dim": _unless_larger,
    "reshape": _first,
    "slice": _first,
    "convert_element_type": _unless_narrower,
}


@rule(*ELEMENTWISE)
def elementwise(site: Site, *xs: Tensor) -> Tensor:
    """Layouts meet: the largest operand's cut wins. What only lazy and small operands make is lazy."""
    return _elementwise(site, site.bind, *xs)


@rule("Ldexp")
def ldexp(site: Site, *xs: Tensor) -> Tensor:
    """As an object, it holds the whole shapes: it is called again."""
    return _elementwise(site, jnp.ldexp, *xs)


def _elementwise(site: Site, function: Callable[..., Any], *xs: Tensor) -> Tensor:
    shape = site.shape

    def own(x: Tensor, cut: Cut) -> Cut:
        if not x.shape:
            return ()
        return tuple(axes if n == m else () for axes, n, m in zip(cut, x.shape, shape, strict=True))

    def make(cut: Cut) -> Any:
        return function(*(x.at(own(x, cut)) for x in xs))

    if site.wants_whole:
        return site.value(make(uncut(shape)), uncut(shape))
    if site.is_update and (wanted := site.wanted[0]) is not None:
        # Moving one operand costs what moving the result would; of two, one should be there already.
        large = [x.natural() for x in xs if x.shape == shape and not x.is_lazy]
        if len(large) == 1 or wanted in large:
            return site.value(make(wanted), wanted)
    wishes = [
        (d, axes, 0 if x.is_lazy else x.size)
        for x in xs
        if x.shape
        for d, axes in enumerate(x.natural())
        if x.shape[d] == shape[d]
    ]
    granted = site.claim(wishes)
    cut = trimmed([granted.get(d, ()) for d in range(len(shape))], shape)
    if any(x.is_lazy for x in xs) and all(x.is_lazy or x.size * 8 <= math.prod(shape) for x in xs):
        for x in xs:
            if not x.is_lazy:
                x.at(x.natural())  # settled here: a lazy value may be made anywhere
        return site.lazy(make, cut)
    return site.value(make(cut), cut)


@rule("bitcast_convert_type")
def bitcast(site: Site, x: Tensor) -> Tensor:
    """A cast to another width adds or removes the last dimension, which is then whole."""
    if len(site.shape) == len(x.shape):
        return elementwise(site, x)
    cut = x.whole_along([len(x.shape) - 1]) if len(site.shape) < len(x.shape) else x.natural()
    return site.value(site.bind(x.at(cut)), (*cut, ())[: len(site.shape)])


@rule("iota")
def iota(site: Site) -> Tensor:
    """Each worker counts its own part."""
    d, dtype = site.params["dimension"], site.outs[0].dtype

    def make(cut: Cut) -> Any:
        box = site.mesh.box(cut, site.shape)
        counted = lax.broadcasted_iota(dtype, [stop - start for start, stop in box], d)
        return counted + jnp.asarray(box[d][0]).astype(dtype) if box[d][0] else counted

    return site.lazy(make)


@rule("random_bits")
def random_bits(site: Site, key: Tensor) -> Tensor:
    """A block's bits are threefry of the elements' numbers in the whole array; other generators make all of it."""
    whole = key.whole()

    def make(cut: Cut) -> Any:
        box = site.mesh.box(cut, site.shape)
        if not key.shape and any(cut):
            try:
                bits = random_bits_of_box(whole, site.params["bit_width"], site.shape, box)
                return bits.reshape(site.mesh.block_shape(cut, site.shape))
            except NotElementwiseError:
                pass
        starts, stops = zip(*box, strict=True) if box else ((), ())
        return lax.slice(site.bind(whole), starts, stops)

    return site.lazy(make)


@rule("random_seed", "random_wrap", "random_unwrap", "random_split", "random_fold_in", "random_clone", "threefry2x32")
def of_keys(site: Site, *xs: Tensor) -> list[Tensor]:
    """Keys are small, and every worker has them."""
    return site.run.whole(site, *xs, why="works on whole keys")


@rule("broadcast_in_dim")
def broadcast_in_dim(site: Site, x: Tensor, *_: Tensor) -> Tensor:
    """A broadcast that enlarges is lazy: each worker makes the part that a reader asks for."""
    shape, places = site.shape, site.params["broadcast_dimensions"]
    if math.prod(shape) == x.size:
        back = dict(zip(places, range(len(places)), strict=True))
        if (view := rearranged(x, [back.get(d) for d in range(len(shape))])) is not None:
            return view

    def make(cut: Cut) -> Any:
        own = [cut[place] if n == shape[place] else () for n, place in zip(x.shape, places, strict=True)]
        return site.bind(x.at(own), shape=site.mesh.block_shape(cut, shape))

    cut: list[Any] = [()] * len(shape)
    for axes, n, place in zip(x.natural(), x.shape, places, strict=True):
        cut[place] = axes if n == shape[place] else ()
    if x.is_lazy or math.prod(shape) > x.size:
        if not x.is_lazy:
            x.at(x.natural())
        return site.lazy(make, trimmed(cut, shape))
    return site.value(make(trimmed(cut, shape)), cut)


@rule("device_put")
def unchanged(site: Site, *xs: Tensor) -> list[Tensor]:
    """The blocks are where they are to be."""
    return list(xs)


@rule("optimization_barrier")
def barrier(site: Site, *xs: Tensor) -> list[Tensor]:
    """Each worker's blocks pass together."""
    cuts = [x.natural() for x in xs]
    results = site.bind(*(x.at(cut) for x, cut in zip(xs, cuts, strict=True)))
    return [site.value(y, cut, n=n) for n, (y, cut) in enumerate(zip(results, cuts, strict=True))]


@rule("empty", "empty2")
def empty(site: Site) -> Tensor:
    """Zeros, in whatever cut."""
    return site.lazy(lambda cut: jnp.zeros(site.mesh.block_shape(cut, site.shape), np.dtype(site.outs[0].dtype)))

"""Plain functions of a block: rejected if they mix entries along a split dimension, unless marked as `nn.Local`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from distdl_jax.partitions.static import Static
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.mixed_dimensions import (
    LOCAL,
    MixedDimensions,
    Mixing,
    Value,
    block_value,
    moves_data,
)
from distdl_jax.validation import check_function

Function = Callable[..., Any]


@dataclass(frozen=True)
class Local(Static):
    """A plain function that applies to each worker's block separately, unchecked.

    `nn.Sequential`, `nn.Residual` and `dj.map_blocks` reject a function that sums, sorts, slices or multiplies along a
    split dimension, since each worker sees only its own block. `nn.Local(function)` is called unchecked.

    **Arguments:**

    - `function`: of one or more arrays.

    **Raises:** `InvalidTypeError` if `function` can't be called.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> network = dj.nn.Sequential(dj.nn.Repartition(P, P), Local(lambda x: x / x.max()))
    >>> network(({}, {}), jnp.array([[1.0, 2.0]])).tolist()
    [[0.5, 1.0]]
    """

    function: Function

    def __post_init__(self) -> None:
        check_function("function", self.function)

    @property
    def __name__(self) -> str:
        return f"Local({function_name(self.function)})"

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return `function(*args, **options)`."""
        with jax.named_scope(LOCAL):
            return self.function(*args, **options)


class Followed(NamedTuple):
    """The effect of functions, in order, on a block.

    - `mixed`, `partial`: the operation that mixes, and the one of which the result is partial; each with its function.
    - `result`: the knowledge about the result.
    """

    mixed: Mapping[Mixing, Function]
    partial: Mapping[Mixing, Function]
    result: Value | None


def follow(functions: Sequence[Function], x: Any) -> Followed | None:
    """Return the effect of the functions on a block like `x`; None if unknown, or if they move data themselves."""
    value: Value | None = block_value(x.shape)
    of, mixed, partial = jax.ShapeDtypeStruct(x.shape, x.dtype), dict[Mixing, Function](), dict[Mixing, Function]()
    for function in functions:
        shape = of.shape
        try:
            with trace_context.set(anchors=None):
                program, of = jax.make_jaxpr(function, return_shape=True)(of)
        except Exception:
            return None  # when called, it works, or explains why it doesn't
        if moves_data(program.jaxpr):
            return None
        flow = MixedDimensions()
        results = flow.run(program.jaxpr, [value])
        mixed |= {each: function for each in flow.mixed if each not in mixed}
        if not isinstance(of, jax.ShapeDtypeStruct):
            return Followed(mixed, {}, None)
        stays = isinstance(function, Local) and value is not None and of.shape == shape
        value = value._replace(partial=frozenset()) if stays and value is not None else results[0]
        partial = {each: partial.get(each, function) for each in sorted(value.partial if value else ())}
    return Followed(mixed, partial, value)


def is_elementwise(function: Function, dims: int) -> bool:
    """Say whether a function of JAX's own is known to be elementwise, for blocks of any shape."""
    return (getattr(function, "__module__", None) or "").startswith("jax.") and _keeps_entries(function, dims)


@lru_cache(maxsize=256)  # of functions of JAX's own: others may be unhashable
def _keeps_entries(function: Function, dims: int) -> bool:
    shape = (3,) * dims
    followed = follow([function], jax.ShapeDtypeStruct(shape, np.float32))
    return followed is not None and not followed.mixed and followed.result == block_value(shape)


def refusal(
    followed: Followed | None, split: Mapping[int, int], *, may_be_partial: bool = False, may_merge: bool = False
) -> str | None:
    """Return why functions must not be called on blocks; None if they may.

    - `split`: the split dimensions of the block, and their numbers of workers.
    - `may_be_partial`: whether results may be partial, to be added later. A number always may be: a part of a loss.
    - `may_merge`: whether dimensions may be merged in another order than in the whole tensor.
    """
    if followed is None:
        return None
    result = followed.result
    found = [(mixing, _name(function)) for mixing, function in followed.mixed.items()]
    if not may_be_partial and result is not None and result.dims:
        found += [(mixing, _name(function)) for mixing, function in followed.partial.items()]
    if not may_merge and result is not None:
        later = {d for dim in result.dims for d, _ in dim[1:] if d is not None}
        found += [(Mixing(("reshape",), d), "a function before a layer") for d in sorted(later)]
    return next((_sentence(name, mixing, split[mixing.dim]) for mixing, name in found if mixing.dim in split), None)


def _name(function: Function) -> str:
    """Return a function's name, and where the user has defined it."""
    name = function_name(function)
    return name.split(" ")[0] if (getattr(function, "__module__", None) or "").startswith("jax.") else name


def _sentence(name: str, mixing: Mixing, workers: int) -> str:
    names = [each.removeprefix("_").removesuffix("_static") for each in (name.split(" ")[0], *mixing.names)]
    known = next((_ADVICE[each] for each in names if each in _ADVICE), None)
    instead = f"Use {known}, or put" if known else "Put"
    return (
        f"{name} works along dimension {mixing.dim} of the block ({mixing.names[-1]}), which is split over {workers} "
        f"workers: each would see only its own part. {instead} a `Repartition` before it that makes the dimension "
        "whole; nn.Local(function) applies it to each block separately."
    )


_F = "dj.functional."
_ADVICE = {
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), f"`{_F}max` and `{_F}sum`"),
    **{name: f"`{_F}{name}`" for name in ("mean", "var", "std", "roll", "take", "top_k", "argmax")},
    **{f"cum{of}": f"`{_F}cum{of}`" for of in ("sum", "prod", "max", "min")},
    "norm": f"the root of `{_F}sum` of x * x",
    "standardize": "`nn.DistributedLayerNorm`",
    "resize": "`nn.DistributedUpsample`",
    "scan": f"`{_F}associative_scan`",
    "reduce_sum": f"`{_F}sum` or `{_F}mean`",
    **{f"reduce_{of}": f"`{_F}{of}`" for of in ("max", "min")},
    "fft": f"`{_F}fftn`",
    "dot_general": "`nn.DistributedLinear`",
    "conv_general_dilated": "a convolution of `nn`",
    **dict.fromkeys(("reduce_window_max", "reduce_window_sum"), "a pooling layer of `nn`"),
    "gather": f"`{_F}take`",
    "scatter-add": f"`{_F}segment_sum`",
    "pad": "`nn.DistributedPad`",
    "unstack": f"`{_F}associative_scan` or `{_F}halo_exchange`",
    "slice": f"`nn.DistributedCrop` or `{_F}halo_exchange`",
    "concatenate": "`nn.Concatenate`",
    "reshape": f"`nn.Flatten` or `{_F}reshape`",
}
"""The counterpart, on the whole dimension, of a function, or of a JAX operation, on a block."""

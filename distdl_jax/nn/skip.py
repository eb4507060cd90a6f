"""The skip of a U-Net: the output of layers beside their input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
from jax import Array

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.layer.layer import Ends, Layer, ends_of
from distdl_jax.nn.layer_compatibility import in_equal_blocks
from distdl_jax.nn.network import Network, RunPart, last_partition, params_of_part
from distdl_jax.nn.residual import Residual
from distdl_jax.nn.shaping.concatenate import Concatenate
from distdl_jax.partition import Partition
from distdl_jax.primitives.plan import BlocksPlan, ShapeDtypes
from distdl_jax.tracing.scopes import place_of_errors

Join = Literal["concatenate", "add"]


@dataclass(frozen=True)
class Skip(Network):
    """y = x beside body(x), along a dimension that may be split: the skip of a U-Net, as a layer of an `nn.Sequential`.

        concatenate(x, body(x)), or with "add" x + body(x)

    The body has to leave its output in x's blocks, but for their length along `axis`. Nothing moves but what the body
    moves, and, along a dimension that is split, what other workers are to have of either. The parameters, and the
    state, are a dictionary: {"body": the body's}.

    **Arguments:**

    - `body`: a layer, for several an `nn.Sequential`; with a state or random numbers, or without.
    - `join`: "concatenate", or "add", which is `nn.Residual`'s sum.
    - `axis`: the dimension to concatenate along. Default: the channels.

    It is called as `nn.Sequential` is: `y = skip(params, x)`, or `y, state = skip(params, x, state=state,
    training=True)`.

    **Raises:** `InvalidTypeError`, on every worker, where the body is no layer; `InvalidArgumentError` for another
    `join`, a dimension that x doesn't have, or a body that leaves its output on another partition than it takes x from,
    or has none; when applied, `PlanError` where the blocks don't fit.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> conv = dj.nn.DistributedConv1d(P, in_channels=2, out_channels=3, kernel_size=3, padding=1)
    >>> network = dj.nn.Sequential(Skip(dj.nn.Sequential(conv, jax.nn.relu)), jax.nn.relu)
    >>> network(network.init(jax.random.key(0)), jax.numpy.ones((1, 2, 8))).shape
    (1, 5, 8)

    Source: Ronneberger et al. (2015), arXiv:1505.04597.
    """

    body: Any
    join: Join = "concatenate"
    axis: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.body, Layer):
            raise InvalidTypeError(
                f"`body` (={self.body!r}) must be a layer; functions go into an nn.Sequential with layers."
            )
        if self.join not in get_args(Join):
            joins = ", ".join(map(repr, get_args(Join)))
            raise InvalidArgumentError(f"`join` (={self.join!r}) must be one of {joins}.")
        P_x, P_y = self.input_partition, last_partition((self.body,))
        if P_x is None or P_y is None:
            raise InvalidArgumentError("`body` must have a layer with a partition: a function alone has none.")
        if not in_equal_blocks(P_x, P_y):
            raise InvalidArgumentError(
                f"`body` takes its input from {P_x.describe()}, but leaves its output on {P_y.describe()}: both must "
                "be on the same workers, in the same blocks; a `Repartition` at its end moves it."
            )
        if self.join == "concatenate":
            Concatenate(P_x, self.axis)

    @property
    def _computes(self) -> str:
        return "sum" if self.join == "add" else "concatenation"

    @property
    def layers(self) -> tuple[Any, ...]:
        """The body alone."""
        return (self.body,)

    @property
    def _parts(self) -> tuple[tuple[str, Any], ...]:
        return (("body", self.body),)

    @property
    def _ends(self) -> Ends:
        return ends_of(self.body)

    def _pack(self, entries: Iterable[Any]) -> dict[str, Any]:
        return dict(zip(("body",), entries, strict=True))

    @property
    def _partition(self) -> Partition:
        assert self.input_partition is not None
        return self.input_partition

    def plan(self, x: ShapeDtypes, params: Mapping[int, dict[str, Any]] | None = None) -> BlocksPlan:
        """Plan the blocks of the output: without a message, and the same on every worker.

        **Raises:** `PlanError` where x or a parameter does not fit, or the outputs don't fit each other.
        """
        if self.join == "add":
            return BlocksPlan(Residual(self.body).plan(x, params).outputs)
        with place_of_errors("body", self.body):
            y = self.body.plan(x, params_of_part(params, "body")).after(x)
        return BlocksPlan({**x, **Concatenate(self._partition, self.axis).plan([x, y]).outputs})

    def _forward(self, run: RunPart, x: Array) -> Array:
        with jax.named_scope("Skip"):
            y = run("body", self.body, x)
            if self.join == "add":
                return Residual(self.body).added(y, x)
            return Concatenate(self._partition, self.axis)(x, y)

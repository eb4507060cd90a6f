"""Cases of the distributed linear layer, with the sequential layer worked out by numpy in float64 beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from blocks import block
from matrix.programs import run

import distdl_jax as dj
from distdl_jax import nn

Ranks = tuple[int, ...]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class LinearCase:
    """A layer on the world ranks `x`, `y` and `W` (row-major on a grid of `shape`), and data for it.

    `shape` is P_fo x P_fi, or P_n x P_fo x P_fi where the batch is split too; `batches` are then the lengths of its
    blocks, where they are not balanced. The loss is sum(c * sin(y)), so that every output has another cotangent.
    """

    x: Ranks
    y: Ranks
    W: Ranks
    shape: tuple[int, ...]
    n_in: int
    n_out: int
    lead: tuple[int, ...] = (3,)
    bias: bool = True
    batches: tuple[int, ...] | None = None
    sharded: bool = False

    @cached_property
    def partitions(self) -> tuple[dj.CartesianPartition, dj.CartesianPartition, dj.CartesianPartition]:
        P = dj.Partition()
        slices, rows, columns = (1, *self.shape)[-3:]
        # P_x and P_y may have as many dimensions of one worker in between as there are.
        between = (1,) * (len(self.lead) - 1)
        P_y = P.grid([slices, *between, rows], self.y)
        return P.grid([slices, columns], self.x), P_y, P.grid(self.shape, self.W)

    @cached_property
    def layer(self) -> nn.DistributedLinear:
        return nn.DistributedLinear(*self.partitions, self.n_in, self.n_out, bias=self.bias, sharded=self.sharded)

    @cached_property
    def data(self) -> Arrays:
        draw = np.random.default_rng(self.n_in * 100 + self.n_out).standard_normal
        whole = {
            "x": draw((*self.lead, self.n_in)),
            "weight": draw((self.n_out, self.n_in)),
            "bias": draw(self.n_out),
            "c": draw((*self.lead, self.n_out)),
        }
        return whole if self.bias else {**whole, "bias": np.zeros(self.n_out)}

    def cut(self, whole: Arrays, dtype: Any = float) -> dict[str, jax.Array]:
        """This worker's blocks of tensors by name."""
        return {
            name: self._rows(tensor, P, dtype) if name in ("x", "c", "y") else block(tensor, P, dtype)
            for name, tensor in whole.items()
            if (P := self.holders.get(name)) is not None
        }

    @cached_property
    def holders(self) -> dict[str, dj.Partition]:
        """Which partition each tensor is on."""
        (P_x, P_y, _), W = self.partitions, self.W
        slices, rows, columns = (1, *self.shape)[-3:]
        grid_of_W = np.reshape(W, (slices, rows, columns))
        held = grid_of_W if self.sharded else grid_of_W[:1]  # of the slices along the batch, the first
        first = held.swapaxes(0, 1).reshape(-1, columns)
        P_weight, P_bias = (dj.Partition().grid(ranks.shape, ranks.flat) for ranks in (first, first[:, 0]))
        return {"x": P_x, "weight": P_weight, "c": P_y, "y": P_y, "bias": P_bias}

    def _rows(self, whole: np.ndarray, P: dj.Partition, dtype: Any) -> jax.Array:
        """This worker's block of a tensor with a batch, split along its first and its last dimension."""
        if not P.active:
            return dj.zero_volume_tensor(dtype=dtype)
        i, j = np.unravel_index(P.rank, (P.shape[0], P.shape[-1]))
        cuts = P.shape[0] if self.batches is None else np.cumsum(self.batches)[:-1]
        rows = np.array_split(whole, cuts)[i]
        return jax.device_put(np.array_split(rows, P.shape[-1], axis=-1)[j].astype(dtype))

    def local(self, dtype: Any = float) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
        """This worker's parameters, input and cotangent."""
        mine = self.cut(self.data, dtype)
        names = ("weight", "bias") if self.bias else ("weight",)
        return {name: mine[name] for name in names}, mine["x"], mine["c"]

    def loss(self, params: Any, x: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        """And the output."""
        y = self.layer(params, x)
        return jnp.sum(jnp.sin(y) * c if self.partitions[1].active else jnp.sin(y)), y

    @cached_property
    def expected(self) -> Arrays:
        """The sequential layer's output and gradients, by the chain rule in numpy."""
        x, W, b, c = (self.data[name] for name in ("x", "weight", "bias", "c"))
        y = x @ W.T + b
        dy = c * np.cos(y)
        flat_x, flat_dy = x.reshape(-1, self.n_in), dy.reshape(-1, self.n_out)
        return {"y": y, "x": dy @ W, "weight": flat_dy.T @ flat_x, "bias": flat_dy.sum(0)}

    def program(self, params: Any, x: jax.Array, c: jax.Array, alone: Sequence[str] = ()) -> dict[str, Any]:
        """The output, and the gradients with respect to all arguments together; and each of `alone` by itself."""
        parts = {"x": x, **params}

        def loss_of(names: Sequence[str]) -> Any:
            fixed = {name: value for name, value in parts.items() if name not in names}

            def loss(chosen: dict[str, jax.Array]) -> Any:
                both = {**fixed, **chosen}
                return self.loss({name: both[name] for name in params}, both["x"], c)

            return jax.grad(loss, has_aux=True)({name: parts[name] for name in names})

        each = {name: loss_of((name,))[0][name] for name in alone if name in parts}
        if "y" in alone:
            each["y"] = self.layer(params, x)
        together, y = loss_of(tuple(parts))
        return {"y": y, "alone": each, "together": together}

    def check(self, result: dict[str, Any], rtol: float = 1e-12, dtype: Any = float) -> None:
        """This worker's blocks are those of the sequential layer; elsewhere nothing."""
        expected = self.cut(self.expected)
        got = [("y", result["y"]), *result["alone"].items(), *result["together"].items()]
        for name, mine in got:
            assert mine.dtype == dtype, name
            if self.holders[name].active:
                size = max(1.0, np.abs(self.expected[name]).max(initial=0.0))
                np.testing.assert_allclose(
                    np.asarray(mine, float), expected[name], rtol=0, atol=rtol * size, err_msg=f"{name} of {self}"
                )
            else:
                assert mine.size == 0, f"{name} of {self}"


def check_together(cases: list[LinearCase], alone: Sequence[Sequence[str]] = ((),)) -> None:
    """All cases in one compiled program, against numpy; `alone` has a turn for each case."""
    cases = [replace(case) for case in cases]  # theirs is a layer of this worker

    def program(given: list[Any]) -> list[Any]:
        return [case.program(*mine, names) for case, mine, names in zip(cases, given, cycle(alone), strict=False)]

    results = run(program, [case.local() for case in cases])
    for case, result in zip(cases, results, strict=True):
        case.check(result)

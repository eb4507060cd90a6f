"""Random attentions, with all that they may be told, beside plain JAX: output and every gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from blocks import block_of
from matrix.partitions import On
from sequential import close, cut

import distdl_jax as dj
from distdl_jax import nn


@dataclass(frozen=True)
class Drawn:
    """One attention, and what it is told.

    - `sizes`: samples, and elements of the sequence; `keys`: of the memory, None where there is none.
    - `mask`: whether one that is added has all samples, and all heads, or 1; "queries": one of bool, for queries alone.
    - `padded`: whether keys are padding. - `pieces`: the lengths in which a cache gets the sequence; none without one.
    """

    P_x: On
    sizes: tuple[int, int]
    embed: int
    heads: int
    keys: int | None = None
    mask: str | tuple[int, int] | None = None
    padded: bool = False
    pieces: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def layer(self) -> nn.DistributedMultiHeadAttention:
        return nn.DistributedMultiHeadAttention(
            self.P_x.partition(dj.Partition()), self.embed, self.heads, **self.options
        )

    def whole(self, specs: Any) -> dict[str, Any]:
        """The whole tensors: parameters, x, the memory, the mask, padding, and the cotangent."""
        rng, (n, s), t = np.random.default_rng(self.seed), self.sizes, self.keys or self.sizes[1]
        found = {
            "params": {name: rng.normal(size=spec.global_shape) for name, spec in specs.items()},
            "x": rng.normal(size=(n, s, self.embed)),
            "c": rng.normal(size=(n, s, self.embed)),
            "padding": rng.random((n, t)) < 0.4,
        }
        if self.keys is not None:
            found["memory"] = rng.normal(size=(n, t, self.embed))
        if self.mask == "queries":
            found["mask"] = rng.random((1, 1, s, t)) < 0.4
        elif self.mask is not None:
            shape = (length if one else 1 for length, one in zip((n, self.heads), self.mask, strict=True))
            found["mask"] = rng.normal(size=(*shape, s, t))
        return found

    def plain(self, given: dict[str, Any], fixed: dict[str, Any]) -> Any:
        """The output from the whole tensors, in plain JAX; `fixed` are those that are not differentiated."""
        params, x = given["params"], given["x"]
        memory, mask = given.get("memory", x), given.get("mask", fixed.get("mask"))
        if self.options.get("fused"):
            weight = params["qkv"]
            groups, _, d, _ = weight.shape
            bias = params.get("qkv_bias", jnp.zeros((groups, weight.shape[1], d)))
            parts = (slice(-2), slice(-2, -1), slice(-1, None))
            weights = [weight[:, part].reshape(-1, d, self.embed) for part in parts]
            biases = [bias[:, part].reshape(-1, d) for part in parts]
        else:
            weights = [params[name] for name in ("query", "key", "value")]
            biases = [params.get(f"{name}_bias", jnp.zeros(())) for name in ("query", "key", "value")]
        q, k, v = (
            jnp.einsum("nse,hde->nshd", of, weight) + bias
            for of, weight, bias in zip((x, memory, memory), weights, biases, strict=True)
        )
        if base := self.options.get("rotary"):
            q, k = turned(q, base), turned(k, base)
        k, v = (each.repeat(self.heads // each.shape[2], 2) for each in (k, v))
        scores = jnp.einsum("nshd,nthd->nhst", q, k) / np.sqrt(self.embed // self.heads)
        seen = np.ones(scores.shape[2:], bool)
        if self.options.get("causal"):
            seen = np.tri(*scores.shape[2:], dtype=bool)
        if self.mask == "queries":
            seen = seen & ~mask
        elif mask is not None:
            scores = scores + mask
        if self.padded:
            seen = seen & ~fixed["padding"][:, None, None]
        some = np.broadcast_to(seen, scores.shape).any(-1, keepdims=True)
        weights = jnp.where(some, jax.nn.softmax(jnp.where(seen, scores, np.where(some, -np.inf, 0.0))), 0)
        if p := self.options.get("dropout"):
            weights = weights * jax.random.bernoulli(jax.random.key(self.seed), 1 - p, weights.shape) / (1 - p)
        return jnp.einsum("nhst,nthd,ehd->nse", weights, v, params["out"]) + params.get("out_bias", 0)

    def regions(self, layer: Any) -> dict[int, Any]:
        """By worker, of which samples, heads and queries its mask is."""
        shape = (*self.sizes, self.embed)
        blocks = {rank: cut(np.zeros(shape), self.P_x, rank) for rank in self.P_x.ranks}
        held = {rank: dj.ShapeDtype(block.shape, np.dtype(float)) for rank, block in blocks.items()}
        return {worker: tuple(slice(*its) for its in region) for worker, region in layer.plan(held).regions.items()}


def turned(x: Any, base: float) -> Any:
    """Rotary positions, with complex numbers."""
    half = x.shape[-1] // 2
    turns = np.exp(1j * np.arange(x.shape[1])[:, None, None] * base ** (-2 * np.arange(half) / x.shape[-1]))
    y = (x[..., :half] + 1j * x[..., half:]) * turns
    return jnp.concatenate([y.real, y.imag], -1)


class Mine:
    """One worker's side of a case."""

    def __init__(self, case: Drawn) -> None:
        self.case, self.layer, self.rank = case, case.layer(), dj.Partition().rank
        self.specs, self.regions = self.layer.param_specs(), case.regions(self.layer)
        self.here = self.rank in case.P_x.ranks
        whole, ends = case.whole(self.specs), np.cumsum(case.pieces)[:-1]
        self.floats: dict[str, Any] = {"params": jax.tree.map(block_of, whole["params"], self.specs)}
        self.fixed: dict[str, Any] = {}
        if case.pieces:  # x and the cotangent come in pieces, each of them cut
            self.floats["x"] = [self.block(piece) for piece in np.split(whole["x"], ends, 1)]
        else:
            self.floats |= {name: self.block(whole[name]) for name in ("x", "memory") if name in whole}
        self.c = [self.block(piece) for piece in np.split(whole["c"], ends, 1)]
        if "mask" in whole:
            added = whole["mask"].dtype == float
            # Its samples and heads, where the mask has more than one, and its queries.
            mine = (
                whole["mask"][self.place(whole["mask"], self.rank)] if self.here else np.zeros(0, whole["mask"].dtype)
            )
            (self.floats if added else self.fixed)["mask"] = mine
        if case.padded:
            gathered = case.options.get("exchange") == "gather"
            self.fixed["padding"] = self.own_padding(whole["padding"], gathered)

    def own_padding(self, padding: np.ndarray, gathered: bool) -> np.ndarray:
        """Its samples, and its keys or all."""
        if not self.here:
            return padding[:0]
        p_n, p_s, _ = self.case.P_x.shape
        i, j, _ = np.unravel_index(self.case.P_x.ranks.index(self.rank), self.case.P_x.shape)
        its = np.array_split(padding, p_n)[i]
        return its if gathered else np.array_split(its, p_s, axis=1)[j]

    def block(self, whole: np.ndarray) -> np.ndarray:
        mine = cut(whole, self.case.P_x, self.rank)
        return np.zeros((len(whole), 0), whole.dtype) if mine is None else mine

    def place(self, mask: np.ndarray, rank: int) -> tuple[slice, ...]:
        samples, heads, queries = self.regions[rank]
        every = slice(None)
        return (samples if mask.shape[0] > 1 else every, heads if mask.shape[1] > 1 else every, queries)

    def output(self, floats: Any) -> list[Any]:
        """The output, or those of the pieces."""
        told = {"attn_mask": floats.get("mask", self.fixed.get("mask")), "key_padding_mask": self.fixed.get("padding")}
        told = {name: its for name, its in told.items() if its is not None}
        if self.case.mask == "queries" and self.here:
            told["attn_mask"] = told["attn_mask"][0, 0]
        if not self.case.pieces:
            key = {"key": jax.random.key(self.case.seed)} if self.case.options.get("dropout") else {}
            memory = {"memory": floats["memory"]} if "memory" in floats else {}
            return [self.layer(floats["params"], floats["x"], **told, **memory, **key)]
        cache, ys = self.layer.init_cache(*self.case.sizes, float), []
        for x, (first, last) in zip(floats["x"], pairwise(accumulate(self.case.pieces, initial=0)), strict=True):
            part = dict(told)
            if "attn_mask" in told and self.here:
                part["attn_mask"] = told["attn_mask"][..., first:last, :]
            if "key_padding_mask" in told:
                part["key_padding_mask"] = told["key_padding_mask"][:, first:last]
            y, cache = self.layer(floats["params"], x, cache=cache, **part)
            ys.append(y)
        return ys


def check_attentions(cases: Sequence[Drawn]) -> None:
    """Outputs, and gradients of sum(c * sin(y)) by parameters, x, memory and mask, are those of the whole."""
    P = dj.Partition()
    mine = [Mine(case) for case in cases]

    def loss(floats: Any) -> Any:
        ys = [its.output(own) for its, own in zip(mine, floats, strict=True)]
        parts = [
            jnp.sum(c * jnp.sin(y)) for its, own in zip(mine, ys, strict=True) for c, y in zip(its.c, own, strict=True)
        ]
        return sum(parts), ys

    (_, ys), got = dj.jit(dj.value_and_grad(loss, has_aux=True))([its.floats for its in mine])
    expected = P.broadcast_data(of_whole(cases, [its.specs for its in mine]) if P.rank == 0 else None, root=0)
    for its, y, found, want in zip(mine, ys, got, expected, strict=True):
        case, of_x = its.case, found["x"] if its.case.pieces else [found["x"]]
        for what, parts, whole in (("y of", y, want["y"]), ("gradient of x in", of_x, want["x"])):
            for one, piece in zip(parts, np.split(whole, np.cumsum(case.pieces)[:-1], 1), strict=True):
                if its.here or what != "y of":
                    close(one, its.block(piece), 1e-12, f"{what} {case}")
        if "memory" in want:
            close(found["memory"], its.block(want["memory"]), 1e-12, f"gradient of the memory in {case}")
        for name, spec in its.specs.items():
            close(found["params"][name], block_of(want["params"][name], spec), 1e-12, f"gradient of {name} in {case}")
        if "mask" in want:  # each worker has its heads' and its queries' share
            total = np.zeros_like(want["mask"])
            for rank, part in enumerate(P.allgather_data(np.asarray(found["mask"]))):
                if rank in case.P_x.ranks:
                    total[its.place(total, rank)] += part
            close(total, want["mask"], 1e-12, f"gradient of the mask in {case}")


def of_whole(cases: Sequence[Drawn], specs: Sequence[Any]) -> list[dict[str, Any]]:
    """Outputs and gradients in plain JAX, in one program."""
    wholes = [case.whole(its) for case, its in zip(cases, specs, strict=True)]
    names = ("params", "x", "memory", "mask")
    floats = [
        {name: whole[name] for name in names if name in whole and not (name == "mask" and whole[name].dtype == bool)}
        for whole in wholes
    ]

    def loss(floats: Any) -> Any:
        ys = [case.plain(given, whole) for case, given, whole in zip(cases, floats, wholes, strict=True)]
        return sum(jnp.sum(whole["c"] * jnp.sin(y)) for y, whole in zip(ys, wholes, strict=True)), ys

    (_, ys), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(floats)
    return [jax.tree.map(np.asarray, its | {"y": y}) for its, y in zip(gradients, ys, strict=True)]

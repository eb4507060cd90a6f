"""Random attentions, with all that they may be told, beside plain JAX: output and every gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from blocks import block_of
from matrix.partitions import On, on
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
        whole = case.whole(self.specs)
        gathered = case.options.get("exchange") == "gather"
        t = case.keys or case.sizes[1]
        self.floats: dict[str, Any] = {"params": jax.tree.map(block_of, whole["params"], self.specs)}
        self.fixed: dict[str, Any] = {}
        for name in ("x", "memory"):
            if name in whole:
                self.floats[name] = self.block(whole[name])
        self.c = self.block(whole["c"])
        if "mask" in whole:
            added = whole["mask"].dtype == float
            (self.floats if added else self.fixed)["mask"] = self.own_mask(whole["mask"])
        if case.padded:
            samples = self.block(np.arange(case.sizes[0])[:, None, None].repeat(case.P_x.shape[2], 2).repeat(
                case.P_x.shape[1], 1))[:, 0, 0] if self.here else np.zeros(0, int)  # fmt: skip
            keys = self.block(np.arange(t)[None, :, None].repeat(case.P_x.shape[2], 2).repeat(case.P_x.shape[0], 0))
            keys = np.arange(t) if gathered or not self.here else keys[0, :, 0]
            self.fixed["padding"] = whole["padding"][np.ix_(samples, keys)]

    def block(self, whole: np.ndarray) -> np.ndarray:
        mine = cut(whole, self.case.P_x, self.rank)
        return np.zeros((len(whole), 0), whole.dtype) if mine is None else mine

    def own_mask(self, mask: np.ndarray) -> np.ndarray:
        """Its samples and heads, where the mask has more than one, and its queries."""
        return mask[self.place(mask, self.rank)] if self.here else np.zeros(0, mask.dtype)

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
        n, s = self.case.sizes
        cache, ys = self.layer.init_cache(n, s, float), []
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
    for its in mine:
        if its.case.pieces:  # x and the cotangent come in pieces, each of them cut
            whole = its.case.whole(its.specs)
            ends = np.cumsum(its.case.pieces)[:-1]
            its.floats["x"] = [its.block(piece) for piece in np.split(whole["x"], ends, 1)]
            its.c = [its.block(piece) for piece in np.split(whole["c"], ends, 1)]

    def loss(floats: Any) -> Any:
        ys = [its.output(own) for its, own in zip(mine, floats, strict=True)]
        cs = [its.c if isinstance(its.c, list) else [its.c] for its in mine]
        parts = [jnp.sum(c * jnp.sin(y)) for y, c in zip(jax.tree.leaves(ys), jax.tree.leaves(cs), strict=True)]
        return sum(parts), ys

    (_, ys), got = dj.jit(dj.value_and_grad(loss, has_aux=True))([its.floats for its in mine])
    expected = P.broadcast_data(of_whole(cases, [its.specs for its in mine]) if P.rank == 0 else None, root=0)
    for its, y, found, want in zip(mine, ys, got, expected, strict=True):
        case, split = its.case, [len(its.case.pieces) or 1]
        ends = np.cumsum(case.pieces or split)[:-1]

        def blocks(whole: Any, its: Mine = its, ends: Any = ends) -> list[np.ndarray]:
            return [its.block(piece) for piece in np.split(np.asarray(whole), ends, 1)]

        if its.here:
            for one, piece in zip(y, blocks(want["y"]), strict=True):
                close(one, piece, 1e-12, f"y of {case}")
        of_x = found["x"] if case.pieces else [found["x"]]
        for one, piece in zip(of_x, blocks(want["x"]), strict=True):
            close(one, piece, 1e-12, f"gradient of x in {case}")
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


def drawn(seed: int, workers: int) -> Drawn:
    """An attention on some of the workers, and what it is told, of all that go together."""
    rng = np.random.default_rng([31, workers, seed])

    def one_of(*things: Any) -> Any:
        return things[int(rng.integers(len(things)))]

    exchange = one_of("ring", "heads", "gather")
    grids = [g for g in np.ndindex(5, 5, 5) if np.prod(g) == workers and not (exchange == "gather" and g[2] > 1)]
    if workers > 2 and rng.random() < 0.2:
        grids = [(1, 3, 1)]  # one of them is left out
    grid = one_of(*grids)
    ranks = tuple(int(r) for r in rng.permutation(workers)[: int(np.prod(grid))])
    p_h = grid[1] if exchange == "gather" else grid[2]
    heads, d = one_of(2, 3, 4), one_of(2, 4)
    groups = [g for g in range(1, heads + 1) if heads % g == 0 and heads % p_h == 0 and g % p_h == 0]
    options: dict[str, Any] = {
        "exchange": exchange,
        "bias": bool(rng.random() < 0.7),
        "fused": bool(rng.random() < 0.3),
    }
    if groups and rng.random() < 0.5:
        options["num_key_heads"] = one_of(*groups)
    if rng.random() < 0.3:
        options["rotary"] = 50.0
    what = one_of("memory", "cache", "causal", "all")
    sizes, keys, pieces = (int(rng.integers(1, 4)), int(rng.integers(2, 7))), None, ()
    cached = what == "cache" and (grid[1] == 1 or exchange == "gather")
    if what == "memory":
        keys = int(rng.integers(1, 7))
    elif cached:
        first = int(rng.integers(1, sizes[1]))
        pieces = (first, *(1,) * (sizes[1] - first))
    options["causal"] = what in ("cache", "causal")
    if not cached and rng.random() < 0.5:
        options["dropout"] = 0.3
    mask = one_of(None, "queries", (0, 0), (0, 1), (1, 0), (1, 1))
    on_grid = on(*grid, ranks=ranks)
    return Drawn(on_grid, sizes, heads * d, heads, keys, mask, bool(rng.random() < 0.5), pieces, options, seed)

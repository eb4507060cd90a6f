"""A loss beside that of the whole tensors: the sum of the workers' parts, and the gradient of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matrix.partitions import On
from sequential import Sizes, close, cut

import distdl_jax as dj


@dataclass(frozen=True, eq=False)
class LossCase:
    """A loss on P_x, and of whole tensors the loss of each element (or sample) and by what the mean divides.

    - `loss`: from P_x, the loss.
    - `of_nothing`: whether a worker without elements may have a part all the same.
    """

    name: str
    loss: Callable[[Any], Any]
    terms: Callable[[Any, Any], Any]
    P_x: On
    sizes: Sequence[Sizes]
    prediction: np.ndarray
    target: np.ndarray
    divisor: float | None = None
    reduction: str = "mean"
    of_nothing: bool = False

    def whole(self, prediction: Any) -> Any:
        terms = self.terms(prediction, self.target)
        return jnp.sum(terms) / {"sum": 1, "mean": self.divisor or terms.size, "batchmean": len(terms)}[self.reduction]

    def blocks(self, rank: int) -> tuple[Any, Any]:
        x = cut(self.prediction, self.P_x, rank, self.sizes)
        if x is None:
            return np.zeros(0), np.zeros(0, self.target.dtype)
        if self.target.shape == self.prediction.shape:
            return x, cut(self.target, self.P_x, rank, self.sizes)
        expanded = np.repeat(self.target[:, None], max(self.prediction.shape[1], self.P_x.shape[1]), 1)
        return x, cut(expanded, self.P_x, rank, [*self.sizes[:1], expanded.shape[1], *self.sizes[2:]])[:, 0]


def shape_of(sizes: Sequence[Sizes]) -> tuple[int, ...]:
    return tuple(n if isinstance(n, int) else sum(n) for n in sizes)


def check(cases: Sequence[LossCase]) -> None:
    P = dj.Partition()
    losses = {case.name: case.loss(case.P_x.partition(P)) for case in cases}
    blocks = {case.name: case.blocks(P.rank) for case in cases}

    def everything(xs: Any) -> Any:
        parts = {name: losses[name](x, blocks[name][1]) for name, x in xs.items()}
        return sum(parts.values()), parts

    xs = {name: block[0] for name, block in blocks.items()}
    (_, parts), gradient = dj.jit(dj.value_and_grad(everything, has_aux=True))(xs)
    all_parts = P.allgather_data({name: float(part) for name, part in parts.items()})
    wholes = None
    if P.rank == 0:
        of_all = jax.jit(lambda xs: [jax.value_and_grad(case.whole)(x) for case, x in zip(cases, xs, strict=True)])
        wholes = jax.tree.map(np.asarray, of_all([case.prediction for case in cases]))
    for case, (want, its_gradient) in zip(cases, P.broadcast_data(wholes), strict=True):
        np.testing.assert_allclose(sum(each[case.name] for each in all_parts), want, rtol=1e-12, err_msg=case.name)
        mine = cut(its_gradient, case.P_x, P.rank, case.sizes)
        close(gradient[case.name], np.zeros(0) if mine is None else mine, 1e-12, case.name)
        if not xs[case.name].size and not case.of_nothing:
            assert parts[case.name] == 0, case.name

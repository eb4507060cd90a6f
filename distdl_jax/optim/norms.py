"""Sums and norms of whole tensors, from blocks, and optax's transformations that use them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError, SetupError
from distdl_jax.functional import all_sum_reduce
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.partitions.partition import Partition, check_workers
from distdl_jax.partitions.spec_trees import (
    check_shape,
    different_masks,
    leaves_with_specs,
    masked_places,
    specs_by_path,
)
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.transports.agreement import agree
from distdl_jax.validation import check_not_negative, checked_integers

if TYPE_CHECKING:
    import optax


def optax_for(name: str) -> ModuleType:
    """Return the module optax, for `dj.optim.<name>`."""
    try:
        import optax
    except ImportError:
        raise SetupError(
            f"dj.optim.{name} needs optax, which is not installed: pip install optax, or distdl_jax[optim]."
        ) from None
    return optax


class LeafBlock(NamedTuple):
    """A leaf of a pytree of blocks: its path, this worker's block, and the spec of the whole tensor."""

    path: str
    block: Array
    spec: TensorSpec


class Whole:
    """The whole tensors whose blocks on this worker are in pytrees.

    - `label`: the name of the caller in errors and reports.
    - `specs`: a pytree of `TensorSpec`.
    - `partition`: the workers that call it, at least the workers of all specs. Default: all of the world.
    """

    def __init__(self, label: str, specs: Any, partition: Partition | None) -> None:
        specs_by_path(specs)
        check_workers("partition", partition)
        self._label = label
        self._specs = specs
        self._partition = partition

    @property
    def workers(self) -> Partition:
        """The workers that sum, and get the sums."""
        return Partition() if self._partition is None else self._partition

    def leaves(self, tree: Any) -> list[LeafBlock]:
        """Return the leaves of a pytree of blocks, except those that optax masks."""
        masked = getattr(sys.modules.get("optax"), "MaskedNode", ())
        blocks = []
        for path, value, spec in leaves_with_specs(tree, self._specs, masked=masked):
            if spec is None:
                raise InvalidTypeError(
                    f"`specs` must have a TensorSpec for each leaf of the tree, but has None at {path or 'its top'}."
                )
            blocks.append(LeafBlock(path, value if hasattr(value, "dtype") else jnp.asarray(value), spec))
        return blocks

    def dtypes(self, *trees: Any) -> list[np.dtype]:
        """Check `trees` on all workers, and return the dtype of each leaf of the first of them, as on its owner.

        **Raises,** on all workers: `PlanError` if one worker's leaf does not have the shape of its spec.
        """

        def check() -> list[np.dtype]:
            for tree in trees:
                for path, block, spec in self.leaves(tree):
                    if spec.box is not None:
                        check_shape(f"tree{path}", jnp.shape(block), spec, spec.local_shape)
            return [np.dtype(jnp.result_type(block)) for _, block, _ in self.leaves(trees[0])]

        def masks_and_dtypes() -> tuple[tuple[str, ...], list[np.dtype]]:
            return masked_places(tree=trees[0]), check()

        workers = self.workers
        specs = [spec for spec in jax.tree.leaves(self._specs) if isinstance(spec, TensorSpec)]
        if missing := {worker for spec in specs for worker in spec.partition.ranks} - set(workers.ranks):
            raise InvalidArgumentError(
                f"`partition` ({workers.describe()}) must hold the workers of all specs, but lacks {min(missing)}."
            )
        if not workers.active:
            return check()
        contributions = agree(workers.world, workers.ranks, f"{self._label} on {workers.describe()}", masks_and_dtypes)
        if (problem := different_masks({worker: places for worker, (places, _) in contributions.items()})) is not None:
            raise PlanError(problem)
        owners = [spec.partition.ranks[0] for _, _, spec in self.leaves(trees[0])]
        return [contributions[owner][1][number] for number, owner in enumerate(owners)]

    def sums(self, measure: Callable[..., Array], *trees: Any) -> list[Array]:
        """Return for each leaf the sum of `measure` over all blocks of the tensor, with one message for all.

        `measure` gets a block of each of `trees`, half precisions in float32, and returns real numbers in one shape
        for all leaves, 0 for an empty block.
        """
        dtypes = [accumulation_dtype(_real(dtype)) for dtype in self.dtypes(*trees)]
        if not dtypes:
            return []
        parts = []
        for same_leaf in zip(*map(self.leaves, trees), strict=True):
            counted = same_leaf[0].spec.counts
            blocks = (leaf.block if counted else jnp.zeros(0, leaf.block.dtype) for leaf in same_leaf)
            parts.append(measure(*map(widened, blocks)).astype(jnp.result_type(*dtypes)))
        return list(all_sum_reduce(jnp.stack(parts), self.workers, axes_keep=()))

    def inner(self, x: Any, y: Any) -> Array:
        """Return the real part of the inner product of two pytrees: the sum of conj(x) y over all elements."""
        numbers = self.sums(lambda a, b: jnp.sum(jnp.real(jnp.conj(a) * b)), x, y)
        return functools.reduce(jnp.add, numbers, jnp.zeros(()))

    def norm(self, tree: Any) -> Array:
        """Return the Euclidean norm of a pytree."""
        return square_root(functools.reduce(jnp.add, self.sums(squares, tree), jnp.zeros(())))


def check_params(name: str, params: Any) -> None:
    """Reject None for the parameters of `dj.optim.<name>`."""
    if params is None:
        raise InvalidArgumentError(f"`params` (=None) must be this worker's parameters: {name} compares with them.")


def widened(block: Any) -> Array:
    """Return a block in the dtype in which it is summed."""
    block = jnp.asarray(block)
    return block.astype(accumulation_dtype(np.dtype(block.dtype)))


def squares(x: Array, axis: Sequence[int] | None = None) -> Array:
    """Return the sum of |x|^2 along `axis`, keeping its dimensions; a scalar, over all, if `axis` is None."""
    absolute = jnp.real(x * jnp.conj(x)) if jnp.iscomplexobj(x) else x * x
    return jnp.sum(absolute, axis=axis, keepdims=axis is not None)


def square_root(x: Array) -> Array:
    """Return the root, whose derivative at 0 is 0; at NaN it is NaN."""
    at_zero = x == 0
    return jnp.where(at_zero, 0, jnp.sqrt(jnp.where(at_zero, 1, x)))


def _real(dtype: np.dtype) -> np.dtype:
    return np.dtype(jnp.finfo(dtype).dtype) if jnp.issubdtype(dtype, jnp.inexact) else np.dtype(jnp.result_type(float))


def global_norm(tree: Any, specs: Any, *, partition: Partition | None = None) -> Array:
    """Return the Euclidean norm over all whole tensors of a pytree: `optax.global_norm` of the global tree.

    **Arguments:**

    - `tree`: this worker's pytree of blocks: parameters, gradients, updates.
    - `specs`: a pytree of `TensorSpec` with one for each leaf of `tree` (`layer.param_specs()`).
    - `partition`: the workers that call it, at least the workers of all specs. Default: all of the world.

    **Returns:** a real scalar, the same on every worker. Half precisions are summed in float32. Differentiable; its
    derivative at 0 is 0.

    **Raises,** on every worker: `PlanError` if a leaf does not have the shape of its spec; `InvalidArgumentError` if a
    leaf has no spec, or a spec no leaf (unless optax masks it); `InvalidTypeError` if the spec of a leaf is None.

    >>> import distdl_jax as dj, jax.numpy as jnp
    >>> P = dj.Partition().grid([1])
    >>> float(global_norm({"bias": jnp.array([3.0, 4.0])}, {"bias": dj.TensorSpec((2,), P)}))
    5.0
    """
    return Whole("global_norm", specs, partition).norm(tree)


def clip_by_global_norm(
    max_norm: ArrayLike, specs: Any, *, partition: Partition | None = None
) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm` of whole tensors, which scales updates down to a norm of `max_norm`.

    **Arguments:**

    - `max_norm`: the largest norm, a number or a scalar array, not negative.
    - `specs`, `partition`: as in `global_norm`.

    **Returns:** an `optax.GradientTransformation`. All workers call its `update`, which sends one message.

    **Raises:** `SetupError` if optax is not installed; its `update` raises like `global_norm`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> specs, params = dj.TensorSpec((2,), P), jnp.array([3.0, 4.0])
    >>> clip = clip_by_global_norm(1.0, specs)
    >>> updates, _ = clip.update(params, clip.init(params))
    >>> [round(float(x), 4) for x in updates]
    [0.6, 0.8]

    Source: Pascanu et al. (2012), arXiv:1211.5063.
    """
    optax = optax_for("clip_by_global_norm")
    check_not_negative("max_norm", max_norm)
    whole = Whole("clip_by_global_norm", specs, partition)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = whole.norm(updates)

        def clipped(x: Array) -> Array:
            return jnp.where(norm < max_norm, x, (x / norm.astype(x.dtype)) * max_norm).astype(x.dtype)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def adaptive_grad_clip(
    clipping: ArrayLike,
    specs: Any,
    eps: ArrayLike = 1e-3,
    axis: int | Sequence[int] | None = None,
    *,
    partition: Partition | None = None,
) -> optax.GradientTransformation:
    """Return `optax.adaptive_grad_clip` of whole tensors: a unit's update is at most `clipping` times its norm.

    **Arguments:**

    - `clipping`: the largest ratio of norms, not negative.
    - `specs`, `partition`: as in `global_norm`.
    - `eps`: the minimum for a parameter's norm, not negative.
    - `axis`: the dimensions along which a unit extends, in the whole tensors. Default, as in optax: all of them for
      vectors, 0 for 2 or 3 dimensions, all but the last for 4 or 5. The layers here have PyTorch's layouts, outputs
      first: for their weights pass `axis=1` (linear) or `axis=(1, 2, 3)` (two-dimensional convolution), with
      `optax.masked` for the leaves of each kind.

    **Returns:** an `optax.GradientTransformation`. All workers call its `update`, with parameters.

    **Raises:** `SetupError` if optax is not installed. Its `update` raises like `global_norm`, and
    `InvalidArgumentError` if there are no parameters, or a tensor doesn't have the dimensions in `axis`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> specs, params = dj.TensorSpec((2,), P), jnp.array([3.0, 4.0])
    >>> clip = adaptive_grad_clip(0.1, specs)
    >>> updates, _ = clip.update(10 * params, clip.init(params), params)
    >>> [round(float(x), 4) for x in updates]
    [0.3, 0.4]

    Source: Brock et al. (2021), arXiv:2102.06171.
    """
    optax = optax_for("adaptive_grad_clip")
    check_not_negative("clipping", clipping)
    check_not_negative("eps", eps)
    along = None if axis is None else checked_integers("axis", axis, or_one=True)
    whole = Whole("adaptive_grad_clip", specs, partition)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        check_params("adaptive_grad_clip", params)
        whole.dtypes(updates, params)
        clipped = []
        for leaf, param in zip(whole.leaves(updates), whole.leaves(params), strict=True):
            axes = _unit_axes(leaf.spec.global_shape, along)
            norm, param_norm = (_unit_norms(block, leaf.spec, axes) for block in (leaf.block, param.block))
            most = clipping * jnp.maximum(param_norm, eps)
            scaled = leaf.block * (most / jnp.maximum(norm, 1e-6))  # as in optax, never 0
            clipped.append(jnp.where(norm < most, leaf.block, scaled).astype(leaf.block.dtype))
        return jax.tree.unflatten(jax.tree.structure(updates), clipped), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def scale_by_trust_ratio(
    specs: Any,
    min_norm: ArrayLike = 0.0,
    trust_coefficient: ArrayLike = 1.0,
    eps: ArrayLike = 0.0,
    *,
    partition: Partition | None = None,
) -> optax.GradientTransformation:
    """Return `optax.scale_by_trust_ratio` of whole tensors, the basis of LAMB and LARS.

    Each tensor's update is scaled by `trust_coefficient` |parameter| / (|update| + `eps`), or by 1 if a norm is 0.

    **Arguments:**

    - `specs`, `partition`: as in `global_norm`.
    - `min_norm`: the minimum for a norm, not negative.
    - `trust_coefficient`, `eps`: as above, not negative.

    **Returns:** an `optax.GradientTransformation`. All workers call its `update`, with parameters; it sends one
    message. LAMB on blocks is

        optax.chain(
            optax.scale_by_adam(eps=1e-6),
            optax.add_decayed_weights(weight_decay),
            dj.optim.scale_by_trust_ratio(specs),
            optax.scale_by_learning_rate(learning_rate),
        )

    **Raises:** `SetupError` if optax is not installed. Its `update` raises like `global_norm`, and
    `InvalidArgumentError` if there are no parameters.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> specs, params = dj.TensorSpec((2,), P), jnp.array([3.0, 4.0])
    >>> scale = scale_by_trust_ratio(specs)
    >>> updates, _ = scale.update(10 * params, scale.init(params), params)
    >>> [round(float(x), 4) for x in updates]
    [3.0, 4.0]

    Source: You et al. (2017), arXiv:1708.03888; You et al. (2020), arXiv:1904.00962.
    """
    optax = optax_for("scale_by_trust_ratio")
    for name, number in (("min_norm", min_norm), ("trust_coefficient", trust_coefficient), ("eps", eps)):
        check_not_negative(name, number)
    whole = Whole("scale_by_trust_ratio", specs, partition)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        check_params("scale_by_trust_ratio", params)
        both = whole.sums(lambda x, y: jnp.stack([squares(x), squares(y)]), params, updates)
        scaled = []
        for leaf, squared_norms in zip(whole.leaves(updates), both, strict=True):
            param_norm, update_norm = (jnp.maximum(square_root(x), min_norm) for x in squared_norms)
            ratio = trust_coefficient * param_norm / (update_norm + eps)
            ratio = jnp.where((param_norm == 0) | (update_norm == 0), 1, ratio)
            scaled.append(leaf.block * ratio.astype(leaf.block.dtype))
        return jax.tree.unflatten(jax.tree.structure(updates), scaled), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _unit_axes(shape: tuple[int, ...], axis: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the dimensions of a tensor of `shape` along which a unit extends."""
    if axis is not None:
        if any(not -len(shape) <= a < len(shape) for a in axis):
            given = axis[0] if len(axis) == 1 else axis
            raise InvalidArgumentError(
                f"`axis` (={given}) must name dimensions of each tensor, but one has the shape {shape}; use "
                "optax.masked to omit tensors."
            )
        return tuple(a % len(shape) for a in axis)
    if sum(n != 1 for n in shape) <= 1:
        return tuple(range(len(shape)))
    if len(shape) > 5:
        raise InvalidArgumentError(f"`axis` must be given for tensors of more than 5 dimensions: one is {shape}.")
    return tuple(range({2: 1, 3: 1, 4: 3, 5: 4}[len(shape)]))


def _unit_norms(block: Array, spec: TensorSpec, axes: tuple[int, ...]) -> Array:
    """Return the norm of the unit of each element, in a shape that broadcasts to the block's."""
    if spec.box is None:
        return jnp.zeros(np.shape(block), jnp.result_type(float))
    cut = [d for d in range(spec.partition.dim) if d not in spec.replicated]  # in the order of the tensor's dimensions
    along = [cut[axis] for axis in axes] if cut else []
    return square_root(all_sum_reduce(squares(widened(block), axes), spec.partition, axes_reduce=along))

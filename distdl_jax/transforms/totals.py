"""Scalars that all workers have, for algorithms that call `jax.grad` themselves: samplers, minimisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.copies import share, total_of_blocks
from distdl_jax.jax_compat import mapped_sizes
from distdl_jax.partitions.partition import Partition, check_workers
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.adjoint_order import is_inexact
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.tie import tie
from distdl_jax.tracing.traced import Traced
from distdl_jax.transforms.gradients import all_workers
from distdl_jax.transforms.opaque_call import evaluate_opaquely
from distdl_jax.transports.agreement import agree, shape_dtype_of
from distdl_jax.validation import check_function


def total(part: Callable[..., Any], P: Partition | None = None) -> Callable[..., Any]:
    r"""Return a function with the whole value, and the whole gradient, on every worker: the sum of the workers' parts.

    Samplers and minimisers (blackjax, numpyro, optimistix, jaxopt, scipy, ...) call `jax.grad` of a log density or an
    objective themselves, and take decisions by its value. With the parameters theta on all workers, and the data split,

        total(part, P)(theta) = \sum_w part_w(theta)        on every worker w of P, bit for bit the same

    and so are its derivatives with respect to theta: `jax.grad`, `jax.value_and_grad`, `jax.vjp`, `jax.jacrev`, and
    these of each other. So all workers take the same steps, those of plain JAX on all of the data. Forward mode is
    `dj.jvp`; products with the Hessian are `dj.hvp`.

    One sum over workers in the forward pass, of the value; one in the backward pass, of the gradient.

    **Arguments:**

    - `part`: this worker's share of the sum, of `theta` and anything else: a scalar, or a tree of numbers and arrays,
      each of which is summed. 0 on a worker without data. It may move data (layers, `dj.functional`). What is to count
      once, such as a prior, belongs outside: `lambda theta: prior(theta) + total(theta)`.
    - `P`: the workers, all of which must call it. Default: all of the world.

    **Returns:** a function of `(theta, *args, **kwargs)`. `theta`: a tree of arrays, equal on all workers; whatever is
    differentiated or mapped by `jax.vmap` belongs into it, not into the closure of `part`. The other arguments are this
    worker's own. Like `jax.jit`, it traces `part`.

    **Raises:** `InvalidTypeError` if `part` is not a function, or `P` not a partition. When called, `PlanError`, on all
    workers, if theta, or the trees of results, differ in structure, shape or dtype; `InvalidArgumentError` outside P,
    and in what `dj.grad` or `dj.value_and_grad` differentiates or another total adds up, which sum over workers, too.

    >>> import jax, jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition()
    ...     data = jnp.arange(2.0) + 2 * P.rank
    ...     log_density = dj.total(lambda theta: -jnp.sum((data - theta) ** 2), P)
    ...     value, gradient = jax.value_and_grad(log_density)(1.0)
    ...     return float(value), float(gradient)
    >>> dj.simulate(2, program)
    [(-6.0, 4.0), (-6.0, 4.0)]

    Source: Hewett and Grady (2020): sum and copy are adjoint; here of copies that count once.
    """
    check_function("part", part)
    check_workers("P", P)

    @wraps(part)
    def whole(theta: Any, *args: Any, **kwargs: Any) -> Any:
        name, workers = function_name(part), all_workers() if P is None else P
        if not workers.active:
            raise InvalidArgumentError(
                f"dj.total of {name} was called on worker {workers.world.rank}, which is not in `P` "
                f"({workers.describe()}). All workers of P call it, and no other; a worker without data can be in P, "
                "with a `part` of 0."
            )
        if trace_context.adds_up:
            raise InvalidArgumentError(
                f"dj.total of {name} is the sum over workers already, but is called in a function whose results "
                f"{trace_context.adds_up} adds up over workers. There call `part` itself; or use jax.value_and_grad "
                "of the total."
            )
        theta = jax.tree.map(jnp.asarray, theta)
        parts = _parts(part, share(theta, workers), args, kwargs, workers)
        return _summed(f"dj.total of {name} on {workers.describe()}", parts, workers)

    return whole


def _parts(
    part: Callable[..., Any], theta: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], workers: Partition
) -> Any:
    """Return this worker's part as a tree of arrays; all workers differentiate the same movements, and map the same."""
    mapped = [x for x in jax.tree.leaves((args, kwargs)) if mapped_sizes(x)]

    def varying(theta: Any) -> Any:
        on = [*filter(is_inexact, jax.tree.leaves(theta)), *mapped]
        return jax.tree.map(lambda y: tie(jnp.asarray(y), *on), part(theta, *args, **kwargs))

    with trace_context.set(adds_up="dj.total"):
        traced = Traced(varying, (theta,), {}, (0,))
    return traced.result(evaluate_opaquely(workers.world.transport, traced.program, jax.tree.leaves(theta)))


def _summed(name: str, parts: Any, workers: Partition) -> Any:
    """Return the sums of the workers' trees, in dtypes of arrays: Python's numbers have those of other workers."""
    leaves, structure = jax.tree.flatten(parts)

    def described() -> tuple[str, list[tuple[ShapeDtype, bool]]]:
        weak = [bool(jax.typeof(leaf).weak_type) for leaf in leaves]
        return str(structure), [(shape_dtype_of("part", leaf), w) for leaf, w in zip(leaves, weak, strict=True)]

    of_worker = agree(workers.world, workers.ranks, name, described)
    first, *others = workers.ranks
    for other in others:
        (one, ones), (two, twos) = of_worker[first], of_worker[other]
        if one != two or any(a.shape != b.shape for (a, _), (b, _) in zip(ones, twos, strict=True)):
            shown = [", ".join(str(block) for block, _ in blocks) or "nothing" for blocks in (ones, twos)]
            raise PlanError(
                f"{name}: `part` must return the same tree, of equal shapes, on all workers, but returns {shown[0]} "
                f"({one}) on worker {first}, and {shown[1]} ({two}) on worker {other}."
            )

    def summed(place: int, x: Array) -> Array:
        kinds = [of_worker[worker][1][place] for worker in workers.ranks]
        dtypes = {str(block.dtype) for block, weak in kinds if not weak} or {str(block.dtype) for block, _ in kinds}
        x = jax.lax.convert_element_type(x, jnp.result_type(*sorted(dtypes)))
        return x if workers.size == 1 else total_of_blocks(x, workers)

    return jax.tree.unflatten(structure, [summed(place, x) for place, x in enumerate(leaves)])

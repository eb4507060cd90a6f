"""Words inside of a distributed function: `dj.constrain` a value's layout, and give a function a rule of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from distdl_jax.distribute.interpreter import Site, rule
from distdl_jax.distribute.layouts import trimmed
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.text import quoted
from distdl_jax.validation import check_function


def constrain(x: Array, spec: TensorSpec) -> Array:
    """Lay a whole value of a distributed function out as `spec` says; elsewhere return `x`.

    Its cotangent is laid out alike. A dimension of `jax.vmap` around it is not cut.

    **Arguments:**

    - `x`: an array, inside of a function that `dj.distribute` distributes.
    - `spec`: of the same workers as the function's specs, on a grid that has a common refinement with theirs.

    **Returns:** `x`.

    **Raises:** `InvalidTypeError` if `spec` is no TensorSpec; `InvalidArgumentError` if it has another shape.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition()
    ...     rows, columns = dj.TensorSpec((4, 4), P.grid([2, 1])), dj.TensorSpec((4, 4), P.grid([1, 2]))
    ...     f = dj.distribute(lambda x: dj.constrain(x + 1, columns), (rows,), dj.BLOCKS)
    ...     return f(rows.block(jnp.zeros((4, 4)))).shape
    >>> dj.simulate(2, program)
    [(4, 2), (4, 2)]
    """
    if not isinstance(spec, TensorSpec):
        raise InvalidTypeError(f"`spec` (={quoted(spec)}) must be a TensorSpec.")
    if tuple(x.shape) != spec.global_shape:
        raise InvalidArgumentError(f"`x` has the shape {tuple(x.shape)}, but `spec` is {spec.describe()}.")
    return _constrain.bind(x, spec=spec, mapped=0)


_constrain = Primitive("constrain")
_constrain.def_impl(lambda x, **_: x)
_constrain.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_constrain, lambda context, x, **_: [x])
ad.deflinear2(_constrain, lambda dy, x, **params: [_constrain.bind(dy, **params)])


def _batched(args: Sequence[Any], dims: Sequence[int], *, spec: TensorSpec, mapped: int) -> tuple[Any, int]:
    x = batching.bdim_at_front(args[0], dims[0], args[0].shape[dims[0]])
    return _constrain.bind(x, spec=spec, mapped=mapped + 1), 0


batching.primitive_batchers[_constrain] = _batched


@rule("constrain")
def _constrained(site: Site, x: Tensor) -> Tensor:
    cut = trimmed((*((),) * site.params["mapped"], *site.mesh.raw_cut_of(site.params["spec"])), x.shape)
    return site.value(x.at(cut), cut)


def with_rule(function: Callable[..., Any], how: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which in a distributed function is computed on blocks by a rule of its own.

    Its derivatives, and `jax.vmap` of it, are those of the plain function, whose primitives have their own rules.

    **Arguments:**

    - `function`: of arrays, by position, that returns an array, or a pytree of arrays.
    - `how`: `how(site, *values)`, as a rule of a primitive: it returns a value, or a list of the results' leaves. A
      value has `shape`, `dtype` and `cut` (for each dimension, the axes of the workers' grid that cut it), and
      `at(cut)`, this worker's block. `site.value(block, cut)` makes one.

    **Returns:** a function like `function`.

    **Raises:** `InvalidTypeError` if one of the two is not a function.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> double = dj.with_rule(lambda x: 2 * x, lambda site, x: site.value(2 * x.at(x.cut), x.cut))
    >>> double(jnp.arange(3)).tolist()
    [0, 2, 4]
    """
    check_function("function", function)
    check_function("how", how)

    @wraps(function)
    def ruled(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        results: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            found, structure = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
            results.append(structure)
            return found

        closed = jax.make_jaxpr(flat)(*leaves)
        return jax.tree.unflatten(results[-1], _ruled.bind(*leaves, closed=closed, how=how))

    return ruled


_ruled = Primitive("with_rule")
_ruled.multiple_results = True


def _plain(*args: Any, closed: ClosedJaxpr, how: Any) -> list[Any]:
    return list(jaxpr_as_fun(closed)(*args))


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], *, closed: ClosedJaxpr, how: Any) -> Any:
    tangents = [ad.instantiate_zeros(dx) for dx in tangents]
    return jax.jvp(jaxpr_as_fun(closed), tuple(primals), tuple(tangents))


def _mapped(args: Sequence[Any], dims: Sequence[Any], *, closed: ClosedJaxpr, how: Any) -> Any:
    results = jax.vmap(jaxpr_as_fun(closed), list(dims))(*args)
    return results, [0] * len(results)


_ruled.def_impl(_plain)
_ruled.def_abstract_eval(lambda *args, closed, how: closed.out_avals)
mlir.register_lowering(_ruled, mlir.lower_fun(_plain, multiple_results=True))
ad.primitive_jvps[_ruled] = _differentiated
batching.primitive_batchers[_ruled] = _mapped


@rule("with_rule")
def _by_its_rule(site: Site, *xs: Tensor) -> Any:
    return site.params["how"](site, *xs)

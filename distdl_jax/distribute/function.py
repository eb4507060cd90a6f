"""`dj.distribute`: a function of whole arrays, as a function of this worker's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from distdl_jax.distribute import marks, rules  # noqa: F401  they register rules
from distdl_jax.distribute.digests import combined, difference, equation_digests, settings_digest, static_digest
from distdl_jax.distribute.doors import CLOSED_OVER, by_argument, is_floating, undifferentiated, variables
from distdl_jax.distribute.interpreter import Run, as_weak
from distdl_jax.distribute.layouts import Mesh, axes_in, trimmed, uncut
from distdl_jax.distribute.meanings import (
    Meaning,
    Spec,
    check_specs,
    is_spec,
    per_leaf,
    spec_text,
    tensor_spec,
    wanted_cut,
)
from distdl_jax.distribute.movements import Movements
from distdl_jax.distribute.mutation import refuse_mutation
from distdl_jax.distribute.plan import Plan
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.distribute.whole_values import compare_while_running, refuse_different, whole_digests
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.jax_compat import without_dead_equations
from distdl_jax.partitions.tensors import TensorSpec, zero_volume_tensor
from distdl_jax.source_lines import function_name
from distdl_jax.text import bytes_text
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.jaxprs import equations
from distdl_jax.tracing.marks import part_of_sum
from distdl_jax.transforms.any_leaves import is_array
from distdl_jax.transports.agreement import agree
from distdl_jax.validation import check_function, checked_integer


def distribute(
    f: Callable[..., Any], in_specs: Any, out_specs: Any = None, *, gather: int | None = 2**20
) -> Distributed:
    """Return a function of this worker's blocks that computes `f`, which is written for whole arrays.

    `f` is traced once on the shapes of the whole arrays, and its program is evaluated on blocks: each of JAX's
    primitives by a rule, which fetches what a worker's block needs of other blocks. So a network of Flax, Equinox or
    Haiku, its loss, `jax.value_and_grad` and an update of optax are distributed as they are written. All workers of the
    specs get what a single process would compute, whatever the sizes of the blocks.

    **Arguments:**

    - `f`: an ordinary JAX function of arrays and pytrees. Leaves that aren't arrays are passed on as they are.
    - `in_specs`: a pytree, or a prefix of one, with a spec for each argument: a `TensorSpec` (this worker passes its
      block), None (the whole value, the same on all workers), `dj.VARIABLE` or `dj.COPIES` (the same, if derivatives
      are taken outside of `f`).
    - `out_specs`: likewise for the results: a `TensorSpec` or `dj.BLOCKS` (this worker's block), None (the whole value,
      the same on all workers), and for derivatives outside of `f`: `dj.PARTS` (of a loss, this worker's term) or
      `dj.COPIES`. Default: None.
    - `gather`: a primitive that can't work on blocks is computed on whole arrays by every worker, if its operands have
      at most so many bytes; and a whole result is gathered up to so many. 0: never; None: without a limit.

    **Returns:** a function of the same arguments, by position. `f.plan(*args)` shows what moves, and
    `f.output_specs(*args)` how results fall. Calls are collective among the workers of the specs, which agree on the
    program once for each trace. Other workers pass anything, and get zero-volume arrays.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError` if a spec is none, or doesn't fit; when it is called,
    `PlanError`, on all workers, if their programs differ, or a primitive can't work on blocks: with its line.

    >>> import jax, jax.numpy as jnp, distdl_jax as dj
    >>> def step(w, x):  # ordinary JAX
    ...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((w * x) ** 2))(w)
    ...     return w - 0.1 * gradient, loss
    >>> def program():
    ...     spec = dj.TensorSpec((5,), dj.Partition().grid([2]))
    ...     w, loss = dj.distribute(step, (None, spec))(jnp.float32(1), spec.block(jnp.arange(5.0)))
    ...     return round(float(w), 3), float(loss)
    >>> dj.simulate(2, program)
    [(-0.2, 6.0), (-0.2, 6.0)]
    """
    check_function("f", f)
    check_specs("in_specs", in_specs)
    check_specs("out_specs", out_specs)
    limit = None if gather is None else checked_integer("gather", gather, 0)
    return Distributed(f, in_specs, out_specs, limit)


@dataclass(frozen=True)
class _Traced:
    """A function's program on whole arrays.

    - `leaves`: the arguments' leaves; `arrays`: the numbers of those that are arrays, with their `specs`.
    - `shapes`: of the whole arrays. `results`: the tree of results, `statics` those of its leaves that aren't arrays.
    """

    mesh: Mesh
    leaves: list[Any]
    arrays: list[int]
    specs: list[Spec]
    paths: list[str]
    shapes: list[jax.ShapeDtypeStruct]
    closed: ClosedJaxpr
    results: Any
    statics: dict[int, Any]
    out_specs: list[Spec]

    def filled(self, results: Sequence[Any]) -> Any:
        """Return the tree of results, from those of its leaves that are arrays."""
        given = iter(results)
        leaves = [self.statics[n] if n in self.statics else next(given) for n in range(self.results.num_leaves)]
        return jax.tree.unflatten(self.results, leaves)


class Distributed:
    """A function of whole arrays, as a function of this worker's blocks; made by `dj.distribute`."""

    takes_any_leaves = True
    """For `dj.jit`: leaves that aren't arrays are part of the program's key."""

    def __init__(self, f: Callable[..., Any], in_specs: Any, out_specs: Any, gather: int | None) -> None:
        self.f, self.in_specs, self.out_specs, self.gather = f, in_specs, out_specs, gather
        update_wrapper(self, f, assigned=("__name__", "__qualname__", "__module__", "__doc__"), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return this worker's results, given its blocks."""
        if kwargs:
            raise InvalidArgumentError(
                f"A distributed function takes its arguments by position, but got {', '.join(sorted(kwargs))} by name: "
                "specs have an order."
            )
        if trace_context.whole_program:  # of another distributed function, which distributes it too
            return self.f(*args)
        traced = self._agreed(args)
        outs = [out.aval for out in traced.closed.jaxpr.outvars]
        if traced.mesh.index is None:
            return traced.filled([_nothing(spec, out) for spec, out in zip(traced.out_specs, outs, strict=True)])
        movements, leaves = Movements(traced.mesh), [traced.leaves[n] for n in traced.arrays]
        compare_while_running(movements, traced.paths, traced.specs, leaves)
        tensors = self._evaluated(traced, movements)
        results = enumerate(zip(tensors, traced.out_specs, outs, strict=True))
        return traced.filled([self._given_back(n, y, spec, out) for n, (y, spec, out) in results])

    def output_specs(self, *args: Any) -> Any:
        """Return the `TensorSpec` of each result as it falls, which `dj.BLOCKS` gives. There is no communication.

        `args`: as for a call; `jax.ShapeDtypeStruct`s will do.
        """
        traced = self._trace(args)
        return traced.filled([traced.mesh.spec_of(y.shape, y.readable()) for y in self._dry(traced)[1]])

    def plan(self, *args: Any) -> Plan:
        """Return what this worker sends in a call, line by line of the program. There is no communication.

        `args`: as for a call; `jax.ShapeDtypeStruct`s will do.
        """
        return Plan(tuple(self._dry(self._trace(args))[0].moved))

    def _dry(self, traced: _Traced) -> tuple[Movements, list[Tensor]]:
        """Evaluate the program on shapes alone."""
        movements = Movements(traced.mesh, notes=True)
        found: list[Tensor] = []

        def run(arrays: list[Any]) -> None:
            leaves = list(traced.leaves)
            for n, array in zip(traced.arrays, arrays, strict=True):
                leaves[n] = array
            found.extend(self._evaluated(_with_leaves(traced, leaves), movements))
            for n, (y, spec) in enumerate(zip(found, traced.out_specs, strict=True)):
                self._given_back(n, y, spec, None)

        with trace_context.set(anchors=None):
            jax.eval_shape(run, [_shape_of(traced.leaves[n]) for n in traced.arrays])
        return movements, found

    # --- the program --------------------------------------------------------------------------------------------------

    def _agreed(self, args: tuple[Any, ...]) -> _Traced:
        """Trace the function, and agree with the other workers that their programs are the same."""
        partition = next(self._partitions(), None)
        if partition is None or partition.size == 1 or not partition.active:
            return self._trace(args)
        world, name = partition.world, function_name(self.f)
        traced, failure, digests, values = None, None, [("", "")], {}
        try:
            traced = self._trace(args)
            digests = self._digests(traced)
            values = whole_digests(traced.paths, traced.specs, [traced.leaves[n] for n in traced.arrays])
        except Exception as error:
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        team = tuple(partition.ranks)
        found = agree(world, team, f"the program of {name}", lambda: (text, combined(digests), values))
        if failure is not None:
            raise failure
        failed = {worker: text for worker, (text, *_) in found.items() if text is not None}
        if failed:
            worker = min(failed)
            raise PlanError(f"On worker {worker}, {name} raised {failed[worker]}")
        if len({digest for _, digest, _ in found.values()}) > 1:
            lists = agree(world, team, f"the equations of {name}", lambda: digests)
            raise PlanError(difference(name, lists))
        refuse_different({worker: values for worker, (_, _, values) in found.items()})
        assert traced is not None
        return traced

    def _partitions(self) -> Iterator[Any]:
        for tree in (self.in_specs, self.out_specs):
            for spec in jax.tree.leaves(tree, is_leaf=is_spec):
                found = tensor_spec(spec) if is_spec(spec) else None
                if found is not None:
                    yield found.partition

    def _digests(self, traced: _Traced) -> list[tuple[str, str]]:
        described = [spec_text(spec) for spec in (*traced.specs, *traced.out_specs)]
        arrays = set(traced.arrays)
        statics = [static_digest(leaf) for n, leaf in enumerate(traced.leaves) if n not in arrays]
        first = combined([(text, "") for text in (*described, *traced.paths, str(self.gather), *statics)])
        specs = first, "the specs, `gather` or an argument that is no array"
        return [settings_digest(), specs, *equation_digests(traced.closed)]

    def _trace(self, args: tuple[Any, ...]) -> _Traced:
        specs = self._specs_of(args)
        paths_and_leaves, tree = jax.tree.flatten_with_path(args)
        leaves = [leaf for _, leaf in paths_and_leaves]
        arrays = [n for n, leaf in enumerate(leaves) if is_array(leaf)]
        paths = [f"args{jax.tree_util.keystr(path)}" for path, _ in paths_and_leaves]
        partitions = list(self._partitions())
        shapes = [_whole_shape(paths[n], leaves[n], specs[n]) for n in arrays]
        statics: dict[int, Any] = {}
        structure: list[Any] = []

        def of_arrays(*values: Any) -> list[Any]:
            given = dict(zip(arrays, values, strict=True))
            own = jax.tree.unflatten(tree, [given.get(n, leaf) for n, leaf in enumerate(leaves)])
            found, of_results = jax.tree.flatten(self.f(*own))
            refuse_mutation(self.f, own, list(values), found)
            structure.append(of_results)
            statics.update({n: leaf for n, leaf in enumerate(found) if not is_array(leaf)})
            return [leaf for leaf in found if is_array(leaf)]

        with trace_context.set(anchors=None, whole_program=True):
            closed = without_dead_equations(jax.make_jaxpr(of_arrays)(*shapes))
        specs_inside = [eqn.params["spec"] for eqn in equations(closed.eqns) if eqn.primitive.name == "constrain"]
        partitions += [spec.partition for spec in specs_inside]
        if not partitions:
            raise InvalidArgumentError(
                "`in_specs` must hold a TensorSpec: its partition says which workers there are. (For a whole result "
                "that needs none, call the function itself.)"
            )
        mesh = Mesh(partitions)
        results = structure[-1]
        numbered = jax.tree.unflatten(results, range(results.num_leaves))
        out = per_leaf("out_specs", self.out_specs, numbered)
        result_specs = [spec for n, spec in enumerate(out) if n not in statics]
        array_specs = [specs[n] for n in arrays], [paths[n] for n in arrays]
        return _Traced(mesh, leaves, arrays, *array_specs, shapes, closed, results, statics, result_specs)

    def _specs_of(self, args: tuple[Any, ...]) -> list[Spec]:
        given = self.in_specs
        if isinstance(given, tuple | list) and len(given) != len(args):
            raise InvalidArgumentError(
                f"`in_specs` (of {len(given)}) must hold a spec for each argument, but there are {len(args)}."
            )
        return per_leaf("in_specs", tuple(given) if isinstance(given, tuple | list) else given, args)

    # --- arguments and results ----------------------------------------------------------------------------------------

    def _evaluated(self, traced: _Traced, movements: Movements) -> list[Tensor]:
        mesh, args = traced.mesh, []
        summed: list[int] = []
        for place, (n, spec, whole) in enumerate(zip(traced.arrays, traced.specs, traced.shapes, strict=True)):
            x, found = jnp.asarray(traced.leaves[n]), tensor_spec(spec)
            cut = uncut(whole.shape) if found is None else mesh.raw_cut_of(found)
            has_copies = bool(mesh.axes - axes_in(cut))
            if is_floating(x):
                if isinstance(spec, Meaning) and spec.name == "VARIABLE":
                    summed.append(place)
                elif (spec is None or isinstance(spec, TensorSpec)) and (found is None or has_copies):
                    x = undifferentiated(by_argument(traced.paths[place], found), x)
            # A cut dimension of length 1 is on one worker: all get it here, since later nothing of that length is cut.
            short = [d for d, size in enumerate(whole.shape) if size == 1 and cut[d]]
            x, cut = movements.gathered(x, whole.shape, cut, short)
            args.append(Tensor(movements, whole.shape, whole.dtype, cut, x))
        if summed:  # together, so that their gradients are summed in one movement
            axes = [mesh.axes - axes_in(args[place].cut) for place in summed]
            copies = variables(movements, axes, [args[place].at(args[place].cut) for place in summed])
            for place, x in zip(summed, copies, strict=True):
                args[place] = Tensor(movements, args[place].shape, args[place].dtype, args[place].cut, x)
        run, outs = Run(movements, self.gather), traced.closed.out_avals
        wanted = [wanted_cut(mesh, out, spec) for out, spec in zip(outs, traced.out_specs, strict=True)]
        consts = [self._closed_over(x) for x in traced.closed.consts]
        results = run.evaluate(traced.closed.jaxpr, consts, args, wanted)
        movements.asked_by = "", "results"
        run.settle_together([y for y, spec in zip(results, traced.out_specs, strict=True) if spec is None])
        return results

    def _given_back(self, n: int, y: Tensor, spec: Spec, out: Any) -> Any:
        mesh, movements = y.mesh, y.movements
        movements.asked_by = "", f"result {n}"
        if isinstance(spec, Meaning) and spec.name == "PARTS":
            if not jnp.issubdtype(y.dtype, jnp.floating):
                raise InvalidArgumentError(
                    f"Result {n} is {y.dtype}, but dj.PARTS are the terms of a sum: of a real floating dtype."
                )
            return part_of_sum(as_weak(y.terms(uncut(y.shape), mesh.axes), out))
        if isinstance(spec, Meaning) and spec.name == "BLOCKS":
            cut = y.readable()
            x = y.at(cut)
            return as_weak(self._with_copies(n, x, mesh.axes - axes_in(cut)), out)
        if isinstance(spec, TensorSpec):
            if spec.global_shape != y.shape:
                raise InvalidArgumentError(
                    f"Result {n} has the shape {y.shape}, but its spec in `out_specs` says {spec.global_shape}."
                )
            cut = mesh.raw_cut_of(spec)
            x = movements.cut_again(y.at(cut), y.shape, trimmed(cut, y.shape), cut)
            return as_weak(self._with_copies(n, x, mesh.axes - axes_in(cut)), out)
        if any(y.cut) and not y.is_lazy and self.gather is not None and y.bytes > self.gather:
            raise PlanError(
                f"Result {n}, {y.dtype}{list(y.shape)}, is cut among the workers: as a whole, {bytes_text(y.bytes)} "
                "would be gathered on each, more than `gather` allows. Its spec in `out_specs` may be a TensorSpec, or "
                "dj.BLOCKS."
            )
        x = y.whole()
        return as_weak(self._refusing(n, x) if spec is None else x, out)

    def _with_copies(self, n: int, x: Any, axes: frozenset[int]) -> Any:
        return self._refusing(n, x) if axes else x

    def _closed_over(self, x: Any) -> Any:
        """Return a constant of the program. It is a whole value, too: only a traced one can be differentiated."""
        if not (isinstance(x, jax.core.Tracer) and is_floating(x)):
            return x
        return undifferentiated(CLOSED_OVER.format(jax.typeof(x).str_short()), x)

    @staticmethod
    def _refusing(n: int, x: Any) -> Any:
        if not is_floating(x):
            return x
        return undifferentiated(
            f"A derivative is taken from outside of a distributed function, through its result {n}, of which all "
            "workers have copies: it is unclear whether they count once or each. Take the derivative inside of the "
            "function, or give the result dj.PARTS in `out_specs` (a loss: the workers' terms of one value), or "
            "dj.COPIES (each copy counts). What isn't part of the loss may pass jax.lax.stop_gradient.",
            jnp.asarray(x),
        )


def _nothing(spec: Spec, out: Any) -> Any:
    """Return the result of a worker outside of the specs' partition."""
    found = tensor_spec(spec)
    return zero_volume_tensor(dtype=out.dtype) if found is None else zero_volume_tensor(like=found, dtype=out.dtype)


def _with_leaves(traced: _Traced, leaves: list[Any]) -> _Traced:
    return _Traced(**{**vars(traced), "leaves": leaves})


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    x = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def _whole_shape(path: str, leaf: Any, spec: Spec) -> jax.ShapeDtypeStruct:
    """Return the type of the whole array; reject a block of another shape."""
    x, found = _shape_of(leaf), tensor_spec(spec)
    if found is None:
        return x
    if x.shape != found.local_shape and found.partition.active:
        whole = (
            " That is the whole array: pass this worker's block, spec.block(x)."
            if x.shape == found.global_shape
            else ""
        )
        raise InvalidArgumentError(
            f"`{path}` has the shape {x.shape}, but this worker's block of {found.describe()} has {found.local_shape}."
            f"{whole}"
        )
    return jax.ShapeDtypeStruct(found.global_shape, x.dtype, weak_type=x.weak_type)

"""Two mistakes with copies that give wrong numbers without an error, detected while a program is traced.

- A loss that is the same on all workers, because it results from a sum over them, counts once for each.
- A replicated parameter that is updated from the gradient of a worker's own copy drifts apart.

Each is reported as a `CopiesWarning` if the program and its arguments prove it. Nothing is reported for a user's factor
that may be the number of copies, a gradient that is summed later, or blocks that happen to be equal.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from hashlib import blake2b
from itertools import chain, count
from operator import or_
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from distdl_jax.jax_compat import source_frames
from distdl_jax.source_lines import is_library
from distdl_jax.tracing.adjoint_order import anchor_of, is_inexact
from distdl_jax.tracing.jaxprs import Branches, DataFlow, structure
from distdl_jax.tracing.known_values import know_same
from distdl_jax.tracing.marks import copies_left_by, identity, is_start_of_movement
from distdl_jax.tracing.program_reader import line_of_equation
from distdl_jax.transports.world import Workers

_MEANT = "If it is intended, warnings.simplefilter('ignore', dj.CopiesWarning) turns this off."


# --- losses -----------------------------------------------------------------------------------------------------------


class Sum(NamedTuple):
    """Knowledge about a value: a function only of sums over the workers of `team`, each of which has a copy.

    - `team`: () for a worker's own values. `line`: the source line of the sum over workers.
    - `divisor`: the user's divisor, apart from means; None if the value may have been scaled by anything.
    - `elements`: the number of summed entries of this worker's blocks; `lengths`: of their dimensions.
    - `is_constant`: whether it depends on no argument. `is_scalar`: whether it is one number, possibly repeated.
    - `is_scaled`: whether it was multiplied or divided by a number since the last nonlinear function.
    """

    team: Workers = ()
    divisor: float | None = 1.0
    elements: int = 1
    lengths: tuple[int, ...] = ()
    line: str = ""
    is_constant: bool = False
    is_scalar: bool = False
    is_scaled: bool = False


_UNKNOWN = Sum(divisor=None)
_KEEPS = {
    *("reshape", "squeeze", "expand_dims", "transpose", "rev", "copy", "copy_p", "convert_element_type"),
    *("neg", "reverse_only", "reduce_precision", "stop_gradient"),
}
_SCALES = ("mul", "div")
_ADDS = ("add", "sub", "add_any")
_PRODUCTS = ("mul", "div", "dot_general", "conv_general_dilated")
_NONLINEAR = {
    *("integer_pow", "pow", "square", "sqrt", "rsqrt", "cbrt", "exp", "exp2", "log", "expm1", "log1p", "tanh"),
    *("logistic", "erf", "erfc", "sin", "cos"),
}
_ORDERS = {"abs", "max", "min", "reduce_max", "reduce_min", "slice", "dynamic_slice", "gather", "cumsum", "sort"}
_CHOOSES = ("select_n", "while", "custom_linear_solve", "random_bits", "iota", "pure_callback", "io_callback")


def copied_loss(jaxpr: Any) -> Sum | None:
    """Return the first result of a traced program, if it is a loss of copies; None if that is not certain."""
    loss = jaxpr.outvars[0]
    if isinstance(loss, Literal) or loss.aval.shape != ():
        return None
    fact = _Sums().run(jaxpr, [Sum(is_scalar=var.aval.shape == ()) for var in jaxpr.invars])[0]
    return fact if fact.team and fact.divisor is not None else None


def copied_loss_text(name: str, losses: Mapping[int, Sum | None]) -> str | None:
    """Return the warning about a loss that is the same on all workers of a team; None if some worker's is not."""
    for loss in filter(None, losses.values()):
        of_team = [losses.get(worker) for worker in loss.team]
        if len(loss.team) > 1 and all(other is not None and other.team == loss.team for other in of_team):
            elements = sum(other.elements for other in of_team if other is not None)
            lengths = [length for other in of_team if other is not None for length in other.lengths]
            p = len(loss.team)
            if loss.divisor == 1 or _is_mean(loss.divisor or 1, elements, p, lengths):
                return (
                    f"{name} returns the same loss on {p} workers: it results from the sum over workers at "
                    f"{loss.line or 'an unknown line'}. The workers' losses are added up, so it counts {p} times, in "
                    "the value and in the gradient. Return this worker's part, from before the sum, or divide the "
                    f"loss by {p}, the number of copies. {_MEANT}"
                )
    return None


def _is_mean(divisor: float, elements: int, workers: int, lengths: Sequence[int]) -> bool:
    """Return whether a divisor is the number of summed entries, and can't be another one times the number of copies.

    It could if some of the summed dimensions have as many entries as there are copies.
    """
    if elements == workers or not math.isclose(divisor, elements, rel_tol=1e-6):
        return False
    return not any(length > 1 and workers % length == 0 for length in lengths)


class _Sums(DataFlow[Sum]):
    """Follows sums over workers to the loss, and the numbers by which they are multiplied."""

    of_literals = of_constants = Sum(is_constant=True)
    unknown = _UNKNOWN

    def __init__(self) -> None:
        self._moved = _UNKNOWN  # the inputs of the current movement

    def equation(self, eqn: Any, args: list[Sum]) -> list[Sum]:
        name = eqn.primitive.name
        if (copies := copies_left_by(eqn)) is not None:
            before, line = self._moved, line_of_equation(eqn)
            known = copies and before.divisor is not None and not before.is_constant and not before.team
            return [before._replace(team=copies, line=line) if known else _UNKNOWN]
        if is_start_of_movement(eqn):
            self._moved = args[0]
        if name == "optimization_barrier":
            return args
        if name == "tie" or name in _KEEPS:
            return [args[0]]
        if structure(eqn) is not None and not isinstance(structure(eqn), Branches):
            return self.through_bodies(eqn, args) or [_UNKNOWN] * len(eqn.outvars)
        if eqn.effects or name in _CHOOSES or structure(eqn) is not None:
            return [_UNKNOWN] * len(eqn.outvars)
        if args and all(arg.is_constant for arg in args):
            return [args[0]] * len(eqn.outvars)
        return [self._value(eqn, args)] * len(eqn.outvars)

    def join(self, one: Sum, other: Sum) -> Sum:
        return one if one == other else _UNKNOWN

    def _value(self, eqn: Any, args: list[Sum]) -> Sum:
        name = eqn.primitive.name
        varying = [arg for arg in args if not arg.is_constant]
        if name == "broadcast_in_dim":
            return args[0]._replace(is_scalar=args[0].is_scalar or not eqn.invars[0].aval.shape)
        if name == "reduce_sum":
            return _reduced(eqn, args[0])
        if name in _ADDS:
            return varying[0] if len(varying) == 1 or varying[0] == varying[1] else _UNKNOWN
        if name in _SCALES and (len(varying) == 1 or any(arg.is_scalar for arg in args)):
            return _scaled(eqn, args)
        is_product = name in _PRODUCTS and len(varying) == len(args)
        if name in _NONLINEAR or is_product:
            if not any(arg.team for arg in varying):
                # A number inside may be that of copies, as in a sum of squares of x / sqrt(n p). Arrays are data.
                divisor = None if all(arg.is_scaled for arg in varying) else 1.0
                return Sum(divisor=divisor, is_scalar=not eqn.outvars[0].aval.shape)
            # E.g. not of a mean over workers.
            return varying[0] if not is_product and len(varying) == len(args) and varying[0].divisor == 1 else _UNKNOWN
        return varying[0] if len(varying) == 1 and name in _ORDERS else _UNKNOWN


def _reduced(eqn: Any, x: Sum) -> Sum:
    shape = eqn.invars[0].aval.shape
    lengths = tuple(shape[d] for d in eqn.params["axes"])
    is_scalar = not eqn.outvars[0].aval.shape
    return x._replace(elements=x.elements * math.prod(lengths), lengths=x.lengths + lengths, is_scalar=is_scalar)


def _scaled(eqn: Any, args: list[Sum]) -> Sum:
    """Return the knowledge about a value that is multiplied or divided by a number."""
    is_quotient = eqn.primitive.name == "div"
    if is_quotient and args[0].is_constant:
        return _UNKNOWN
    factor = 1 if args[1].is_constant else 0
    x, literal = args[1 - factor], eqn.invars[factor]
    if not args[factor].is_constant:  # two values, one of which is a number
        is_ratio = is_quotient and x.team == args[1].team != () and {x.divisor, args[1].divisor} == {1.0}
        return args[0]._replace(elements=1, lengths=()) if is_ratio else _UNKNOWN
    if is_quotient and x.elements > 1 and _is_of_mean(eqn):
        return x
    if not isinstance(literal, Literal) or np.ndim(literal.val) or not literal.val:
        return _UNKNOWN
    number = abs(complex(literal.val))
    if x.divisor is None:
        return x._replace(is_scaled=True)
    return x._replace(divisor=x.divisor * (number if is_quotient else 1 / number), is_scaled=True)


def _is_of_mean(eqn: Any) -> bool:
    """Return whether an equation divides by the number of entries in `jnp.mean`, or in `dj.functional.mean`."""
    traceback = eqn.source_info.traceback
    for frame in getattr(traceback, "frames", ()):
        if frame.function_name in ("mean", "_mean") and f"{os.sep}jax{os.sep}_src{os.sep}" in frame.file_name:
            return True
    frame = next(iter(source_frames(traceback)), None)
    return frame is not None and is_library(frame.file_name) and frame.file_name.endswith(f"{os.sep}reductions.py")


# --- parameters -------------------------------------------------------------------------------------------------------


class Drift(NamedTuple):
    """A parameter that a program updates from the gradient of this worker's own copy, and of its own data.

    - `parameter`: a digest of its value. `data`: of the gradient's dependencies without a movement between, by name.
    - `is_telling`: whether equal values imply a copy: not for a few numbers, or zeros and ones.
    """

    parameter: bytes
    data: dict[str, bytes]
    is_telling: bool


class _Update(NamedTuple):
    """Knowledge about a value.

    - `of`: the argument that it is, possibly scaled or updated; None for others. `is_updated`: from a gradient.
    - `own`: the arguments it depends on without a movement in between, as bits.
    - `gradients`: the arguments whose own gradients it depends on in this way, as bits.
    """

    of: int | None = None
    is_updated: bool = False
    own: int = 0
    gradients: int = 0


_numbers = count(1)
_differentiated = identity("differentiated")
_gradient = identity("gradient")


def marked(leaves: Any) -> tuple[Any, int]:
    """Return a tree to differentiate by, and its number, with which its gradient is to be marked."""
    number = next(_numbers)
    return _mark(_differentiated, leaves, number), number


def marked_gradient(gradient: Any, number: int) -> Any:
    """Return a gradient, marked in a traced program as that of the tree with this number."""
    return _mark(_gradient, gradient, number)


def _mark(primitive: Any, tree: Any, number: int) -> Any:
    def with_place(place: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tracer) or not is_inexact(leaf):
            return leaf
        marked_leaf = primitive.bind(leaf, of=(number, place))
        know_same(leaf, marked_leaf)
        return marked_leaf

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [with_place(place, leaf) for place, leaf in enumerate(leaves)])


def drifts(jaxpr: Any, names: Sequence[str], values: Sequence[Any]) -> dict[str, Drift]:
    """Return the parameters of a traced program that will drift apart if all workers hold the same values of them.

    - `names`, `values`: of the program's arguments. Missing arrays are not considered.
    """
    flow = _Updates()
    results = flow.run(jaxpr, [_Update(of=leaf, own=1 << leaf) for leaf in range(len(jaxpr.invars))])
    found: dict[str, Drift] = {}
    for leaf in sorted({fact.of for fact in results if fact.is_updated and fact.of is not None}):
        parameter = _digest(values[leaf])
        own = flow.own_data.get(leaf, 0) & ~(1 << leaf)
        data = {names[k]: _digest(value) for k, value in enumerate(values) if own >> k & 1} if parameter else {}
        if parameter is not None and data:
            digests = {name: digest for name, digest in data.items() if digest}
            found[names[leaf]] = Drift(parameter, digests, _is_telling(values[leaf]))
    return found


def drift_text(name: str, drifts: Mapping[int, Mapping[str, Drift]]) -> str | None:
    """Return the warning about a parameter of which workers hold equal copies, but with different updates.

    If another parameter differs between workers, each may have a separate model, or a part of one.
    """
    names = dict.fromkeys(chain.from_iterable(drifts.values()))
    everywhere = {name: [found[name] for found in drifts.values() if name in found] for name in names}
    different = {name for name, copies in everywhere.items() if len({copy.parameter for copy in copies}) > 1}
    for parameter, copies in everywhere.items():
        if len(copies) < 2 or different or not copies[0].is_telling:
            continue
        data = {key: {copy.data.get(key) for copy in copies} for key in copies[0].data}
        own = next((key for key, digests in data.items() if len(digests) > 1 and None not in digests), None)
        if own is not None:
            return (
                f"{name} updates `{parameter}`, of which {len(copies)} workers hold equal values, on each worker from "
                f"the gradient of its own values and its own `{own}`: after this call they differ. If they are copies "
                f"of one parameter, use dj.replicated(`{parameter}`, P) in the loss, which adds up the gradient over "
                f"the copies, or a layer with a spec. {_MEANT}"
            )
    return None


_SAMPLE = 4096


def _sampled(value: Any) -> np.ndarray | None:
    """Return some entries of an array; None if they are not available."""
    if isinstance(value, Tracer) or not hasattr(value, "dtype"):
        return None
    with suppress(TypeError, ValueError, RuntimeError):
        array = np.asarray(value).ravel()
        return array[:: max(1, array.size // _SAMPLE)] if array.size else None
    return None


def _digest(value: Any) -> bytes | None:
    """Return a digest of some entries of an array; None if they are not available."""
    sample = _sampled(value)
    return None if sample is None else blake2b(sample.tobytes(), digest_size=8).digest()


def _is_telling(parameter: Any) -> bool:
    """Return whether equal values of a parameter imply that it is a copy.

    Zeros, ones, an identity, or a few numbers may be blocks of a whole tensor; scalars can't be.
    """
    sample = _sampled(parameter)
    if sample is None or not np.ndim(parameter):
        return sample is not None
    different = np.unique(sample.astype(np.complex128)).size
    return different >= 8 and 2 * different > sample.size


class _Updates(DataFlow[_Update]):
    """Follows gradients of a worker's own copies to the parameters to which they are added."""

    of_literals = of_constants = unknown = _Update()

    def __init__(self) -> None:
        self._of_mark: dict[tuple[int, int], int] = {}
        self.own_data: dict[int, int] = {}

    def equation(self, eqn: Any, args: list[_Update]) -> list[_Update]:
        return [
            fact if var.aval.shape == () or math.prod(var.aval.shape) else _Update()
            for fact, var in zip(self._facts(eqn, args), eqn.outvars, strict=True)
        ]

    def join(self, one: _Update, other: _Update) -> _Update:
        of = one.of if one.of == other.of else None
        return _Update(of, one.is_updated or other.is_updated, one.own | other.own, one.gradients | other.gradients)

    def _facts(self, eqn: Any, args: list[_Update]) -> list[_Update]:
        name, nothing = eqn.primitive.name, [_Update()] * len(eqn.outvars)
        if anchor_of(eqn) is not None:
            return nothing
        if eqn.primitive is _differentiated and args[0].of is not None:
            self._of_mark[eqn.params["of"]] = args[0].of
        if eqn.primitive is _gradient:
            leaf = self._of_mark.get(eqn.params["of"])
            if leaf is None or not args[0].own:
                return args
            self.own_data[leaf] = self.own_data.get(leaf, 0) | args[0].own
            return [_Update(own=args[0].own, gradients=1 << leaf)]
        if name == "optimization_barrier":
            return args
        if name in _KEEPS or name in ("tie", "differentiated"):
            return [args[0]]
        if structure(eqn) is not None:
            facts = self.through_bodies(eqn, args)
            return nothing if facts is None else facts
        if eqn.effects or not args:
            return nothing
        own, gradients = (reduce(or_, bits) for bits in zip(*((arg.own, arg.gradients) for arg in args), strict=True))
        union = _Update(own=own, gradients=gradients)
        if name == "select_n":
            chosen = reduce(self.join, args[1:])
            return [union._replace(of=chosen.of, is_updated=chosen.is_updated)]
        if name in _SCALES and isinstance(eqn.invars[1], Literal):
            return [args[0]]
        if name == "mul" and isinstance(eqn.invars[0], Literal):
            return [args[1]]
        # The parameter plus its gradient, in either order; or the parameter minus it.
        for x, update in ([args] if name == "sub" else [args, args[::-1]]) if name in _ADDS else ():
            if x.of is not None and update.gradients >> x.of & 1:
                return [union._replace(of=x.of, is_updated=True)]
        return [union] * len(eqn.outvars)

"""Initial weights: the same global values for a key whatever the partition, with memory for the local block only.

An initializer, PyTorch's default or any of `jax.nn.initializers`, is a function of a key and the global shape. It is
traced for the global shape, which costs nothing, and then evaluated for the local block: random bits are made for the
block's own global indices (threefry counts elements, so each element's bits can be computed separately), followed by
elementwise operations. So a worker's block equals that slice of `initializer(key, global_shape, dtype)`, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.extend.random import threefry_2x32
from jax.tree_util import keystr
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.jax_compat import bound_again
from distdl_jax.partitions.spec_trees import is_spec, specs_by_path
from distdl_jax.partitions.tensors import TensorSpec, check_spec, zero_volume_tensor
from distdl_jax.plans.decomposition import Box, box_shape
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.settings import current_settings
from distdl_jax.tracing.jaxprs import Call, evaluate, structure
from distdl_jax.tracing.traced import one_program
from distdl_jax.transports.agreement import agree
from distdl_jax.validation import check_key, checked_dtype, difference

Initializer = Callable[[Array, Sequence[int], DTypeLike], Array]

_ELEMENTWISE = frozenset(
    {"abs", "add", "add_any", "and", "bitcast_convert_type", "clamp", "complex", "convert_element_type", "copy", "cos"}
    | {"div", "eq", "erf", "erf_inv", "exp", "exp2", "expm1", "ge", "gt", "imag", "integer_pow", "is_finite", "le"}
    | {"log", "log1p", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real", "rem", "round"}
    | {"rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sqrt"}
    | {"square", "stop_gradient", "sub", "tan", "tanh", "xor"}
)


@dataclass(frozen=True)
class UniformFanIn:
    """PyTorch's default for linear and convolution layers: uniform in ±1/sqrt(fan_in), imaginary parts too."""

    fan_in: int

    def __call__(self, key: Array, shape: Sequence[int], dtype: DTypeLike) -> Array:
        bound = 1.0 / math.sqrt(self.fan_in) if self.fan_in else 0.0
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            return jax.random.uniform(key, tuple(shape), dtype, -bound, bound)
        real = jnp.finfo(dtype).dtype
        parts = (jax.random.uniform(part, tuple(shape), real, -bound, bound) for part in jax.random.split(key))
        return jax.lax.complex(*parts)


@partial(jax.jit, static_argnums=(0, 2, 3, 4))
def initialize_block(
    initializer: Initializer, key: Array, global_shape: tuple[int, ...], box: Box, dtype: np.dtype
) -> Array:
    """Return the block `box` of `initializer(key, global_shape, dtype)`.

    Initializers that are not elementwise in random bits (the orthogonal ones), and keys other than threefry's, are
    evaluated for the whole tensor, and then cut.
    """
    program = jax.make_jaxpr(lambda key: initializer(key, global_shape, dtype))(key)
    try:
        (result,) = evaluate(program, [key], _BlockEvaluation(global_shape, box).rule)
    except NotElementwiseError:
        result = initializer(key, global_shape, dtype)
    if isinstance(result, _Cut):
        return result.block.reshape(box_shape(box))
    return result[tuple(slice(*bounds) for bounds in box)]


def init_block(initializer: Initializer, key: Array, spec: TensorSpec, dtype: DTypeLike = jnp.float32) -> Array:
    """Return this worker's block of the random tensor `initializer(key, spec.global_shape, dtype)`.

    The global values for a key do not depend on the partition, and copies of a block are equal. No worker makes the
    whole tensor: if the initializer is elementwise in random numbers, like PyTorch's and most `jax.nn.initializers`,
    time and memory are those of the block. Others (orthogonal ones), and keys of other generators than JAX's default,
    threefry, are evaluated in full on every worker that holds a block, and cut.

    **Arguments:**

    - `initializer`: a function of (key, shape, dtype); it sees the global shape, so fans are the whole tensor's. Reuse
      one function object, so that it is compiled once.
    - `key`: a JAX random key, the same on every worker.
    - `spec`: the tensor's `TensorSpec`.
    - `dtype`: of the tensor.

    **Returns:** this worker's block, zero-volume if it holds none. Uniform numbers are bit-equal, others up to
    rounding.

    **Raises:** `InvalidTypeError`, on every worker, if `initializer` is not callable, `key` not a random key, `dtype`
    not a dtype of numbers, or `spec` not a `TensorSpec`.

    >>> import distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> init_block(jax.nn.initializers.he_normal(), jax.random.key(0), TensorSpec((3, 4), P)).shape
    (3, 4)
    """
    check_key("key", key)
    np_dtype = checked_dtype("dtype", dtype)
    check_spec(spec)
    check_initializer("initializer", initializer, key, spec, np_dtype)
    if spec.box is None:
        return zero_volume_tensor(dtype=dtype)
    return _make_blocks([key], (_Tensor(_hashable(initializer), spec.global_shape, spec.box, np_dtype),))[0]


def init(initializers: Any, specs: Any, key: Array, dtype: DTypeLike = jnp.float32) -> Any:
    """Return this worker's blocks of the initial values of your own tree of parameters, by one program.

    **Arguments:**

    - `initializers`: a function of (key, shape, dtype) like the `jax.nn.initializers` for each leaf of `specs`: a
      pytree of the same structure, where a function in place of a subtree applies to all its leaves.
    - `specs`: a pytree of `TensorSpec`; None stays None, and containers without specs are unchanged.
    - `key`: a JAX random key, the same on every worker. Leaf i of n, in JAX's order of leaves, gets
      `jax.random.split(key, n)[i]`.
    - `dtype`: of the parameters.

    **Returns:** a pytree like `specs` of this worker's blocks, each as from `init_block`: slices of the same global
    values whatever the partitions, zero-volume if this worker holds none. With `DISTDL_JAX_DEBUG=1` it is collective
    among the workers of the partitions in `specs`, which compare their keys.

    **Raises:** `InvalidArgumentError` if `initializers` has another structure than `specs`, or an initializer returns
    another shape than requested; `InvalidTypeError` as in `init_block`.

    >>> import distdl_jax as dj
    >>> P, normal = dj.Partition().grid([1, 1]), jax.nn.initializers.normal()
    >>> specs = {"table": TensorSpec((5, 2), P), "gates": [TensorSpec((2, 2), P), TensorSpec((2, 1), P)]}
    >>> params = init({"table": normal, "gates": jax.nn.initializers.zeros}, specs, jax.random.key(0))
    >>> params["table"].shape, len(params["gates"])
    ((5, 2), 2)
    """
    named = {keystr(path): spec for path, spec in specs_by_path(specs).items() if spec is not None}
    if specs is None:
        raise InvalidTypeError("`specs` (=None) must be a TensorSpec, or a pytree of them.")

    def broadcast(initializer: Any, below: Any) -> Any:
        specs_by_path(below)  # a partition in place of a spec
        return jax.tree.map(lambda spec: None if spec is None else initializer, below, is_leaf=is_spec)

    try:
        functions = jax.tree.leaves(jax.tree.map(broadcast, initializers, specs, is_leaf=callable), is_leaf=callable)
    except ValueError as error:
        raise InvalidArgumentError(
            "`initializers` must be an initializer, or a pytree of initializers with the structure of `specs` or of a "
            f"prefix of it: {error}"
        ) from None
    by_name = dict(zip(named, functions, strict=True))
    params = initialize_params(named, key, dtype, by_name, tuple(named), "initializers{}")
    values = iter(params.values())
    return jax.tree.map(lambda spec: None if spec is None else next(values), specs, is_leaf=is_spec)


def check_initializer(name: str, initializer: Any, key: Array, spec: TensorSpec, dtype: np.dtype) -> None:
    """Reject an initializer that is not a function, or returns another shape than requested, on all workers."""
    if not callable(initializer):
        raise InvalidTypeError(f"`{name}` (={initializer!r}) must be a function of (key, shape, dtype).")
    made = jax.eval_shape(lambda key: initializer(key, spec.global_shape, dtype), key)
    if getattr(made, "shape", None) != spec.global_shape:
        raise InvalidArgumentError(
            f"`{name}` (={initializer!r}) must return an array of the requested shape, {spec.global_shape}, but "
            f"returns {made}."
        )


def _hashable(initializer: Initializer) -> Initializer:
    """Return an initializer, or its method, which is compared by identity, if it is unhashable, like a dataclass."""
    try:
        hash(initializer)
    except TypeError:
        return initializer.__call__  # type: ignore[operator]
    return initializer


class _Tensor(NamedTuple):
    """A random tensor, of which this worker makes the block `box`."""

    initializer: Initializer
    global_shape: tuple[int, ...]
    box: Box
    dtype: np.dtype


@one_program(static_argnums=(1,))
def _make_blocks(keys: list[Array], tensors: tuple[_Tensor, ...]) -> list[Array]:
    """Return this worker's blocks of random tensors, each from its own key."""
    return [
        initialize_block(tensor.initializer, key, tensor.global_shape, tensor.box, tensor.dtype)
        for key, tensor in zip(keys, tensors, strict=True)
    ]


class NotElementwiseError(Exception):
    """The program has operations other than elementwise arithmetic on random bits."""


@dataclass(frozen=True)
class _Cut:
    """The block, as one row, of a value with the global shape. (XLA compiles rows in a fraction of the time.)"""

    block: Array


@dataclass(frozen=True)
class _BlockEvaluation:
    """Evaluates a traced initializer on the block `box` of a tensor of `global_shape`."""

    global_shape: tuple[int, ...]
    box: Box

    def rule(self, eqn: Any, args: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        match structure(eqn):
            case Call("jit" | "call" | "custom", body):
                return evaluate(body, args, self.rule)
        if any(isinstance(arg, _Cut) for arg in args):
            return [_Cut(self._elementwise(eqn, args))]
        if name == "random_bits" and params["shape"] == self.global_shape and not np.shape(args[0]):
            return [_Cut(random_bits_of_box(args[0], params["bit_width"], self.global_shape, self.box))]
        if name == "broadcast_in_dim" and params["shape"] == self.global_shape and np.size(args[0]) == 1:
            return [_Cut(jnp.broadcast_to(jnp.reshape(args[0], ()), (math.prod(box_shape(self.box)),)))]
        return bound_again(eqn, args)

    def _elementwise(self, eqn: Any, args: list[Any]) -> Array:
        whole = [arg for arg in args if not isinstance(arg, _Cut)]
        if eqn.primitive.name not in _ELEMENTWISE or any(np.size(arg) != 1 for arg in whole):
            raise NotElementwiseError
        in_rows = [arg.block if isinstance(arg, _Cut) else jnp.reshape(arg, (1,) * (np.ndim(arg) > 0)) for arg in args]
        (result,) = bound_again(eqn, in_rows)
        return result


def random_bits_of_box(key: Array, bit_width: int, global_shape: tuple[int, ...], box: Box) -> Array:
    """Return the block of `jax.random.bits(key, global_shape)`: threefry of each element's row-major number."""
    counts_elements = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined, unused-ignore]
    if str(jax.random.key_impl(key)) != "threefry2x32" or not counts_elements:
        raise NotElementwiseError
    size = math.prod(box_shape(box))
    if size == 0:
        return jnp.zeros(0, f"uint{bit_width}")
    bits = threefry_2x32(jax.random.key_data(key), jnp.concatenate(_row_major_numbers(global_shape, box)))
    high, low = bits[:size], bits[size:]
    if bit_width == 64:
        return (high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)
    return (high ^ low).astype(f"uint{bit_width}")


def _row_major_numbers(global_shape: tuple[int, ...], box: Box) -> tuple[Array, Array]:
    """Return the row-major number of each element in the global tensor, as the halves of 64-bit integers, in a row."""
    global_shape, box = _merged(global_shape, box)
    shape = box_shape(box)
    high = low = jnp.zeros(shape, jnp.uint32)
    for axis, (start, stop) in enumerate(box):
        stride = math.prod(global_shape[axis + 1 :])
        numbers = np.arange(start, stop, dtype=np.uint64) * np.uint64(stride)
        along = (stop - start, *(1,) * (len(shape) - axis - 1))
        step_low = (numbers & np.uint64(0xFFFFFFFF)).astype(np.uint32).reshape(along)
        total = low + step_low
        carry = (total < low).astype(jnp.uint32)
        high = high + (numbers >> np.uint64(32)).astype(np.uint32).reshape(along) + carry
        low = total
    return high.reshape(-1), low.reshape(-1)


def _merged(global_shape: tuple[int, ...], box: Box) -> tuple[tuple[int, ...], Box]:
    """Return the shape and the box with each axis on which the box is whole merged into the previous one."""
    lengths, ranges = [1], [(0, 1)]
    for length, (start, stop) in zip(global_shape, box, strict=True):
        if (start, stop) == (0, length) or ranges[-1] == (0, 1) == (0, lengths[-1]):
            ranges[-1] = (ranges[-1][0] * length + start, (ranges[-1][1] - 1) * length + stop)
            lengths[-1] *= length
        else:
            lengths.append(length)
            ranges.append((start, stop))
    return tuple(lengths), tuple(ranges)


def initialize_params(
    specs: Mapping[str, TensorSpec],
    key: Array,
    dtype: DTypeLike,
    initializers: Mapping[str, Initializer],
    keyed: Sequence[str] = ("weight", "bias"),
    argument: str = "{}_init",
) -> dict[str, Array]:
    """Return this worker's blocks of the parameters `specs`, by one program; zero-volume if it has none.

    Each parameter has its own key, selected by its name's position in `keyed`. Errors call its initializer `argument`
    with its name. With `DISTDL_JAX_DEBUG=1` it is collective among the workers of the parameters' partitions, which
    compare their keys, unless the key is traced.
    """
    check_key("key", key)
    np_dtype = checked_dtype("dtype", dtype)
    for name, spec in specs.items():
        check_initializer(argument.format(name), initializers[name], key, spec, np_dtype)
    if specs and current_settings().debug and not isinstance(key, Tracer):
        _check_same_key(specs, key, dtype, initializers)
    # Split here: one program for all layers of two parameters.
    key_of = dict(zip(keyed, jax.random.split(key, len(keyed)), strict=True))
    tensors = {
        name: _Tensor(_hashable(initializers[name]), spec.global_shape, spec.box, np_dtype)
        for name, spec in specs.items()
        if spec.box is not None
    }
    made = _make_blocks([key_of[name] for name in tensors], tuple(tensors.values())) if tensors else []
    block_of = dict(zip(tensors, made, strict=True))
    return {name: block_of[name] if name in tensors else zero_volume_tensor(dtype=dtype) for name in specs}


def _check_same_key(
    specs: Mapping[str, TensorSpec], key: Array, dtype: DTypeLike, initializers: Mapping[str, Initializer]
) -> None:
    """Reject a key, a dtype or initializers that differ between the workers that hold the parameters `specs`."""
    world = next(iter(specs.values())).partition.world
    team = tuple(sorted({worker for spec in specs.values() for worker in spec.partition.ranks}))
    if world.rank not in team:
        return

    def contribute() -> tuple[int, str]:
        with jax.ensure_compile_time_eval():  # a key in the closure of a trace is known
            digest = crc32(np.asarray(jax.random.key_data(key)).tobytes())
        names = (getattr(initializers[name], "__qualname__", type(initializers[name]).__qualname__) for name in specs)
        return digest, f"{checked_dtype('dtype', dtype).name} by {', '.join(names)}"

    label = "`init` of " + " and ".join(f"{name} ({shape_text(spec.global_shape)})" for name, spec in specs.items())
    contributions: dict[int, tuple[int, str]] = agree(world, team, label, contribute)
    for number, what in enumerate(("`key`", "dtype and initializers")):
        values = {worker: contribution[number] for worker, contribution in contributions.items()}
        if text := difference(f"{what} in {label}", values):
            raise PlanError(f"{text} Otherwise the weights are a mixture; `init` itself makes blocks differ.")

"""The digest of a traced program: the same on two workers if, and only if, their programs compute the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from distdl_jax.jax_compat import name_and_params
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.tracing.program_reader import own_line_of_equation

_IGNORED = {
    "sharding",
    "out_sharding",
    "in_shardings",
    "out_shardings",
    "in_layouts",
    "out_layouts",
    "resource_env",
} | {
    *("name", "device", "devices", "copy_semantics", "srcs", "traceback", "compiler_options_kvs", "ctx_mesh"),
}
"""Parameters that say where something is computed, or what it is called."""


def equation_digests(closed: ClosedJaxpr) -> list[tuple[str, str]]:
    """Return the digest of each equation of a program, with its primitive and its line, in order.

    First come the arguments and the constants. Together they identify the program.
    """
    return [(hashlib.sha256(text).hexdigest()[:16], where) for text, where in _texts(closed)]


def combined(digests: Iterable[tuple[str, str]]) -> str:
    """Return one digest of all."""
    return hashlib.sha256("".join(digest for digest, _ in digests).encode()).hexdigest()


def difference(name: str, lists: Mapping[int, Sequence[tuple[str, str]]]) -> str:
    """Return the sentence on the first equation that differs between workers."""
    first = min(lists)
    for worker, digests in sorted(lists.items()):
        if list(digests) == list(lists[first]):
            continue
        for (ours, where), (theirs, where_there) in zip(lists[first], digests, strict=False):
            if ours != theirs:
                shown = (
                    where if where == where_there else f"{where} on worker {first}, {where_there} on worker {worker}"
                )
                return f"The workers' programs of {name} differ: first in {shown}. Workers {first} and {worker}."
        return (
            f"The workers' programs of {name} differ: worker {first} has {len(lists[first])} equations, worker "
            f"{worker} {len(digests)}."
        )
    return f"The workers' programs of {name} differ."


def static_digest(leaf: Any) -> str:
    """Return the digest of a leaf that is no array: of a function its name, which has the same address nowhere."""
    return hashlib.sha256(_value(leaf)).hexdigest()


def settings_digest() -> tuple[str, str]:
    """Return the digest of JAX's settings that change what is computed, and what they are called."""
    names = "jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision", "jax_numpy_dtype_promotion"
    text = ", ".join(f"{name} = {getattr(jax.config, name)}" for name in names)
    return hashlib.sha256(text.encode()).hexdigest(), f"JAX's settings ({text})"


def _texts(closed: ClosedJaxpr) -> Iterator[tuple[bytes, str]]:
    jaxpr = closed.jaxpr
    numbers: dict[Any, int] = {}
    for var in (*jaxpr.constvars, *jaxpr.invars):
        numbers[var] = len(numbers)
    yield " ".join(_aval(var.aval) for var in jaxpr.invars).encode(), "the arguments"
    for n, value in enumerate(closed.consts):
        yield bits_of(value), f"constant {n}, of type {_aval(jax.typeof(value))},"
    for eqn in jaxpr.eqns:
        yield (
            _equation(eqn, numbers),
            f"`{name_and_params(eqn)[0]}` at {own_line_of_equation(eqn) or 'an unknown line'}",
        )
    yield " ".join(_atom(atom, numbers) for atom in jaxpr.outvars).encode(), "the results"


def _equation(eqn: Any, numbers: dict[Any, int]) -> bytes:
    name, params = name_and_params(eqn)
    operands = " ".join(_atom(atom, numbers) for atom in eqn.invars)
    for var in eqn.outvars:
        numbers[var] = len(numbers)
    results = " ".join(_aval(var.aval) for var in eqn.outvars)
    settings = f"{getattr(eqn.ctx, 'threefry_partitionable', '')} {getattr(eqn.ctx, 'xla_metadata', '')}"
    return f"{name}({operands})->{results} {settings} ".encode() + _value(
        {key: value for key, value in params.items() if key not in _IGNORED}
    )


def _atom(atom: Any, numbers: dict[Any, int]) -> str:
    if isinstance(atom, Literal):
        return f"{_aval(atom.aval)}={bits_of(atom.val).hex()}"
    return str(numbers.get(atom, "_"))


def _aval(aval: Any) -> str:
    weak = "~" if getattr(aval, "weak_type", False) else ""
    return f"{weak}{getattr(aval, 'dtype', type(aval).__name__)}{list(getattr(aval, 'shape', ()))}"


def bits_of(value: Any) -> bytes:
    """Return the bits of a value; of a traced one only its type is known."""
    if isinstance(value, jax.core.Tracer):
        return _aval(jax.typeof(value)).encode()
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # also where a program is traced
            return str(value.dtype).encode() + bits_of(jax.random.key_data(value))
    array = np.asarray(value)
    return f"{array.dtype}{array.shape}".encode() + hashlib.sha256(array.tobytes()).digest()


def _value(value: Any) -> bytes:
    """Return the bytes of a parameter: nested programs and containers by their contents, functions by their names."""
    if isinstance(value, ClosedJaxpr):
        return b"{" + b";".join(text for text, _ in _texts(value)) + b"}"
    if isinstance(value, Jaxpr):
        return _value(ClosedJaxpr(value, [np.zeros(0)] * len(value.constvars)))
    if isinstance(value, dict):
        return b"{" + b",".join(str(key).encode() + b":" + _value(value[key]) for key in sorted(value, key=str)) + b"}"
    if isinstance(value, set | frozenset):
        return b"<" + b",".join(sorted(map(_value, value))) + b">"
    if isinstance(value, tuple | list):
        return b"(" + b",".join(map(_value, value)) + b")"
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return bits_of(value)
    if isinstance(value, TensorSpec):
        return value.describe().encode()
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__).encode()
    text = repr(value)
    return type(value).__qualname__.encode() if " at 0x" in text else text.encode()

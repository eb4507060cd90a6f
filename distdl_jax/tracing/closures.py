"""Names for arrays that a function closes over: paths from its variables, such as `shots['a']`, which are the same on
all workers.

A traced program holds them as constants, by value. Values can't be compared: they are each worker's own blocks. So
the variables that the function can reach are searched for the same objects, the shortest paths first: its closure,
the globals that its code names, defaults, `self`, functions that it calls or wraps, and what these hold. Only data are
read: no user code runs, and no property.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from distdl_jax.source_lines import is_library

MOST_OBJECTS = 20_000
"""Objects that are looked at, after which constants not found by then stay without a name."""

MOST_ELEMENTS = 1_000
"""Elements of each container that are looked at."""

MOST_HASHED = 1 << 22
"""The most elements of an array that is recognized by its content."""

MOST_IN_LABEL = 16
"""Elements of a tuple that its label tells."""

_NUMBERS = (int, float, complex, np.generic)
_PLAIN = (str, bytes, *_NUMBERS, type(None))
_LIBRARIES = {"distdl_jax", "jax", "jaxlib", "mpi4jax", "mpi4py", "numpy"}
_OF_USERS = {"argparse", "types"}  # namespaces, which hold users' data
_PYTHON = sys.stdlib_module_names - _OF_USERS


class _Node(NamedTuple):
    """An object, its path, and how many steps of that are positions, which say less than names."""

    positions: int
    path: str
    value: Any


def paths_of(constants: Sequence[Any], roots: Mapping[str, Any]) -> list[str]:
    """Return the path of each constant, from the named objects `roots`; "" if none is known, or several are.

    JAX keeps a `jax.Array` itself, but may convert a numpy array, which is then recognized by its content.

    >>> shots = {"a": np.ones(2), "b": np.arange(6.0).reshape(3, 2)}
    >>> paths_of([shots["b"], np.array([2.0, 3.0]), np.zeros(2)], {"shots": shots})
    ["shots['b']", "shots['b'][1]", '']
    """
    arrays = _arrays(roots, {id(constant) for constant in constants})
    times = Counter(path for _, path, _ in arrays)
    arrays = [found for found in arrays if times[found[1]] == 1]
    known = {id(array): path for _, path, array in arrays}
    contents = _by_content(arrays, {_kind(constant) for constant in constants if id(constant) not in known})

    def path_by_content(constant: Any) -> str:
        paths = contents.get((_kind(constant), _digest(constant)), {})
        shortest = [path for path, steps in paths.items() if steps == min(paths.values())]
        return shortest[0] if len(shortest) == 1 else ""

    return [known.get(id(constant)) or path_by_content(constant) for constant in constants]


def static_arguments(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name that aren't trees of arrays: a program may have their arrays as constants."""
    with suppress(TypeError, ValueError):
        named = inspect.signature(fun).bind(*args, **kwargs).arguments
        data = (jax.Array, np.ndarray, *_PLAIN)
        leaves = {name: jax.tree.leaves(value) for name, value in named.items()}
        return {name: named[name] for name in named if not all(isinstance(leaf, data) for leaf in leaves[name])}
    return {}


def _arrays(roots: Mapping[str, Any], wanted: set[int]) -> list[tuple[int, str, Any]]:
    """Return the arrays that can be reached from `roots`, with the steps to them and their paths, until all of `wanted`
    are found."""
    found: list[tuple[int, str, Any]] = []
    steps = 0
    seen: dict[int, Any] = {}  # the objects, too: some live no longer than the search
    level = [_Node(0, name, value) for name, value in roots.items()]
    while level and len(seen) < MOST_OBJECTS and not wanted <= seen.keys():
        after: list[_Node] = []
        for node in sorted(level, key=lambda node: node[:2]):
            if id(node.value) in seen or len(seen) + len(after) > MOST_OBJECTS:
                continue
            seen[id(node.value)] = node.value
            # Proxies, for instance, may raise anything when they are looked at, and are no reason to fail.
            with suppress(Exception):
                if isinstance(node.value, jax.Array | np.ndarray):
                    found.append((steps, node.path.lstrip("."), node.value))
                else:
                    after += (n for n in islice(_parts(node), MOST_ELEMENTS) if not isinstance(n.value, _PLAIN))
        level, steps = after, steps + 1
    return found


def _parts(node: _Node) -> Iterator[_Node]:
    """Yield what an object holds."""
    positions, path, value = node

    def part(step: str, child: Any, *, is_position: bool = False) -> _Node:
        return _Node(positions + is_position, path + step, child)

    if isinstance(value, dict):
        items = list(islice(dict.items(value), MOST_ELEMENTS))
        yield from (part(f"[{label}]", child) for label, child in _labelled(items))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from (part(f".{name}", child) for name, child in zip(value._fields, value, strict=False))
    elif isinstance(value, list | tuple | deque):
        children = ((n, child) for n, child in enumerate(value) if not isinstance(child, _PLAIN))
        yield from (part(f"[{n}]", child, is_position=True) for n, child in children)
    elif isinstance(value, set | frozenset):
        # Their order means nothing, so they are known by what they contain.
        for label, element in _labelled([(e, e) for e in value] if len(value) <= MOST_ELEMENTS else []):
            is_numbers = isinstance(element, tuple) and all(isinstance(n, _NUMBERS) for n in element)
            yield part(f"{{{label}}}", np.asarray(element) if is_numbers else element)
    elif isinstance(value, functools.partial):
        yield part("", value.func)
        yield part(".args", value.args)
        yield from (part(f".{name}", child) for name, child in value.keywords.items())
    elif isinstance(value, MethodType):
        yield part("", value.__func__)
        yield part(".self", value.__self__)
    elif isinstance(value, staticmethod | classmethod):
        yield part("", value.__func__)
    elif isinstance(value, property):
        yield part("", value.fget)
    elif isinstance(value, FunctionType):
        yield from _of_function(node)
    elif isinstance(value, type):
        if _is_of_user(value.__module__):
            yield from (part(f".{name}", child) for name, child in list(vars(value).items()) if name != "__dict__")
    elif not isinstance(value, ModuleType) and (callable(value) or _package(type(value)) not in _PYTHON | _LIBRARIES):
        yield from (part("" if name == "__wrapped__" else f".{name}", child) for name, child in _attributes(value))
        yield from (part("", base) for base in type(value).__mro__ if _is_of_user(base.__module__))


def _of_function(node: _Node) -> Iterator[_Node]:
    """Yield the variables of a function: a closure's, defaults, and the globals that its code names, which are known by
    their name alone."""
    positions, path, fun = node
    code = fun.__code__
    # What libraries wrap is known by the name that it has for the user.
    is_of_user = not is_library(code.co_filename)
    for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=False):
        with suppress(ValueError):  # not assigned yet
            yield _Node(positions, f"{path}.{name}" if is_of_user else path, cell.cell_contents)
    with_defaults = code.co_varnames[: code.co_argcount][-len(fun.__defaults__ or ()) :]
    defaults = dict(zip(with_defaults, fun.__defaults__ or (), strict=False)) | (fun.__kwdefaults__ or {})
    for name, value in [*defaults.items(), *vars(fun).items()]:
        yield _Node(positions, path if name == "__wrapped__" else f"{path}.{name}", value)
    if not is_of_user or not _is_of_user(fun.__module__ or ""):
        return
    names = sorted(_names(code))
    for name in names:
        value = fun.__globals__.get(name)
        if not isinstance(value, ModuleType):
            yield _Node(0, name, value)
        elif _is_of_user(value.__name__):
            held = vars(value)
            yield from (_Node(0, f"{name}.{inner}", held[inner]) for inner in names if inner in held)


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function's code, and in functions within it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for base in type(value).__mro__:
        for name, slot in list(vars(base).items()):
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError, TypeError):
                    found[name] = slot.__get__(value)
    with suppress(AttributeError, TypeError):
        found.update(object.__getattribute__(value, "__dict__"))
    return list(found.items())


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


@functools.cache
def _is_of_user(module: str) -> bool:
    """Return whether a module is part of the program, not of an installed package: its globals may hold data."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    root = module.partition(".")[0]
    return module == "__main__" or not ("-packages" in file or root in sys.stdlib_module_names or root in _LIBRARIES)


# --- labels and contents ----------------------------------------------------------------------------------------------


def _labelled(items: Sequence[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the values of (key, value) with texts of their keys that are the same on all workers, if they differ."""
    labels = [_label(key) for key, _ in items]
    times = Counter(labels)
    if "" in times or len(times) < len(labels):  # objects that differ in their arrays only
        labels = [
            label if label and times[label] == 1 else _label(key, of_arrays=True)
            for label, (key, _) in zip(labels, items, strict=True)
        ]
        times = Counter(labels)
    found = zip(labels, items, strict=True)
    yield from ((label, value) for label, (_, value) in found if label and times[label] == 1)


def _label(value: Any, depth: int = 2, *, of_arrays: bool = False) -> str:
    """Return a text by which a value, or an object by its attributes, is known on all workers; "" if there is none."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, type | FunctionType):
        return value.__qualname__
    if isinstance(value, jax.Array | np.ndarray):
        return _digest(value) if of_arrays else ""
    inner = functools.partial(_label, depth=depth - 1, of_arrays=of_arrays)
    if depth < 0:
        return ""
    if isinstance(value, tuple | list):
        text = f"({', '.join(map(inner, value[:MOST_IN_LABEL]))})"
    elif isinstance(value, set | frozenset):
        text = f"{{{', '.join(sorted(map(inner, value)))}}}" if len(value) <= MOST_IN_LABEL else ""
    else:
        attributes = [(name, inner(attribute)) for name, attribute in _attributes(value)]
        text = ", ".join(f"{name}={label}" for name, label in sorted(attributes) if label)
        text = f"{type(value).__name__}({text})" if text else ""
    return text if len(text) < 80 else f"{text[:60]}... {_hash(text.encode())}"


def _kind(array: Any) -> tuple[tuple[int, ...], Any]:
    return array.shape, array.dtype


def _by_content(arrays: Iterable[tuple[int, str, Any]], kinds: set[Any]) -> dict[Any, dict[str, int]]:
    """Return the paths of numpy arrays, and of their entries along the first axis, by shape, dtype and content, each
    with its steps."""
    found: defaultdict[Any, dict[str, int]] = defaultdict(dict)
    for steps, path, array in arrays:
        if not isinstance(array, np.ndarray):
            continue
        for shape, dtype in kinds:
            if array.shape == shape:
                found[(shape, dtype), _digest(array, dtype)][path] = steps
            elif array.shape[1:] == shape:
                for n, row in enumerate(array[:MOST_ELEMENTS]):
                    found[(shape, dtype), _digest(row, dtype)][f"{path}[{n}]"] = steps + 1
    return {(kind, digest): paths for (kind, digest), paths in found.items() if digest}


def _digest(array: Any, dtype: Any = None) -> str:
    """Return a text for an array's content, converted to `dtype`; "" if it has none, or too much of it."""
    if isinstance(array, Tracer) or not array.size or array.size > MOST_HASHED:
        return ""
    with suppress(TypeError):  # of random keys
        return _hash(np.asarray(array).astype(dtype or array.dtype).tobytes())
    return ""


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()

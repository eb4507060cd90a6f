"""The base of values that are static to JAX: partitions and layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cache, wraps
from typing import Any

import jax

from distdl_jax.validation import checked_boolean, python_integers


class Static:
    """The base of immutable, hashable values without arrays in them, which are static to JAX.

    An instance can be an argument of a jitted function, a leaf of a pytree, of an equinox module, say, or an attribute
    of a flax module, without a wrapper: to JAX it is a pytree without leaves, and part of the key of its caches.

    Fields of a dataclass, and arguments of its own `__init__`, that a class annotates as `bool` must be truth values;
    that is checked before all else, and they become bools. Other fields get Python's integers in place of numpy's,
    with which equal layers would not print alike on all workers.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_static(cls)
        # Dataclasses make their `__init__` later, and call `__post_init__` from it.
        for name, checked in (("__init__", _with_checked_arguments), ("__post_init__", _with_checked_fields)):
            if name in vars(cls):
                setattr(cls, name, checked(vars(cls)[name]))

    def __post_init__(self) -> None:
        cls: Any = type(self)
        flags = _fields(cls)
        for name in (field.name for field in fields(cls) if field.init):
            value = getattr(self, name)
            object.__setattr__(self, name, checked_boolean(name, value) if name in flags else python_integers(value))


@cache
def _fields(cls: Any) -> tuple[str, ...]:
    """Return the names of the flags among a class's fields, its bases' too."""
    return tuple(name for base in cls.__mro__ for name in _flags(inspect.get_annotations(base)))


def _flags(annotations: dict[str, Any]) -> list[str]:
    return [name for name, annotation in annotations.items() if annotation in (bool, "bool")]


def _with_checked_fields(post_init: Callable[..., None]) -> Callable[..., None]:
    @wraps(post_init)
    def checked(self: Any, *args: Any) -> None:
        Static.__post_init__(self)
        post_init(self, *map(python_integers, args))

    return checked


def _with_checked_arguments(init: Callable[..., None]) -> Callable[..., None]:
    flags = _flags(inspect.get_annotations(init))
    places = {name: place for place, name in enumerate(inspect.signature(init).parameters) if name in flags}

    @wraps(init)
    def checked(*args: Any, **options: Any) -> None:
        given, options = python_integers(list(args)), {name: python_integers(value) for name, value in options.items()}
        for name, place in places.items():
            if name in options:
                options[name] = checked_boolean(name, options[name])
            elif place < len(given):
                given[place] = checked_boolean(name, given[place])
        init(*given, **options)

    return checked

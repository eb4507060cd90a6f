"""The bases of values that never change, and of those that are static to JAX: partitions and layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from typing import Any, Self

import jax

from distdl_jax.validation import accepting_numpy, is_flag, python_value
from distdl_jax.watchdog.error_text import hiding_own_lines


class Immutable:
    """The base of values that never change: a copy, or deep copy, is the value itself.

    A deep copy of a value that holds functions, as networks do, would not be equal to it: JAX's are copied, too.
    """

    __slots__ = ()

    def __copy__(self) -> Self:
        """Return the value itself."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Return the value itself."""
        return self


class Static(Immutable):
    """The base of immutable, hashable values without arrays, which are static to JAX.

    An instance can be an argument of a jitted function, a leaf of a pytree, for instance of an equinox module, or an
    attribute of a flax module, without a wrapper: to JAX it is a pytree without leaves, and part of its cache keys.

    Fields annotated as `bool` must be truth values, which is checked before a class's `__post_init__`, or own
    `__init__`, begins, and become bools. Others get Python's integers in place of numpy's, with which equal layers
    would print differently on some workers.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Register a class with JAX, and convert the arguments of its constructor."""
        super().__init_subclass__(**options)
        jax.tree_util.register_static(cls)
        # Before `dataclass` writes a constructor, which calls `__post_init__`. A metaclass would have to be shared by
        # users' classes with several bases.
        for name, door in (("__init__", _with_converted_arguments), ("__post_init__", _with_converted_fields)):
            if name in vars(cls):
                setattr(cls, name, hiding_own_lines(door(vars(cls)[name])))

    @hiding_own_lines
    def __post_init__(self) -> None:
        self._begin()
        _convert_fields(self)

    def _begin(self) -> None:
        """Note what is to be known of this value's construction, before its arguments are checked."""

    def _store(self, **values: Any) -> None:
        """Set fields during construction, normalised so that equal values compare equal."""
        vars(self).update(values)


def _with_converted_arguments(init: Callable[..., None]) -> Callable[..., None]:
    accepting = accepting_numpy(init)

    @wraps(init)
    def begun(self: Static, *args: Any, **options: Any) -> None:
        self._begin()
        accepting(self, *args, **options)

    return begun


def _with_converted_fields(post_init: Callable[..., None]) -> Callable[..., None]:
    @wraps(post_init)
    def begun(self: Static, *args: Any) -> None:
        self._begin()
        _convert_fields(self)
        post_init(self, *args)

    return begun


def _convert_fields(value: Any) -> None:
    own = vars(value)
    own.update({f.name: _converted(f, own[f.name]) for f in fields(value) if f.name in own})


def _converted(field: Field[Any], value: Any) -> Any:
    value = python_value(field.name, value, is_flag(field.type))
    by = field.metadata.get(_CONVERTER)
    return value if by is None or value is None else by(field.name, value)


_CONVERTER = "converter"


def converter(by: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return metadata of a dataclass's field whose value, unless it is None, is `by(name, value)` of what a user gives.

    `by` must be idempotent, and raises if the value is not accepted.
    """
    return {_CONVERTER: by}

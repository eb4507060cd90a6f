"""The base of values that are static to JAX: partitions and layers."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import jax

from distdl_jax.validation import checked_boolean, python_integers


class _CheckedArguments(type):
    """The type of classes that are made of Python's own truth values and integers, in place of numpy's."""

    @property
    def __signature__(cls) -> inspect.Signature:
        return _signature(cls)

    if not TYPE_CHECKING:  # to a type checker a class is called with the arguments of its `__init__`

        def __call__(cls, *args: Any, **options: Any) -> Any:
            try:
                given = _signature(cls).bind(*args, **options)
            except TypeError:
                return super().__call__(*args, **options)  # where Python says what is wrong, by its own names
            for name, value in given.arguments.items():
                is_flag = _signature(cls).parameters[name].annotation in (bool, "bool")
                given.arguments[name] = checked_boolean(name, value) if is_flag else python_integers(value)
            return super().__call__(*given.args, **given.kwargs)


@cache
def _signature(cls: type) -> inspect.Signature:
    _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    return inspect.Signature(parameters)


class Static(metaclass=_CheckedArguments):
    """The base of immutable, hashable values without arrays in them, which are static to JAX.

    An instance can be an argument of a jitted function, a leaf of a pytree, of an equinox module, say, or an attribute
    of a flax module, without a wrapper: to JAX it is a pytree without leaves, and part of the key of its caches.

    Arguments that a class annotates as `bool`, fields of a dataclass above all, must be truth values; that is checked
    before all else, and they become bools. Others get Python's integers in place of numpy's, with which equal layers
    would not print the same on all workers.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_static(cls)

    def __post_init__(self) -> None:
        """Check nothing more; subclasses do."""

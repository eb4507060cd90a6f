"""The bases of values that never change, and of those that are static to JAX: partitions and layers."""

from __future__ import annotations

import inspect
from abc import ABC, ABCMeta
from functools import cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Protocol, Self

import jax

from distdl_jax.validation import checked_boolean, python_integers
from distdl_jax.watchdog.error_text import hiding_own_lines

if TYPE_CHECKING:
    TypeOfProtocols = ABCMeta
else:
    TypeOfProtocols = type(Protocol)  # so that a class may have a layer and `nn.Layer` as its bases


class StaticType(TypeOfProtocols):
    """The type of classes of static values: it checks and converts the arguments of the constructor.

    Arguments annotated as `bool` must be truth values, which is checked first, and become bools. Others get Python's
    integers in place of numpy's, with which equal layers would print differently on some workers. Arguments that a
    subclass takes as `**options` and forwards are checked like its bases' arguments.
    """

    if not TYPE_CHECKING:  # signatures are those of `__init__`
        __instancecheck__ = ABCMeta.__instancecheck__  # protocols' own asks more, of classes that are none

        def __setattr__(cls, name, value):
            # Classes of users may be abstract. Others need not define all methods.
            is_free = name == "__abstractmethods__" and ABC not in cls.__mro__
            super().__setattr__(name, frozenset() if is_free else value)

        @hiding_own_lines
        def __call__(cls, *args, **options):
            flags, names = _parameters(cls)
            placed = zip(chain(names, repeat("")), args, strict=False)  # further ones belong to `*layers`
            given = [_converted(name, x, flags) for name, x in placed]
            return super().__call__(*given, **{name: _converted(name, x, flags) for name, x in options.items()})

        @property
        def __signature__(cls):
            method = inspect.signature(cls.__init__)
            return method.replace(parameters=list(method.parameters.values())[1:])


def _converted(name: str, value: Any, flags: frozenset[str]) -> Any:
    return checked_boolean(name, value) if name in flags else python_integers(value)


@cache
def _parameters(cls: Any) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the flags among the parameters of a class, and the names of its positional ones."""
    positional: list[str] = []
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        positional.append(parameter.name)
    annotations: dict[str, Any] = {}
    for base in cls.__mro__:
        for name, parameter in inspect.signature(base.__init__).parameters.items():
            annotations.setdefault(name, parameter.annotation)
    return frozenset(name for name, kind in annotations.items() if kind in (bool, "bool")), tuple(positional)


class Immutable:
    """The base of values that never change: a copy, or deep copy, is the value itself.

    A deep copy of a value that holds functions, as networks do, would not be equal to it: JAX's are copied, too.
    """

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Static(Immutable, metaclass=StaticType):
    """The base of immutable, hashable values without arrays, which are static to JAX.

    An instance can be an argument of a jitted function, a leaf of a pytree, for instance of an equinox module, or an
    attribute of a flax module, without a wrapper: to JAX it is a pytree without leaves, and part of its cache keys.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_static(cls)

    def _store(self, **values: Any) -> None:
        """Set fields during construction, normalised so that equal values compare equal."""
        vars(self).update(values)

"""The name scopes of traced and compiled programs: the layer, movement and pass of an operation.

JAX writes the scopes around an equation as `transpose(jvp(.3))/DistributedConv2d/#7/windows`. A part of a network has a
scope with its place, `.3`; a movement has one with a number, `#7`, and a body that may contain movements has `#8b`;
layers and primitives have scopes with their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import jax

_JAX_SCOPES = {
    *("while", "body", "cond", "checkpoint", "rematted_computation", "closed_call", "core_call", "eval_jaxpr"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
}
_TRANSFORMATIONS = ("transpose", "jvp", "vmap", "jit", "checkpoint", "rematted")
_NUMBER, _MOVEMENT = re.compile(r"#(\d+)"), re.compile(r"#\d+")
_BRANCH = re.compile(r"branch_\d+_fun")
_IN_LAYER = "In layer "
_numbers = count(1)


class Scopes(NamedTuple):
    """The information in the scopes around an operation.

    - `place`: of the innermost part of a network, "3.body.0"; "" outside of networks.
    - `names`: of layers, primitives and users' scopes, outermost first.
    - `layers`: the names inside that part, and around the movement. `functions`: the jitted functions there.
    - `movement`: the name of the movement of which it is part; "" if none.
    - `backward`: whether it belongs to a derivative's backward pass; `differentiated`: to that or its forward pass.
    """

    place: str
    names: tuple[str, ...]
    layers: tuple[str, ...]
    functions: tuple[str, ...]
    movement: str
    backward: bool
    differentiated: bool


def movement_scope() -> Any:
    """Return a name scope with a unique number, for a movement.

    The adjoint has the same scope within JAX's own, so a traced program shows which adjoint belongs to which movement.
    """
    return jax.named_scope(f"#{next(_numbers)}")


def body_scope() -> Any:
    """Return such a scope for the call of a body that may contain movements, and may be called twice."""
    return jax.named_scope(f"#{next(_numbers)}b")


@contextmanager
def place_scope(name: object, part: Any) -> Iterator[None]:
    """Trace inside in a name scope for the part of a network with this name in it; errors name the place."""
    with place_of_errors(name, part), jax.named_scope(f".{name}"):
        yield


@contextmanager
def place_of_errors(name: object, part: Any) -> Iterator[None]:
    """Add a note with the place in the network to exceptions inside, as in costs and profiles."""
    try:
        yield
    except Exception as error:
        notes: list[str] = getattr(error, "__notes__", [])
        for number, note in enumerate(notes):
            if note.startswith(_IN_LAYER):  # of a nested part
                notes[number] = f"{_IN_LAYER}{name}.{note.removeprefix(_IN_LAYER)}"
                break
        else:
            error.add_note(f"{_IN_LAYER}{name}, {name_and_line(part)}.")
        raise


def name_and_line(part: Any) -> str:
    """Return the name of a layer or function in messages: its class, and the line where it was built."""
    built_at = getattr(part, "_built_at", "")
    name = getattr(part, "__name__", type(part).__name__)
    return f"{name}, built at {built_at}" if built_at else str(name)


def movement_numbers(scopes: str) -> list[str]:
    """Return the numbers of all movements around an operation, outermost first."""
    return _NUMBER.findall(scopes)


def movements_around(scopes: str) -> list[tuple[str | tuple[str, ...], bool]]:
    """Return the movement of which an operation is part, and whether of its adjoint, in two ways; [] if none.

    First by all scopes around it: two uses of a body that JAX traced once differ only in the scopes of their calls, so
    nothing inside it, such as a parameter of an operation, could distinguish them. Then by the innermost: in a
    derivative that is differentiated again, the adjoints of the first one count as movements by their outer scopes, and
    as adjoints by their inner ones.
    """
    if not (numbers := movement_numbers(scopes)):
        return []
    outside = scopes[: scopes.index(f"#{numbers[0]}")]
    return [(tuple(dict.fromkeys(numbers)), _is_transposed(outside)), (numbers[-1], _is_transposed(scopes))]


def _is_transposed(scopes: str) -> bool:
    return "transpose(" in scopes


def read_scopes(scopes: str) -> Scopes:
    """Return the information in scopes, which are joined by "/"."""
    place, movement = "", ""
    names, layers, functions = list[str](), list[str](), list[str]()
    for scope in filter(None, scopes.split("/")):
        name, is_function = _own_name(scope)
        if _MOVEMENT.fullmatch(name):
            movement = movement or "movement"
        elif name.startswith("."):
            place, layers, functions = place + name, [], []
        elif is_function:
            functions += [] if movement else [name]
        elif name and not _NUMBER.match(name):
            names.append(name)
            layers += [] if movement else [name]
            movement = name if movement == "movement" else movement
    names = list(dict.fromkeys(names))
    backward, differentiated = _is_transposed(scopes), "jvp(" in scopes
    return Scopes(place[1:], tuple(names), tuple(layers), tuple(functions), movement, backward, differentiated)


def _own_name(scope: str) -> tuple[str, bool]:
    """Return a scope's own name without enclosing transformations, and whether it is a jitted function's.

    As in `transpose(jvp(Linear))`; "" for JAX's scopes.
    """
    is_function = False
    while scope.endswith(")") and (around := scope.split("(", 1)[0]) in _TRANSFORMATIONS:
        scope, is_function = scope[len(around) + 1 : -1], around == "jit"
    return ("" if scope in _JAX_SCOPES or _BRANCH.fullmatch(scope) else scope), is_function

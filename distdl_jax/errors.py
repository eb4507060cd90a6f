"""The errors of distdl_jax: all are `DistDLError`, and each is also a built-in error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NoReturn

from distdl_jax.text import brief, cut

LONGEST = 10_000
"""The maximum number of characters of a message."""


class DistDLError(Exception):
    """Base of every error that distdl_jax raises."""

    def __init__(self, *args: object) -> None:
        # The last resort: values and names of users and files may be of any length, and hold anything.
        super().__init__(*(_message(arg) if isinstance(arg, str) else arg for arg in args))


def _message(text: str) -> str:
    return "\n".join(brief(line, LONGEST) for line in cut(text, LONGEST).split("\n"))


class InvalidArgumentError(DistDLError, ValueError):
    """An argument has an invalid value; the message gives the argument, its value, and the accepted ones."""


class InvalidTypeError(DistDLError, TypeError):
    """An argument has an invalid type."""


class PlanError(DistDLError, ValueError):
    """Blocks that don't match: shapes, dtypes or partitions that disagree between workers."""


class SetupError(DistDLError, RuntimeError):
    """The MPI library, the launcher or the way they were started does not allow the request."""


class CopiesWarning(UserWarning):
    """The workers' losses are copies of one value, which counts once for each; see `part`.

    If it is intended, ignore it: `warnings.simplefilter("ignore", dj.CopiesWarning)`.
    """


class CheckpointError(DistDLError, OSError):
    """A checkpoint (then on every worker) or a file of arrays can't be written or read, is damaged, or was changed."""


class Removed:
    """A method of the version before: it raises a sentence that says what to write instead. It goes with the next.

    >>> class Partition:
    ...     draw = Removed("dj.draw(P)")
    >>> Partition().draw()
    Traceback (most recent call last):
    AttributeError: Partition.draw has been removed: write dj.draw(P).
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{self._name} has been removed: write {self._instead}.")


ONE_PROGRAM = (
    "All workers must make the same calls in the same order, including those without data: look for an `if` on the "
    "rank, for data that end sooner on one worker, and for a loop that one of them leaves first."
)
"""The end of most reports about differing programs."""

MAPPED_OVER = "the size of a batch that moves (jax.vmap, jax.jacrev)"
"""The label of the agreement of workers between which data moves, under `jax.vmap`."""

PLAN_OF = "the plan of "
"""The label of an agreement while a function of `dj.jit` is traced, before its name."""

CONSTANTS = (
    "y[array], y.at[...].set, y.at[...].add, insert and segment_sum give one in JAX if y has no elements. It has no "
    "derivative, and jax.vmap does not batch it: index outside of jax.vmap."
)
"""Advice about constants that exist on only one worker."""


def shown_label(label: str, other: str = "") -> str:
    """Return the name of a layer's agreement in messages: its class, and the differences from `other` of that class.

    >>> shown_label("Linear(P=1 x 2 (0, 1), n=3)"), shown_label("Linear(P=2 (0, 1), n=3)", "Linear(P=2 (0, 1), n=4)")
    ('Linear', 'Linear(n=3)')
    """
    name, _, arguments = label.partition("(")
    if "=" not in arguments.partition(",")[0] or not name.isidentifier():
        return label
    if not other.startswith(f"{name}(") or other == label:
        return name
    mine, theirs = (_ARGUMENT.findall(text) for text in (label, other))
    different = [f"{argument}={value}" for argument, value in mine if (argument, value) not in theirs]
    return f"{name}({', '.join(different)})" if different else label


_ARGUMENT = re.compile(r"(\w+)=((?:\([^()]*\)|[^,()])*)")


def one_program(labels: Iterable[str]) -> str:
    """Return the end of a report about workers that wait for others to agree with them on these labels."""
    labels = set(labels)
    if MAPPED_OVER not in labels:
        plans = {label for label in labels if label.startswith(PLAN_OF)}
        if len(plans) != 1 or plans == labels:
            return ONE_PROGRAM
        (plan,) = plans
        return (
            f"{ONE_PROGRAM} Or `{plan.removeprefix(PLAN_OF).split(' ')[0]}` has been called on all, and is traced "
            "again on some: then the shapes, dtypes or static arguments of its call have changed only on these."
        )
    return (
        "Under jax.vmap the workers between which data moves must map over the same number, and one of them maps over "
        f"nothing there: it moves a constant. {CONSTANTS} dj.jit, in place of jax.jit, names the constant."
    )


def start_of_more(workers: int) -> str:
    """Return how to start a program on `workers`, for errors that require more than there are."""
    return (
        f" To start {workers} workers: `mpiexec -n {workers} python -m distdl_jax PROGRAM`, or, in one process without "
        f"MPI, `python -m distdl_jax --simulate {workers} PROGRAM`."
    )

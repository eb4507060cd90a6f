"""The sentences that explain why the workers' programs don't match."""

from __future__ import annotations

from collections.abc import Mapping

from distdl_jax.errors import ONE_PROGRAM
from distdl_jax.watchdog.programs.ir import Flow, Operation, Program
from distdl_jax.watchdog.programs.matching import Mismatch, Stop, find_mismatch
from distdl_jax.watchdog.programs.origins import Mixed

_BACKWARD = (
    "It belongs to the backward pass, which JAX runs on a worker only where that worker's input is differentiated and "
    "its output used. Give every worker parameters from `layer.init` (zero-volume ones where it owns none) and no "
    "constant in their place, let the loss use every output on every worker (a sum over a zero-volume output is 0), "
    "and take gradients with dj.grad or dj.value_and_grad, which see to all of it themselves. JAX replaces a block "
    "without elements by a constant, which has no derivative, in y[array], y.at[...].set, insert and segment_sum."
)


_MIXED = (
    "Each passes in another call what the other passes there, so values would be mixed. Nothing was run. All workers "
    "must make the same calls in the same order: look for a loop over a set, or over what os.listdir returns, whose "
    "order differs between workers, and sort it. If a worker must choose by its rank, let it use jnp.where."
)


def problem_text(name: str, programs: Mapping[int, Program], flows: Mapping[int, Flow] | None = None) -> str | None:
    """Return the error that all workers raise if programs don't complete together; `name` is the function's.

    With `flows`, also if they mix values.
    """
    mismatch = find_mismatch(programs, flows)
    return None if mismatch is None else _mismatch_text(name, mismatch)


def _mixed_text(name: str, stops: tuple[Stop, ...], mixed: Mixed, branch: str) -> str:
    one, other, layer, result = mixed
    if layer:
        what = f"worker {one.worker} passes {one.what} to {layer}, but worker {other.worker} passes {other.what}"
    elif result:
        what = f"worker {one.worker} returns as {result} {one.what}, but worker {other.worker} {other.what}"
    else:
        what = f"{_at(stops[0])}, and passes {one.what}, but {_at(stops[1])}, and passes {other.what}"
    return f"The workers' programs differ. In the plan of {name}{branch}, {what}. {_MIXED}"


def _mismatch_text(name: str, mismatch: Mismatch) -> str:
    branch = "" if mismatch.branch is None else f" (where conditionals take branch {mismatch.branch})"
    if mismatch.mixed is not None:
        return _mixed_text(name, mismatch.stops, mismatch.mixed, branch)
    first, *others = mismatch.stops
    match mismatch.reason:
        case "amount":
            what = f"{_at(first)}, but {_at(others[0])}: the two belong together, and must mean the same data"
        case "adjoints":
            what = f"{_at(first)}, and {_at(others[0])}: they are the adjoints of two movements, and would be mixed"
        case "ended":
            what = f"{_at(first)}, but {_ended(others[0], first)}"
        case "partner":
            what = f"{_at(first)}, but {_at(others[0])}: neither can go on{tags_text(first, others[0])}"
        case "cycle":
            what = f"{'; '.join(map(_at, mismatch.stops))}: each waits for the next"
        case _:
            what = f"{_at(first)}, and the loops of the workers are too long and too different to be compared"
    return f"The plan of {name} can't complete{branch}: {what}. {_advice(mismatch)}"


def _advice(mismatch: Mismatch) -> str:
    operations = [stop.operation for stop in mismatch.stops if stop.operation is not None]
    if mismatch.reason != "amount" and any(operation.place.backward for operation in operations):
        return _BACKWARD
    if mismatch.reason == "amount":
        return (
            "Nothing was run. Look for a shape, dtype or argument that differs between these workers, or a jax.vmap "
            "(or jax.jacrev, which maps) of another size."
        )
    return f"Nothing was run. {ONE_PROGRAM}"


def _at(stop: Stop) -> str:
    if stop.operation is None:
        return f"worker {stop.worker} is through"
    return f"worker {stop.worker} is in operation {stop.place} of {stop.total}, {describe(stop.operation)}"


def tags_text(a: Stop, b: Stop) -> str:
    """Return how the tags of two operations differ; "" if they are equal."""
    for sender, receiver in ((a, b), (b, a)):
        sent, expected = sender.operation, receiver.operation
        if not sent or not expected or expected.recv_tag in (None, sent.send_tag):
            continue
        if (sent.dest, expected.source) == (receiver.worker, sender.worker):
            return f", for the message has tag {sent.send_tag}, and one with tag {expected.recv_tag} is expected"
    return ""


def _ended(stop: Stop, waiting: Stop) -> str:
    if stop.total == 0:
        return f"worker {stop.worker} has no operation at all in its plan"
    return f"worker {stop.worker}'s plan ends, after {stop.total} operations, without its part in that"


def describe(operation: Operation) -> str:
    """Return the operation, the layer that it is part of and its source line, as text."""
    place = operation.place
    layer = f", part of {place.layer.replace('/', ' > ')}" if place.layer else ""
    direction = " in the backward pass" if place.backward else ""
    return f"{operation}{layer}{direction}{f', {place.line}' if place.line else ''}"

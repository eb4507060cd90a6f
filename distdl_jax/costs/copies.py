"""How much a worker copies around the messages of a movement."""

from __future__ import annotations

from collections.abc import Sequence

from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.box_exchange import BoxPlan
from distdl_jax.primitives.broadcast import ReplicationPlan
from distdl_jax.primitives.plan import Action, Moves
from distdl_jax.programs.ir import Operation


def bytes_copied(action: Action, worker: int, operations: Sequence[Operation], adjoint: bool) -> int:
    """Return how many bytes `worker` copies in a movement, or in its adjoint, in which it has these operations.

    Boxes are cut out of a block, and joined to a new one. What is broadcast is sent and received as it is; a sum reads
    and writes what is received.
    """
    if not operations:
        return 0
    match action:
        case Moves(BoxPlan() as movement):
            after = movement.inputs[worker] if adjoint else movement.output(worker)
            return sum(operation.bytes_sent for operation in operations) + _bytes(after)
        case Moves(ReplicationPlan(is_broadcast=is_broadcast)) if is_broadcast == adjoint:
            return sum(each.received * each.itemsize for each in operations if each.is_message)
    return 0


def _bytes(block: ShapeDtype) -> int:
    return block.size * block.dtype.itemsize

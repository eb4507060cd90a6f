"""All cases."""

from layer_cases import Case, convolutions, dense, experts, losses, others, sequences, shapes


def all_cases(n: int) -> list[Case]:
    """Return cases on n workers: one or more for each layer that has a counterpart on one worker."""
    return [
        case for room in (convolutions, dense, experts, losses, shapes, sequences, others) for case in room.cases(n)
    ]

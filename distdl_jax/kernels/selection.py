"""Which way to take, from measurements: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from distdl_jax.kernels.timing import Measurement

WORTH_A_CHANGE = 1.1
"""How many times faster than the one that would be taken without it another way must be on this machine."""

WORTH_IT = 1.2
"""How many times faster than the plain way another one must have been, wherever it was measured, to be taken unseen."""

HOPELESS = 4.0
"""So many times slower than another way, wherever it was measured, it is not even tried."""

PROCESSORS = 2
"""On how many processors a way must have been measured before anything is concluded for others."""

PRICE_OF_MEMORY = 0.05
"""How much time a way may take more that needs less memory, for as much memory as arguments and result are."""


def cheapest(measured: Mapping[str, Measurement], without: str, data: int) -> str:
    """The fastest way of those measured here, memory counted in; `without` is the one that would be taken unmeasured.

    - `data`: how many bytes arguments and result have.
    """

    def cost(way: str) -> float:
        return measured[way].seconds * (1 + PRICE_OF_MEMORY * measured[way].temporaries / max(data, 1))

    best = min(measured, key=cost)
    return without if without in measured and cost(without) <= WORTH_A_CHANGE * cost(best) else best


Times = Mapping[str, float]
"""Seconds of each way, on one processor, for one problem."""


def best_everywhere(records: Mapping[str, Sequence[Times]], plain: str) -> str:
    """The way to take where nothing was measured; `records`, by processor, are of problems like this one."""
    worst = {way: _least_gain(records, way, plain) for way in _ways(records) if way != plain}
    good = {way: gain for way, gain in worst.items() if gain >= WORTH_IT}
    return max(good, key=lambda way: good[way]) if good else plain


def worth_trying(records: Mapping[str, Sequence[Times]], ways: Iterable[str]) -> tuple[str, ...]:
    """Those of `ways` that were not far slower than another one of them, wherever the two were measured."""
    ways = tuple(ways)
    return tuple(
        way for way in ways if all(other == way or _least_gain(records, other, way) < HOPELESS for other in ways)
    )


def _ways(records: Mapping[str, Sequence[Times]]) -> set[str]:
    return {way for of_processor in records.values() for times in of_processor for way in times}


def _least_gain(records: Mapping[str, Sequence[Times]], way: str, than: str) -> float:
    """How many times faster one way was than another, at least; 0 where too few processors have been asked."""
    gains = [
        [times[than] / times[way] for times in of_processor if way in times and than in times]
        for of_processor in records.values()
    ]
    known = [gain for gain in gains if gain]
    return min(map(min, known)) if len(known) >= PROCESSORS else 0.0

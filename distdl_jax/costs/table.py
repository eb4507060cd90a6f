"""The cost of a step as text: a row for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distdl_jax.costs.amounts import Amounts
from distdl_jax.costs.layer_cost import LayerCost
from distdl_jax.costs.times import Interval, Times

AMOUNTS = ("Mflop", "messages", "MB")
TIMES = ("forward", "backward", "update", "transfer", "waiting (least mean most)", "exposed", "would hide", "share")


def table(layers: Sequence[LayerCost], total: LayerCost, once: Times | None, seconds: Interval | None) -> str:
    """Return the table; `total` is of all layers together.

    Amounts are those of the worker that has most; times are means over the workers, but for the least and the most
    waiting beside the mean.
    """
    header = ["layer", *AMOUNTS, *(TIMES if once is not None else ())]
    rows = [header]
    step = float(total.times.total.mean()) if total.times is not None else 0.0
    for layer in layers:
        rows.append([layer.title, *_amounts(layer.amounts), *_times(layer.times, step)])
    if once is not None:
        rows.append(["call, sum of the loss", *[""] * len(AMOUNTS), *_times(once, step)])
    rows.append([total.title, *_amounts(total.amounts), *_times(total.times, step)])
    lines = aligned(rows)
    lines.insert(1, "-" * max(map(len, lines)))
    lines.insert(-1, lines[1])
    if seconds is not None:
        lines += ["", f"a step: {seconds}; times in ms", *(f"- {reason}" for reason in seconds.reasons)]
    return "\n".join(line.rstrip() for line in lines)


def _amounts(amounts: Amounts) -> list[str]:
    messages = amounts.messages + amounts.collectives_forward + amounts.collectives_backward
    return [number(amounts.flops.max() / 1e6), str(messages.max()), number(amounts.bytes.max() / 1e6)]


def _times(times: Times | None, step: float) -> list[str]:
    if times is None:
        return []
    waiting = " ".join(number(1e3 * of(times.waiting)) for of in (np.min, np.mean, np.max))
    means = (times.forward, times.backward, times.update, times.transfer)
    others = (times.exposed, times.hideable)
    share = f"{times.total.mean() / step:.1%}" if step else ""
    return [*(_milliseconds(each) for each in means), waiting, *(_milliseconds(each) for each in others), share]


def _milliseconds(seconds: np.ndarray) -> str:
    return number(1e3 * seconds.mean())


def number(value: float) -> str:
    """Return a number to three digits, without an exponent."""
    if value == 0:
        return "0"
    if value < 0.0005:
        return "0.000"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in enumerate(pairs))
        for pairs in ([*zip(row, widths, strict=True)] for row in rows)
    ]

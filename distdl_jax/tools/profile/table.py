"""A profile as text: a row for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distdl_jax.text import aligned, number
from distdl_jax.tools.cost.cost import Cost
from distdl_jax.tools.profile.activities import UPDATE
from distdl_jax.tools.profile.times import LayerProfile, PassTimes

_HEADER = ("layer", "forward", "backward", "packing", "transfer", "waiting (least mean most)", "hidden")
_AMOUNTS = ("messages", "MB", "share")
_ESTIMATED = ("estimated", "ratio")

OFTEN = 0.05
"""A worker is named where it is waited for in this share of all waiting, or more often."""


def table(
    layers: Sequence[LayerProfile],
    seconds: np.ndarray,
    idle: np.ndarray,
    waited_for: np.ndarray,
    matched: bool,
    cost: Cost | None,
) -> str:
    """Return the table: times in ms, means over the workers; messages and bytes of the worker that has most."""
    step = float(seconds.mean())
    rows = [[*_HEADER, *_AMOUNTS, *(_ESTIMATED if cost is not None else ())]]
    estimates = {} if cost is None else {layer.place: layer.seconds for layer in cost.layers}
    for layer in layers:
        times = layer.both
        rows.append(_row(layer.title, layer.forward.arithmetic, layer.backward.arithmetic, times, step))
        if cost is not None:
            rows[-1] += _compared(times.total, None if layer.name == UPDATE else estimates.get(layer.place))
    nothing = PassTimes.none(len(seconds))
    rows.append(_row("call", idle, nothing.arithmetic, nothing, step))
    total = sum((layer.both for layer in layers), nothing)
    passes = [
        sum((each.arithmetic for each in several), nothing.arithmetic)
        for several in zip(*((layer.forward, layer.backward) for layer in layers), strict=True)
    ] or [nothing.arithmetic] * 2
    rows.append(_row("a step", passes[0] + idle, passes[1], total, step))
    rows[-1][len(_HEADER) + 2] = "100.0%"
    if cost is not None:
        rows[-2] += ["", ""]
        rows[-1] += _compared(seconds, None if cost.seconds is None else np.array([cost.seconds]))
    lines = aligned(rows)
    lines.insert(1, "-" * max(map(len, lines)))
    lines.insert(-1, lines[1])
    lines += ["", f"a step: {1e3 * step:.3g} ms in the mean of the workers, {1e3 * seconds.max():.3g} on the slowest"]
    if not matched:
        lines.append("- some messages could not be matched with their partners', so their waiting counts as transfer")
    return "\n".join(line.rstrip() for line in (*lines, *_blamed(layers, waited_for)))


def _row(title: str, forward: np.ndarray, backward: np.ndarray, times: PassTimes, step: float) -> list[str]:
    waiting = " ".join(number(1e3 * of(times.waiting)) for of in (np.min, np.mean, np.max))
    means = (number(1e3 * each.mean()) for each in (forward, backward, times.packing, times.transfer))
    took = forward + backward + times.packing + times.transfer + times.waiting
    share = f"{took.mean() / step:.1%}" if step else ""
    amounts = f"{times.messages.max():.4g}", number(times.bytes.max() / 1e6)
    return [title, *means, waiting, number(1e3 * times.hidden.mean()), *amounts, share]


def _compared(seconds: np.ndarray, estimate: np.ndarray | None) -> list[str]:
    """Return what was estimated, and how much of it the time is."""
    if estimate is None or not estimate.mean():
        return ["", ""]
    return [number(1e3 * estimate.mean()), f"{seconds.mean() / estimate.mean():.2f}"]


def _blamed(layers: Sequence[LayerProfile], waited_for: np.ndarray) -> list[str]:
    """Say which workers the others waited for, and in which layers most."""
    total = float(waited_for.sum())
    lines = []
    for worker in np.argsort(-waited_for.sum(0), kind="stable")[:3]:
        share = float(waited_for[:, worker].sum()) / total if total else 0.0
        if share < OFTEN:
            continue
        most = sorted(layers, key=lambda layer: -layer.waited_for[:, worker].sum())[:2]
        where = " and ".join(f"`{layer.title}`" for layer in most if layer.waited_for[:, worker].sum() > 0)
        lines.append(f"- worker {worker} is waited for in {share:.0%} of all waiting, most in {where}")
    return lines

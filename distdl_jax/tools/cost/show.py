"""The cost of a step as rows of a table, as JSON, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from distdl_jax.text import Drawing, aligned, number
from distdl_jax.tools.cost.amounts import Amounts
from distdl_jax.tools.draw.bars import bars

VERSION = 2
"""Of the form of the JSON."""

COLUMNS = ("Mflop", "messages", "MB sent", "MB stored")
"""Of the table: what the worker that has most computes, sends and stores."""

ESTIMATE = "estimated ms"
NOTE = "The estimate is a third off, more or less: not for ranking partitions."


@dataclass(frozen=True, eq=False)
class LayerCost:
    """What one layer costs.

    - `place`, `name`: where it is in the network, "3.body.0", and its class.
    - `amounts`: what each worker stores, computes and sends for it.
    - `seconds`: of each worker, an estimate; None without a machine.
    """

    place: str
    name: str
    amounts: Amounts
    seconds: np.ndarray | None = None

    @property
    def title(self) -> str:
        """Its place and its class: "3.body.0 DistributedConv2d"."""
        return f"{self.place} {self.name}".strip()

    def numbers(self, activations: np.ndarray) -> list[float]:
        """Return its entries in the columns, of the worker that has most; `activations`: bytes that it keeps."""
        stored = self.amounts.parameters + self.amounts.gradients + self.amounts.optimiser + activations
        return in_columns(self.amounts, stored.max())


def in_columns(amounts: Amounts, stored: int) -> list[float]:
    """Return the entries of a row, of the worker that has most, with the bytes that it stores."""
    return [amounts.flops.max() / 1e6, amounts.operations.max(), amounts.bytes.max() / 1e6, stored / 1e6]


def table(
    layers: Sequence[LayerCost], activations: Mapping[str, np.ndarray], total: Sequence[float], seconds: float | None
) -> str:
    """Return a row for each layer, and `total`, the entries of the last one."""
    rows = [["layer", *COLUMNS]]
    rows += ([layer.title, *map(number, layer.numbers(activations[layer.place]))] for layer in layers)
    rows.append(["all layers", *map(number, total)])
    if seconds is not None:
        each = [layer.seconds.max() for layer in layers if layer.seconds is not None]
        for row, cell in zip(rows, (ESTIMATE, *(number(1e3 * one) for one in (*each, seconds))), strict=True):
            row.append(cell)
    lines = aligned(rows)
    lines.insert(1, "-" * max(map(len, lines)))
    lines.insert(-1, lines[1])
    return "\n".join(line.rstrip() for line in [*lines, *([] if seconds is None else ["", NOTE])])


def picture(layers: Sequence[LayerCost], activations: Mapping[str, np.ndarray], text: str) -> Drawing:
    """Return a picture with `text`: a row for each layer, whose bar is its share of what all layers take."""
    numbers = np.array([layer.numbers(activations[layer.place]) for layer in layers])
    shares = numbers / np.maximum(numbers.sum(0), 1e-30)
    rows = [
        ([layer.title, *map(number, entries)], [share[0], share[2], share[3]])
        for layer, entries, share in zip(layers, numbers, shares, strict=True)
    ]
    parts = ("share of flops", "of bytes sent", "of bytes stored")
    return Drawing(bars("A training step", ["layer", *COLUMNS], rows, parts).svg, text)


def to_json(
    layers: Sequence[LayerCost], activations: Mapping[str, np.ndarray], workers: Amounts, seconds: float | None
) -> str:
    """Return all numbers, by the names of the attributes; arrays are lists with an entry for each worker."""
    return json.dumps(
        {
            "version": VERSION,
            "workers": _lists(workers),
            "seconds": seconds,
            "layers": [
                {
                    "place": layer.place,
                    "name": layer.name,
                    "amounts": _lists(layer.amounts),
                    "activations": activations[layer.place].tolist(),
                    "seconds": None if layer.seconds is None else layer.seconds.tolist(),
                }
                for layer in layers
            ],
        }
    )


def _lists(amounts: Amounts) -> dict[str, list[int]]:
    return {field.name: getattr(amounts, field.name).tolist() for field in fields(amounts)}

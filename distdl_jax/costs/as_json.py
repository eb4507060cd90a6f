"""The cost of a step as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from distdl_jax.costs.amounts import Amounts
from distdl_jax.costs.layer_cost import LayerCost
from distdl_jax.costs.times import Interval, Times

VERSION = 1
"""Of the form of the JSON."""


def to_json(layers: Sequence[LayerCost], total: Amounts, once: Times | None, seconds: Interval | None) -> str:
    """Return all numbers, by the names of the attributes; arrays are lists with an entry for each worker."""
    return json.dumps(
        {
            "version": VERSION,
            "workers": _lists(total),
            "seconds": None if seconds is None else seconds._asdict(),
            "once": _lists(once),
            "layers": [
                {
                    "place": layer.place,
                    "name": layer.name,
                    "amounts": _lists(layer.amounts),
                    "times": _lists(layer.times),
                }
                for layer in layers
            ],
        }
    )


def _lists(numbers: Amounts | Times | None) -> dict[str, Any] | None:
    if numbers is None:
        return None
    return {field.name: getattr(numbers, field.name).tolist() for field in fields(numbers)}

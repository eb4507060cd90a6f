"""The docstrings of a family of layers over 1 to 4 feature dimensions, from one template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import Template
from typing import Any, TypeVar

from distdl_jax.text import documented

C = TypeVar("C", bound=type)

GRIDS = ("4", "2, 2", "2, 2, 1", "2, 1, 2, 1")
LENGTHS = ("9", "9, 8", "9, 8, 4", "9, 8, 4, 6")


def in_dimensions(template: str, **values: str | Sequence[str]) -> Callable[[C], C]:
    """Return a decorator that completes the docstring of a layer by `template`, for the number of its `dims`.

    For D dimensions the template has these names, besides the class's `$name`:

    - `$D`: D, as in `DistributedConv${D}d`.
    - `$n`, `$m`, `$k`, `$P`, `$Q`: the product n_{D-1} x ... x n_0, and so on; `$ones`: of ones.
    - `$grid`, `$lengths`: for an example, the workers along the features, and the features' lengths; `$unit`,
      `$threes`: as many ones and threes.
    - the names of `values`: a text that may itself use all of these, or one text for each of D = 1, 2, ...
    """
    fixed = {name: value.strip("\n") for name, value in values.items() if isinstance(value, str)}
    of_dims = {"grid": GRIDS, "lengths": LENGTHS} | {k: texts for k, texts in values.items() if k not in fixed}

    def complete(layer: C) -> C:
        cls: Any = layer
        D: int = cls.dims
        filled = {letter: " x ".join(f"{letter}_{d}" for d in reversed(range(D))) for letter in "nmkPQ"}
        filled |= {"D": str(D), "ones": " x ".join("1" * D), "unit": ", ".join("1" * D), "threes": ", ".join("3" * D)}
        filled |= {name: texts[D - 1] for name, texts in of_dims.items()}
        return documented(Template(template).safe_substitute(fixed), **filled)(layer)

    return complete

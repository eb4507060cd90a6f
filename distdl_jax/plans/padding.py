"""Padding modes: the entry inside of a tensor that stands for a position outside of it, along one dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import numpy as np

PaddingMode = Literal["zeros", "circular", "reflect", "replicate"]
"""The modes of windows, by PyTorch's names for convolutions."""

WINDOW_MODES: tuple[PaddingMode, ...] = get_args(PaddingMode)
PAD_MODES = ("constant", "reflect", "replicate", "circular")
"""The modes of a padding of its own, by the names of PyTorch's `functional.pad`."""

SAMPLE_MODES = ("zeros", "border", "reflection")
"""The modes of samples at positions between entries, by the names of PyTorch's `grid_sample`."""


def fills(mode: str) -> bool:
    """Say whether entries near the boundary fill the padding: not zeros, nor those of the other end."""
    return mode in ("reflect", "replicate")


def widest(mode: str, n: int) -> int | None:
    """Return the largest padding at an end of a dimension of length `n`; None without a limit.

    >>> widest("circular", 5), widest("reflect", 5), widest("replicate", 5), widest("replicate", 0)
    (5, 4, None, 0)
    """
    return {"circular": n, "reflect": max(n - 1, 0), "replicate": None if n else 0}.get(mode)


def filled_from(mode: str, positions: np.ndarray, n: int) -> np.ndarray:
    """Return the entry, of n, that fills each of `positions`, in a mode that `fills`.

    >>> import numpy as np
    >>> filled_from("reflect", np.arange(-2, 5), 3).tolist(), filled_from("replicate", np.arange(-2, 5), 3).tolist()
    ([2, 1, 0, 1, 2, 1, 0], [0, 0, 0, 1, 2, 2, 2])
    """
    return positions.clip(0, n - 1) if mode == "replicate" or n <= 1 else reflected(positions, 0, n - 1)


def reflected(positions: Any, low: float, high: float) -> Any:
    """Return `positions`, an array of numpy or JAX, reflected at `low` and `high` as often as needed to lie between.

    A position that goes up from `low` comes back from `high`: it is periodic in twice their distance, which is above 0.
    """
    width = high - low
    return high - abs(abs(positions - low) % (2 * width) - width)

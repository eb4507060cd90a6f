"""Work on every worker of a planning world, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import distdl_jax as dj


def on_all(size: int, work: Callable[[dj.Partition], Any]) -> list[Any]:
    """Return what `work` gives on each worker, from that worker's partition of all `size`."""
    return [work(dj.planning_world(size, rank)) for rank in range(size)]


def refusal(size: int, work: Callable[[dj.Partition], Any], kind: type[Exception]) -> str:
    """Return the one sentence with which `work` raises `kind` on every worker."""
    sentences = set()
    for rank in range(size):
        try:
            result = work(dj.planning_world(size, rank))
        except kind as error:
            sentences.add(str(error))
        else:
            raise AssertionError(f"worker {rank} did not raise but got {result!r}")
    (sentence,) = sentences
    return sentence


def refused(size: int, *rows: tuple[str, type[Exception], Callable[[dj.Partition], Any]]) -> None:
    """Check for each row that its words are in the one sentence with which its work raises its kind."""
    for words, kind, work in rows:
        sentence = refusal(size, work, kind)
        assert words in sentence, f"{words!r} is not in: {sentence}"

"""Worlds without MPI: one process works out the partitions of every worker, each as that worker would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distdl_jax.partition import Partition
from distdl_jax.planning import planning_world


def partition_of(rank: int, size: int) -> Partition:
    """The first partition of an imaginary world of `size` workers, as the worker `rank` sees it."""
    return planning_world(size, rank)


def on_all(size: int, work: Callable[[Partition], Any]) -> list[Any]:
    """What `work` gives on each worker of an imaginary world, from that worker's partition of all of them."""
    return [work(partition_of(rank, size)) for rank in range(size)]


def refusal(size: int, work: Callable[[Partition], Any], kind: type[Exception]) -> str:
    """The one sentence with which `work` raises `kind` on every worker."""
    sentences = set()
    for rank in range(size):
        try:
            result = work(partition_of(rank, size))
        except kind as error:
            sentences.add(str(error))
        else:
            raise AssertionError(f"worker {rank} did not raise but got {result!r}")
    (sentence,) = sentences
    return sentence

"""The library's log: the standard library's, under the name `distdl_jax`, with the worker in each line."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from mpi4py import MPI


class _OfThisWorker(logging.LoggerAdapter[logging.Logger]):
    """Puts the worker in front of each line; where there is one alone, nothing."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        size = MPI.COMM_WORLD.Get_size()
        return (f"worker {MPI.COMM_WORLD.Get_rank()} of {size}: {msg}" if size > 1 else msg), kwargs


log = _OfThisWorker(logging.getLogger("distdl_jax"))
"""INFO: worlds, communicators and compared plans; DEBUG: every agreement."""

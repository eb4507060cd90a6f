"""The library's log: the standard library's, under the name `distdl_jax`, with the worker in each line."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from distdl_jax.watchdog.status import worker_status


class _OfThisWorker(logging.LoggerAdapter[logging.Logger]):
    """Puts the worker in front of each line; nothing where there is only one."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        status = worker_status()
        return (f"worker {status.rank} of {status.size}: {msg}" if status.size > 1 else msg), kwargs


log = _OfThisWorker(logging.getLogger("distdl_jax"))
"""INFO: worlds, communicators and compared plans; DEBUG: every agreement."""

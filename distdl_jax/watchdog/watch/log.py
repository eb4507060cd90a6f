"""The library's log: the standard library's, under the name `distdl_jax`, with the worker in each line."""

from __future__ import annotations

import logging

from distdl_jax.watchdog.watch.status import worker_status


class _WorkerFilter(logging.Filter):
    """Prefixes each line with the worker, if there are several."""

    def filter(self, record: logging.LogRecord) -> bool:
        status = worker_status()
        if status.size > 1:
            record.msg = f"worker {status.rank} of {status.size}: {record.msg}"
        return True


log = logging.getLogger("distdl_jax")
"""INFO: worlds, communicators and compared plans; DEBUG: every agreement."""
log.addFilter(_WorkerFilter())

"""A process of its own that does some work once for each line that it is sent, as the ways of a benchmark need it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

MPI_AND_XLA = ("PMI", "MPI", "OMPI", "PRTE", "HYDRA", "NPROC", "XLA_FLAGS")


class Asked:
    """`command` without MPI, which gets `description` as a line of JSON first; `run` waits for its work to be done."""

    def __init__(self, command: Sequence[str], description: Any, **environment: str) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(MPI_AND_XLA)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**inherited, **environment}
        )
        self._ask(json.dumps(description))

    def run(self) -> None:
        self._ask("run")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        if not self._process.stdout.readline():
            raise RuntimeError(f"the process {self._process.args!r} has ended")


def serve(prepare: Callable[[Any], Callable[[], object]]) -> None:
    """Be such a process: `prepare` makes the work of the description."""
    work = prepare(json.loads(sys.stdin.readline()))
    print("ready", flush=True)
    for _ in sys.stdin:
        work()
        print("done", flush=True)

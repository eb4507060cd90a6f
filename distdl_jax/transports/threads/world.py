"""The world of one worker that is a thread."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

from distdl_jax.errors import SetupError
from distdl_jax.jax_compat import wait_for_program
from distdl_jax.tracing.world import Workers, World
from distdl_jax.transports.nan_check import refuse_to_run_again
from distdl_jax.transports.threads.current_world import simulated_world
from distdl_jax.transports.threads.participant import AGREEMENT
from distdl_jax.transports.threads.rendezvous import Rendezvous
from distdl_jax.transports.threads.transport import ThreadTransport
from distdl_jax.watchdog.programs.ir import Operation, Place, Program
from distdl_jax.watchdog.source_lines import user_line


class ThreadWorld:
    """Worker `rank` of those that meet at `rendezvous`.

    - `stands_for`: the world whose partitions are used in its place; None for those of the program alone.
    """

    def __init__(self, rank: int, rendezvous: Rendezvous, stands_for: World | None = None) -> None:
        self.stands_for = stands_for
        self.rank = rank
        self.size = len(rendezvous.workers)
        self.transport = ThreadTransport(rank, rendezvous)
        self.calls = None  # where its workers stand still is known without
        self.may_measure = False  # the other workers compute in this process, too
        self.records = False
        self._rendezvous = rendezvous

    def agree(
        self, team: Workers, label: str, contribution: Any, decide: Callable[[dict[int, Any]], Any] = dict
    ) -> Any:
        if simulated_world.value is not self:
            raise SetupError(
                f"A partition that worker {self.rank} of dj.simulate has made is used by another worker, or outside: "
                "every worker must make its own, in the program that it runs and not in a variable that all share."
            )
        if len(team) == 1:
            return decide({self.rank: contribution})
        refuse_to_run_again(self.rank)
        # A program whose inputs are copied from elsewhere runs once they are there, in another thread.
        wait_for_program(self.transport.effect)
        operation = Operation(AGREEMENT, team, op=label, place=Place(user_line()))
        # Pickled, as between processes: no worker holds an object that another may change.
        gathered = self._rendezvous.perform(self.rank, operation, pickle.dumps(contribution))
        if self.rank != team[0]:
            return pickle.loads(gathered)
        others = {worker: pickle.loads(packed) for worker, packed in gathered.items() if worker != self.rank}
        decision = decide({self.rank: contribution, **others})
        self._rendezvous.tell(team, pickle.dumps(decision))
        return decision

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Keep nothing: where workers stand still, their operations are known."""

    def check_devices(self) -> None:
        """Accept any devices: every worker has one of its own."""

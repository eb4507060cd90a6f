"""A world for planning alone: one process works out the partitions and plans of any worker of any number of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from distdl_jax.errors import SetupError
from distdl_jax.programs.ir import Program
from distdl_jax.world import Transport, Workers


class PlanningWorld:
    """Worker `rank` of `size`, without the others: partitions and plans are made as in a real world, no data moves."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.may_measure = False

    @property
    def transport(self) -> Transport:
        """None: raises `SetupError`."""
        self._refuse()

    def agree(
        self, team: Workers, label: str, contribution: Any, decide: Callable[[dict[int, Any]], Any] = dict
    ) -> Any:
        """Nobody to agree with: raises `SetupError`."""
        self._refuse()

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Keep nothing: nothing runs here."""

    def check_devices(self) -> None:
        """Accept any devices: nothing runs here."""

    def _refuse(self) -> NoReturn:
        raise SetupError("This world was made for planning, without other workers: no data can move in it.")

"""What one layer costs."""

from __future__ import annotations

from dataclasses import dataclass

from distdl_jax.costs.amounts import Amounts
from distdl_jax.costs.times import Times


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs.

    - `place`, `name`: where it is in the network, "3.body.0", and its class.
    - `amounts`: what each worker stores, computes and sends for it.
    - `times`: its seconds on each worker; None without a machine.
    """

    place: str
    name: str
    amounts: Amounts
    times: Times | None = None

    @property
    def title(self) -> str:
        """Its place and its class: "3.body.0 DistributedConv2d"."""
        return f"{self.place} {self.name}".strip()

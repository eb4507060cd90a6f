"""The grids of all layers of a network, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdl_jax.advice.graph import Shape


@dataclass(frozen=True)
class Placement:
    """A grid for each described layer, and what they cost together.

    - `seconds`: of a training step, as the model foresees.
    - `memory`: bytes that the worker stores that stores most: parameters, gradients, the optimiser's numbers and saved
      activations; without the temporaries of the layer that is computed.
    - `grids`: by place, as "3", or "3.1" within a skip.
    """

    seconds: float
    memory: int
    grids: dict[str, Shape] = field(hash=False)

    def __str__(self) -> str:
        return f"{seconds_text(self.seconds)}, {memory_text(self.memory)}"


def seconds_text(seconds: float) -> str:
    """Return seconds to three digits.

    >>> seconds_text(0.0123), seconds_text(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def memory_text(nbytes: float) -> str:
    """Return bytes to three digits.

    >>> memory_text(3 * 2**29), memory_text(5000)
    ('1.5 GiB', '4.88 KiB')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes / 2**10:.3g} KiB"

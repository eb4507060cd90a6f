"""From which random key initial parameters were made, so that workers whose blocks are of different ones find out.

`init` sends nothing. It keeps a digest of its key, and the layer's next call, whose workers tell each other shapes and
dtypes anyway, compares it with that of the others who hold blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import jax
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike

from distdl_jax.errors import PlanError
from distdl_jax.tensors import TensorSpec
from distdl_jax.watchdog.status import WorkerStatus, worker_status

REMEMBERED = 16
"""How many of the last keys are kept that equal parameters were made from. A worker may make some for itself."""

Origin = tuple[int, str]
"""The digest of a key; and of what dtype, by which initializers."""


@dataclass(frozen=True)
class Origins:
    """Those of one worker's parameters, the last one last; none where it holds none, or they are not known.

    They are no part of what workers must agree on to trace alike.
    """

    found: tuple[Origin, ...] = field(default=(), compare=False)


_of_worker: WeakKeyDictionary[WorkerStatus, dict[Hashable, deque[Origin]]] = WeakKeyDictionary()


def remember_origin(
    specs: Mapping[str, TensorSpec], key: Array, dtype: DTypeLike, initializers: Mapping[str, Callable[..., Any]]
) -> None:
    """Keep of what parameters of these `specs` were made; of a key that is traced nothing is known."""
    if all(0 in spec.local_shape for spec in specs.values()):
        return
    known = _of_worker.setdefault(worker_status(), {})
    if isinstance(key, Tracer):
        known.pop(_name(specs), None)
        return
    with jax.ensure_compile_time_eval():  # a key that a trace closes over is known
        digest = crc32(np.asarray(jax.random.key_data(key)).tobytes())
    how = f"{np.dtype(dtype).name} by {', '.join(_initializer(initializers[name]) for name in sorted(specs))}"
    known.setdefault(_name(specs), deque(maxlen=REMEMBERED)).append((digest, how))


def origins_of(specs: Mapping[str, TensorSpec]) -> Origins:
    """Those of this worker's parameters of these `specs`."""
    return Origins(tuple(_of_worker.get(worker_status(), {}).get(_name(specs), ())))


def check_origins(layer: str, told: Mapping[int, Origins]) -> None:
    """Refuse parameters that were made from different keys, in the same words on all workers.

    **Raises:** `PlanError`.
    """
    known = {worker: origins.found for worker, origins in sorted(told.items()) if origins.found}
    if len(known) < 2:
        return
    (first, reference), *others = known.items()
    for worker, found in others:
        if not set(found).isdisjoint(reference):
            continue
        if {key for key, _ in found}.isdisjoint(key for key, _ in reference):
            raise PlanError(
                f"`init` of {layer} had another `key` on worker {worker} than on worker {first}, so the weights are "
                "a mixture. Give it the same key on all workers: it takes care itself that their blocks differ."
            )
        raise PlanError(
            f"`init` of {layer} made the parameters in {reference[-1][1]} on worker {first}, but in {found[-1][1]} on "
            f"worker {worker}. Give it the same dtype and initializers on all workers."
        )


def _name(specs: Mapping[str, TensorSpec]) -> Hashable:
    return frozenset(specs.items())


def _initializer(initializer: Callable[..., Any]) -> str:
    return getattr(initializer, "__qualname__", type(initializer).__qualname__)

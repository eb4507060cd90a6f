"""Model-parallel deep learning for JAX over MPI.

Tensors are split over partitions of workers, data moves between partitions by primitives with exact adjoints, and
distributed layers match the sequential ones block for block.
"""

from __future__ import annotations

import sys
from _thread import RLock
from importlib import import_module

TYPE_CHECKING = False  # `typing` would come from the folder in which `python -m distdl_jax` is called
if TYPE_CHECKING:
    from typing import Any

    from distdl_jax import checkpoint, data, functional, graphs, nn, optim, random, solvers
    from distdl_jax.distribute.function import distribute
    from distdl_jax.distribute.map_blocks import map_blocks
    from distdl_jax.distribute.marks import constrain, with_rule
    from distdl_jax.distribute.meanings import BLOCKS, COPIES, PARTS, VARIABLE
    from distdl_jax.errors import (
        CheckpointError,
        CopiesWarning,
        DistDLError,
        InvalidArgumentError,
        InvalidTypeError,
        PlanError,
        SetupError,
    )
    from distdl_jax.functional.all_reduce import all_reduce
    from distdl_jax.functional.copies import check_replicated, part, replicated
    from distdl_jax.functional.gathering import gather, scatter
    from distdl_jax.nn.from_torch import from_torch
    from distdl_jax.partitions.initialization import init, init_block
    from distdl_jax.partitions.optimizer_specs import specs_like, training_specs
    from distdl_jax.partitions.partition import CartesianPartition, Partition
    from distdl_jax.partitions.planning import planning_world
    from distdl_jax.partitions.tensors import TensorSpec, zero_volume_tensor
    from distdl_jax.plans.shape_dtype import ShapeDtype
    from distdl_jax.tools.cost.cost import cost
    from distdl_jax.tools.draw.draw import draw
    from distdl_jax.tools.profile.profile import profile
    from distdl_jax.transforms.checked_jit import check, jit
    from distdl_jax.transforms.forward_mode import hvp, jvp, linear_transpose, linearize
    from distdl_jax.transforms.gradients import grad, value_and_grad
    from distdl_jax.transforms.map_overlap import map_overlap
    from distdl_jax.transforms.totals import total
    from distdl_jax.transports.open_world import close
    from distdl_jax.transports.progress import progress
    from distdl_jax.transports.threads.simulate import simulate

# The module of each public name. It is imported when the name is first requested: the supervisors of `python -m
# distdl_jax` need none of it, nor JAX.
_MODULES = {
    "": ("checkpoint", "data", "functional", "graphs", "nn", "optim", "random", "solvers"),
    "transforms.forward_mode": ("hvp", "jvp", "linear_transpose", "linearize"),
    "transforms.gradients": ("grad", "value_and_grad"),
    "transports.threads.simulate": ("simulate",),
    "transports.open_world": ("close",),
    "distribute.map_blocks": ("map_blocks",),
    "distribute.function": ("distribute",),
    "distribute.marks": ("constrain", "with_rule"),
    "distribute.meanings": ("BLOCKS", "COPIES", "PARTS", "VARIABLE"),
    "transforms.checked_jit": ("check", "jit"),
    "transforms.map_overlap": ("map_overlap",),
    "errors": (
        "CheckpointError",
        "CopiesWarning",
        "DistDLError",
        "InvalidArgumentError",
        "InvalidTypeError",
        "PlanError",
        "SetupError",
    ),
    "functional.gathering": ("gather", "scatter"),
    "partitions.initialization": ("init", "init_block"),
    "partitions.optimizer_specs": ("specs_like", "training_specs"),
    "partitions.partition": ("CartesianPartition", "Partition"),
    "partitions.planning": ("planning_world",),
    "plans.shape_dtype": ("ShapeDtype",),
    "functional.all_reduce": ("all_reduce",),
    "functional.copies": ("check_replicated", "part", "replicated"),
    "tools.profile.profile": ("profile",),
    "transports.progress": ("progress",),
    "transforms.totals": ("total",),
    "tools.cost.cost": ("cost",),
    "tools.draw.draw": ("draw",),
    "partitions.tensors": ("TensorSpec", "zero_volume_tensor"),
    "nn.from_torch": ("from_torch",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_importing = RLock()

_NO_SECONDS = (
    "print dj.cost(network, x_spec).table(bandwidth='10 GB/s', latency='2 us') for a lower bound of waiting, and time "
    "steps in the job"
)
# Names of the version before, and what to write in place of them. They go with the next version.
_REMOVED = {
    "advise": "count with dj.cost, and time a few partitions in the job, as docs/how-to/choose-a-partition.md shows",
    "machine": _NO_SECONDS,
    "Machine": _NO_SECONDS,
}

__all__ = [
    "BLOCKS",
    "COPIES",
    "PARTS",
    "VARIABLE",
    "CartesianPartition",
    "CheckpointError",
    "CopiesWarning",
    "DistDLError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "Partition",
    "PlanError",
    "SetupError",
    "ShapeDtype",
    "TensorSpec",
    "all_reduce",
    "check",
    "check_replicated",
    "checkpoint",
    "close",
    "constrain",
    "cost",
    "data",
    "distribute",
    "draw",
    "from_torch",
    "functional",
    "gather",
    "grad",
    "graphs",
    "hvp",
    "init",
    "init_block",
    "jit",
    "jvp",
    "linear_transpose",
    "linearize",
    "map_blocks",
    "map_overlap",
    "nn",
    "optim",
    "part",
    "planning_world",
    "profile",
    "progress",
    "random",
    "replicated",
    "scatter",
    "simulate",
    "solvers",
    "specs_like",
    "total",
    "training_specs",
    "value_and_grad",
    "with_rule",
    "zero_volume_tensor",
]
__version__ = "0.2.0"


class _Package(type(sys)):  # type: ignore[misc]
    """This module, in which `distribute` is the function: Python would replace it by the package of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "distribute" or not isinstance(value, type(sys)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name in _REMOVED:
        raise AttributeError(f"dj.{name} has been removed: {_REMOVED[name]}.")
    if (module := _MODULE_OF.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Threads that import modules of JAX at the same time may get them half made: they import each other in circles.
    with _importing:
        value = getattr(import_module(f"{__name__}.{module}"), name) if module else import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)

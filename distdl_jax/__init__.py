"""Model-parallel deep learning for JAX over MPI.

Tensors are split over partitions of workers, data moves between partitions by primitives with exact adjoints, and
distributed layers give block for block what the sequential layers give.
"""

from distdl_jax.process.collector import collector_resting
from distdl_jax.process.starting import starting

with collector_resting():
    with starting():
        from distdl_jax.process.at_import import prepare_process, stop_looking_at_imports

        prepare_process()

    from distdl_jax import checkpoint, data, functional, nn, optim, random
    from distdl_jax.autodiff.directional import hvp, jvp, linear_transpose, linearize
    from distdl_jax.autodiff.gradients import grad, value_and_grad
    from distdl_jax.backends.inprocess.simulate import simulate
    from distdl_jax.errors import (
        CheckpointError,
        DistDLError,
        InvalidArgumentError,
        InvalidTypeError,
        PlanError,
        SetupError,
    )
    from distdl_jax.from_torch import from_torch
    from distdl_jax.gathering import gather, scatter
    from distdl_jax.initialization import init_block
    from distdl_jax.jit import check, jit
    from distdl_jax.optimizer_specs import specs_like
    from distdl_jax.partition import CartesianPartition, Partition
    from distdl_jax.plans.shape_dtype import ShapeDtype
    from distdl_jax.primitives.all_reduce import all_reduce
    from distdl_jax.primitives.replicated import replicated
    from distdl_jax.replicas import check_replicated
    from distdl_jax.tensors import TensorSpec, zero_volume_tensor

    stop_looking_at_imports()

__all__ = [
    "CartesianPartition",
    "CheckpointError",
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
    "data",
    "from_torch",
    "functional",
    "gather",
    "grad",
    "hvp",
    "init_block",
    "jit",
    "jvp",
    "linear_transpose",
    "linearize",
    "nn",
    "optim",
    "random",
    "replicated",
    "scatter",
    "simulate",
    "specs_like",
    "value_and_grad",
    "zero_volume_tensor",
]
__version__ = "0.1.0"

"""Optimisers of split tensors: the parts of optax that need the whole tensor.

Everything elementwise in optax works on blocks unchanged. The transformations here are optax's, with norms and inner
products over all blocks. optax is imported only when one of them is made.
"""

from distdl_jax.optim.lbfgs import lbfgs, scale_by_lbfgs
from distdl_jax.optim.line_search import line_search, value_and_grad_from_state
from distdl_jax.optim.norms import adaptive_grad_clip, clip_by_global_norm, global_norm, scale_by_trust_ratio
from distdl_jax.optim.scaling import LossScale, accumulated, all_finite

__all__ = [
    "LossScale",
    "accumulated",
    "adaptive_grad_clip",
    "all_finite",
    "clip_by_global_norm",
    "global_norm",
    "lbfgs",
    "line_search",
    "scale_by_lbfgs",
    "scale_by_trust_ratio",
    "value_and_grad_from_state",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)

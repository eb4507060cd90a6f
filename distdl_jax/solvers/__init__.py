"""Solvers of equations for tensors that are split over workers: all workers take the same steps.

An inner product or a norm is the sum over all workers, so each of them leaves a loop after the same step. The
derivative is that of the solution, not of the steps: it solves one more equation.
"""

from distdl_jax.solvers.conjugate_gradients import cg
from distdl_jax.solvers.fixed_points import fixed_point
from distdl_jax.solvers.iteration import Info

__all__ = ["Info", "cg", "fixed_point"]

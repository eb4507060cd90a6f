"""Acoustic waves in a layered medium, in three dimensions, on a volume that is split over the workers.

The pressure u(x, t) in a medium of velocity c(x), from pulses that are let go at time 0:

    u_tt + 2 damping u_t = c^2 laplace u

Lengths are in cells. In time: leapfrog. In space: fourth order, two cells to each side, which a halo exchange brings
from the neighbours in every step. `damping` is 0 but in a sponge along the boundary, which swallows what arrives there.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SECOND_DERIVATIVE = (-1 / 12, 4 / 3, -5 / 2, 4 / 3, -1 / 12)
REACH = 2  # cells to each side
SLOWEST, FASTEST = 1.0, 2.0
TIME_STEP = 0.2  # stable below 0.5 / FASTEST
PULSE = 2.0  # their width


@dataclass(frozen=True)
class WaveSolver:
    """Waves in a cube of `size` cells a side, in balanced blocks on `P`, P_2 x P_1 x P_0; all workers are in P."""

    P: dj.CartesianPartition
    size: int
    dtype: str = "float32"

    @cached_property
    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the global indices of this worker's cells, along each dimension in the shape that broadcasts."""
        box = dj.TensorSpec((self.size,) * 3, self.P).box
        return tuple(np.ogrid[tuple(slice(*bounds) for bounds in box)])

    def medium(self, seed: int) -> jax.Array:
        """Draw this worker's block of the velocity: two to five layers, dipping and folded, faster or slower."""
        rng = np.random.default_rng(seed)
        z, y, x = (along / self.size for along in self.coordinates)
        velocity = np.full(np.broadcast_shapes(z.shape, y.shape, x.shape), rng.uniform(SLOWEST, FASTEST))
        for depth in np.sort(rng.uniform(0.15, 0.95, rng.integers(1, 5))):
            dip, fold, phase = rng.uniform(-0.3, 0.3, 2), rng.uniform(0, 0.08), rng.uniform(0, 2 * np.pi, 2)
            below = depth + dip @ [0.5, 0.5] - dip[0] * y - dip[1] * x
            below = below + fold * np.sin(2 * np.pi * y + phase[0]) * np.sin(2 * np.pi * x + phase[1])
            velocity = np.where(z > below, rng.uniform(SLOWEST, FASTEST), velocity)
        return jnp.asarray(velocity, self.dtype)

    def pulses(self, seed: int, count: int = 10) -> jax.Array:
        """Draw this worker's block of the pressure at time 0: Gaussian pulses, at random places."""
        rng = np.random.default_rng([seed, 1])
        pressure = np.zeros(np.broadcast_shapes(*(along.shape for along in self.coordinates)))
        for _ in range(count):
            centre, height = rng.uniform(0.15, 0.85, 3) * self.size, rng.uniform(-1, 1)
            distances = ((along - place) / PULSE for along, place in zip(self.coordinates, centre, strict=True))
            pressure = pressure + height * np.exp(-sum(distance**2 for distance in distances) / 2)
        return jnp.asarray(pressure, self.dtype)

    @cached_property
    def damping(self) -> np.ndarray:
        """Return this worker's block of the damping, which grows with the square of the depth in the sponge."""
        width = max(self.size / 10, 1)
        depths = [np.maximum(width - np.minimum(n, self.size - 1 - n), 0) / width for n in self.coordinates]
        return (0.4 * np.maximum.reduce(np.broadcast_arrays(*depths)) ** 2).astype(self.dtype)

    def snapshots(self, velocity: jax.Array, pulses: jax.Array, times: tuple[int, ...]) -> jax.Array:
        """Return this worker's block of u after each of `times`, ascending time steps: len(times) x block."""
        return _snapshots(self, velocity, pulses, times)

    def laplacian(self, u: jax.Array) -> jax.Array:
        """Compute the sum of the second derivatives; outside the volume u is 0."""
        wide = dj.functional.halo_exchange(u, self.P, ((REACH, REACH),) * 3)
        ends = zip(self.P.index, self.P.shape, strict=True)
        wide = jnp.pad(wide, [(REACH * (i == 0), REACH * (i == p - 1)) for i, p in ends])
        total = jnp.zeros_like(u)
        for axis in range(3):
            inside = [slice(REACH, -REACH)] * 3
            for offset, weight in enumerate(SECOND_DERIVATIVE):
                inside[axis] = slice(offset, offset + u.shape[axis])
                total += weight * wide[tuple(inside)]
        return total

    def step(self, u: jax.Array, before: jax.Array, velocity: jax.Array) -> jax.Array:
        """u one time step later, from u and u one time step before."""
        swallowed = TIME_STEP * self.damping
        pushed = (TIME_STEP * velocity) ** 2 * self.laplacian(u)
        return (2 * u - (1 - swallowed) * before + pushed) / (1 + swallowed)


@partial(jax.jit, static_argnums=(0, 3))
def _snapshots(solver: WaveSolver, velocity: jax.Array, pulses: jax.Array, times: tuple[int, ...]) -> jax.Array:
    def body(_: jax.Array, waves: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        u, before = waves
        return solver.step(u, before, velocity), u

    waves, found = (pulses, pulses), []  # at rest
    for start, stop in pairwise((0, *times)):
        waves = lax.fori_loop(start, stop, body, waves)
        found.append(waves[0])
    return jnp.stack(found)

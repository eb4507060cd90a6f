"""The default expert: two linear layers with an activation between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.partitions.initialization import UniformFanIn


class Expert(Protocol):
    """One expert: a function of its parameters and of tokens, the same for all experts but for the parameters.

    It is immutable and hashable, like layers. It runs on the worker that has the expert, under `jax.vmap`.
    """

    def init(self, key: Array, dtype: DTypeLike) -> dict[str, Array]:
        """Return the parameters of one expert, from its own random key."""

    def __call__(self, params: Any, tokens: Array) -> Array:
        """Return the output for tokens x features; some of the tokens are zeros, whose output is not read."""


@dataclass(frozen=True)
class MLP:
    """y = down activation(up x + up_bias) + down_bias, with weights in PyTorch's layout and its initial values."""

    features: int
    hidden: int
    activation: Callable[[Array], Array]

    def init(self, key: Array, dtype: DTypeLike) -> dict[str, Array]:
        """Return the parameters of one expert."""
        shapes = {"up": (self.hidden, self.features), "down": (self.features, self.hidden)}
        params = {}
        for (name, shape), key_of in zip(shapes.items(), jax.random.split(key), strict=True):
            uniform, keys = UniformFanIn(shape[1]), jax.random.split(key_of)
            params[f"{name}_weight"] = uniform(keys[0], shape, dtype)
            params[f"{name}_bias"] = uniform(keys[1], shape[:1], dtype)
        return params

    def __call__(self, params: Any, tokens: Array) -> Array:
        """Return the output, of the tokens' shape."""
        hidden = self.activation(tokens @ params["up_weight"].T + params["up_bias"])
        return jnp.asarray(hidden @ params["down_weight"].T + params["down_bias"])

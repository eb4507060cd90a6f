"""optax, which the rest of the library does without."""

from __future__ import annotations

from types import ModuleType

from distdl_jax.errors import SetupError


def optax_for(name: str) -> ModuleType:
    """The module optax, for `dj.optim.<name>`."""
    try:
        import optax
    except ImportError:
        raise SetupError(
            f"dj.optim.{name} needs optax, which is not installed: pip install optax, or distdl_jax[optim]."
        ) from None
    return optax

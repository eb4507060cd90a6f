"""What a training step of a network costs each worker, from its plans; and machines, for an estimate of seconds."""

from distdl_jax.tools.cost import machine

__all__ = ["machine"]

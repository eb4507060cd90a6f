"""The former home of pictures, until `costs` draws with `tools.draw`."""

from distdl_jax.text import Drawing

__all__ = ["Drawing"]

"""The library's contexts in the keys of all JAX caches: a jitted function has a program for each of their values.

They are made together. JAX counts them, too: a function that was traced before another one is made is traced again in
its next call, and if the module that makes it is imported on one worker only, on that worker alone.
"""

from __future__ import annotations

import jax

simulated_world = jax.make_user_context(None)
to_be_transposed = jax.make_user_context(False)
batch_sizes = jax.make_user_context(None)

"""Which simulated worker a thread is."""

from __future__ import annotations

import jax

simulated_world = jax.make_user_context(None)
"""The world of this thread's worker; None in a thread that is no worker of `dj.simulate`.

It is part of the key of every cache of JAX's: a jitted function that two workers share is traced and compiled for each.
"""

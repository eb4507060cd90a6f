"""Where a step's time goes: `profile` joins JAX's profiler with the scopes of layers, and workers with each other."""

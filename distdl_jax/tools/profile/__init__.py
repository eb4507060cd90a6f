"""The time of a step by layer: `profile` joins JAX's profiler with the scopes of layers, on all workers."""

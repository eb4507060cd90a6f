"""All that the library knows of how JAX traces: reading programs, the order of movements, checks while tracing."""

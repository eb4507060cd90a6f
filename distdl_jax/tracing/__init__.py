"""Everything about JAX's tracing: reading programs, the order of movements, checks while tracing."""

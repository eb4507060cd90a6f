"""Function transformations for users: jit, check, derivatives, functions of blocks."""

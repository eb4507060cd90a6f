"""What users wrap around functions: jit, check, derivatives, functions of blocks."""

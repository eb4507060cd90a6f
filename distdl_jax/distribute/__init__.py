"""Functions of whole arrays, run on blocks: layouts, the interpreter, and a rule for each primitive of JAX."""

"""Which partitions are fast: counted, a short list of them measured, and the fastest made a network."""

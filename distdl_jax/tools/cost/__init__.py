"""The cost of a network's training step on each worker, from its traced program; and machines."""

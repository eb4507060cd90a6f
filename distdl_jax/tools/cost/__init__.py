"""What a training step of a network costs each worker, from its traced program; and machines."""

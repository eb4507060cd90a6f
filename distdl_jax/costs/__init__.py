"""What a training step of a network costs each worker, foreseen from its plans."""

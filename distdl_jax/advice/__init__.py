"""Which partition each layer of a network should have, so that a training step is fast and fits the memory."""

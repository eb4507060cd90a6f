"""Linear layers, and layers of single entries: activations, dropout."""

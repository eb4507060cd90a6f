"""Linear layers, and elementwise layers: activations, dropout."""

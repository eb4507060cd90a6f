"""Layers of sequence models: embedding and attention."""

"""Layers that change the shape of a split tensor: sampling, padding, cropping, flattening, concatenation."""

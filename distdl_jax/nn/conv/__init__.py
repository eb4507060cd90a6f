"""Convolutions, transposed convolutions, and cells of convolutions."""

"""Convolutions, transposed convolutions, and convolutional cells."""

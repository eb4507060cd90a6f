"""Fourier transforms of split tensors, and the layers that work in their frequencies."""

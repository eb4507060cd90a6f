"""Fourier transforms of split tensors, and layers that work on their frequencies."""

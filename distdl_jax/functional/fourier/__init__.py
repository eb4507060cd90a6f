"""Fourier transforms of tensors whose transformed dimensions may be split."""

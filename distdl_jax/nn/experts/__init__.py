"""Mixtures of experts: routing, dispatch, and the layer."""

"""Layers made of layers: sequences, skips, pipelines, wrappers."""

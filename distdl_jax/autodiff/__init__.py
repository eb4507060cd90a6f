"""Derivatives of functions that move data: the same adjoints on all workers, forwards, backwards and again."""

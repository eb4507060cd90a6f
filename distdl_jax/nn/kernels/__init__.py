"""The arithmetic of one worker: convolutions, transposed convolutions and pooling.

This package knows nothing of workers or messages; from the library it imports only errors and settings. `cpu` has the
algorithms for CPUs, and is imported only there.
"""

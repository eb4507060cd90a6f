"""The arithmetic of one worker: convolutions, transposed convolutions and pooling.

Nothing here knows of workers or messages; of the library it imports errors and settings. `cpu` has the algorithms for
CPUs, which are not imported elsewhere.
"""

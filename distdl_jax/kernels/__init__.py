"""The arithmetic of one worker: convolutions, transposed convolutions and pooling.

This room knows nothing of workers or messages. From the library it imports only errors and settings.
"""

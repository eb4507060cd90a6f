"""The back-end in one process: every worker is a thread with its own CPU device."""

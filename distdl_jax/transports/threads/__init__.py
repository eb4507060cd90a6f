"""The back-end in one process: every worker is a thread with a CPU device of its own."""

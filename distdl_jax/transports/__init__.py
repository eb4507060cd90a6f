"""Back-ends: worlds of workers, and what carries arrays between them: over MPI, or between threads of one process."""

"""Back-ends: worlds of workers, and transport of arrays between them, over MPI or between threads."""

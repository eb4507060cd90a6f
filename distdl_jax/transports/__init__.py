"""Back-ends: how partitions and data movement are carried out. There is one, over MPI."""

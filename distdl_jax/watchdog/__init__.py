"""Detection of hangs, before programs run and while they do; starting and ending of processes."""

"""The arithmetic of one worker: what a layer computes between its movements."""
